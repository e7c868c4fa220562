"""Tool parsers: what comes out does not depend on how the text was cut, and nothing a model wrote is lost."""

from __future__ import annotations

import json
import random

import pytest

from jpaged.server.tool_parsers import PARSERS, Arguments, ToolCall, detect_parser
from jpaged.server.tool_parsers.forced import NamedCall, RequiredCalls, schema_of_required

WEATHER = ToolCall("weather", '{"city": "Köln", "days": [1, 2]}')
TIME = ToolCall("time", "{}")
AS_JSON = '{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}'


def parse(name: str, pieces: list[str]) -> list:
    """Pieces of the output, content in a row joined."""
    parser = PARSERS[name]()
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    joined: list = []
    for piece in found:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


CASES = [
    ("hermes", "just text, 1 < 2", ["just text, 1 < 2"]),
    ("hermes", f"Let me see.\n<tool_call>\n{AS_JSON}\n</tool_call>", ["Let me see.\n", WEATHER]),
    (
        "hermes",
        f'<tool_call>{AS_JSON}</tool_call>\n<tool_call>\n{{"name": "time", "arguments": {{}}}}</tool_call>\n',
        [WEATHER, TIME],
    ),
    ("hermes", f"<tool_call>{AS_JSON}", [WEATHER]),
    ("hermes", "<tool_call>{broken</tool_call> so", ["<tool_call>{broken</tool_call> so"]),
    ("hermes", "<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
    ("hermes", "a <tool_ca", ["a <tool_ca"]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', [TIME]),
    ("llama3_json", "Hello {there}", ["Hello {there}"]),
    ("llama3_json", '{"name": "time", "parameters": {}}', [TIME]),
    ("llama3_json", f"<|python_tag|>{AS_JSON}; " + '{"name": "time", "parameters": {}}', [WEATHER, TIME]),
    ("llama3_json", '{"answer": 42} is it', ['{"answer": 42} is it']),
    ("llama3_json", '{"name": "time", "parameters": {}', ['{"name": "time", "parameters": {}']),
    ("llama3_json", '{"name": "time", "parameters": {}} and text', [TIME, " and text"]),
    ("mistral", "plain [text]", ["plain [text]"]),
    ("mistral", f"Wait.[TOOL_CALLS][{AS_JSON}, " + '{"name": "time", "arguments": {}}]', ["Wait.", WEATHER, TIME]),
    (
        "mistral",
        '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": [1, 2]}[TOOL_CALLS]time{}',
        [WEATHER, TIME],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "ti', ['[TOOL_CALLS][{"name": "ti']),
    ("mistral", "[TOOL_CALLS] nothing", ["[TOOL_CALLS] nothing"]),
    ("mistral", "a [TOOL", ["a [TOOL"]),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_formats(name, text, expected):
    assert parse(name, [text]) == expected
    assert parse(name, list(text)) == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(name, pieces) == expected


def test_content_is_not_held_back():
    assert PARSERS["hermes"]().feed("Hello <b> <tool") == ["Hello <b> "]
    assert PARSERS["mistral"]().feed("Hello [1] [TOOL") == ["Hello [1] "]
    parser = PARSERS["llama3_json"]()
    assert parser.feed("Hello") == ["Hello"] and parser.feed(" {") == [" {"]


def test_a_named_call_is_passed_on_as_it_comes():
    parser = NamedCall("weather")
    assert parser.feed("") == [] and parser.feed('{"ci') == [ToolCall("weather", '{"ci')]
    assert parser.feed('ty": 1}') == [Arguments('ty": 1}')] and parser.finish() == []
    assert NamedCall("weather").finish() == [ToolCall("weather", "")]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_required_calls(size):
    text = '[{"name":"weather","parameters":{"city": "Köln", "days": [1, 2]}} , {"name":"time","parameters":{}}]'
    parser = RequiredCalls()
    found = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
    assert found == [WEATHER, TIME] and parser.finish() == []
    cut = RequiredCalls()
    assert cut.feed(text[:-5]) == [WEATHER] and "time" in "".join(cut.finish())


def test_the_schema_of_required_calls_keeps_references():
    point = {"$ref": "#/$defs/Point"}
    parameters = {"type": "object", "properties": {"at": point}, "$defs": {"Point": {"type": "integer"}}}
    schema = json.loads(
        schema_of_required([{"name": "go", "parameters": parameters}, {"name": "stop"}], parallel=False)
    )
    assert schema["$defs"] == {"Point": {"type": "integer"}} and schema["maxItems"] == 1
    go, stop = schema["items"]["anyOf"]
    assert go["properties"]["parameters"] == {"type": "object", "properties": {"at": point}}
    assert stop["properties"]["name"] == {"type": "string", "enum": ["stop"]}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("...<tool_call>...", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
    ],
)
def test_a_template_shows_its_format(template, name):
    assert detect_parser(template) == name
