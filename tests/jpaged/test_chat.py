"""The terminal chat, with a model that answers what it is told to."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from tiny import word_tokenizer

from jpaged import SamplingParams, cli
from jpaged.commands.chat import Chat, Screen
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.sampling_params import RequestOutputKind

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}w2"


class FakeLLM:
    """Answers every prompt with "w5 w6", a word at a time."""

    def __init__(self, limit: int = 64) -> None:
        self.tokenizer = word_tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        self.config = SimpleNamespace(max_model_len=limit)
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.interrupt = False

    def get_tokenizer(self):
        return self.tokenizer

    def stats(self):
        return SimpleNamespace(blocks=SimpleNamespace(used=0, cached=3, free=7, total=10))

    def stream(self, prompts, params):
        self.prompts += prompts
        self.params.append(params)
        for text, token, reason in (("w5", 5, None), (" w6", 6, "stop")):
            yield RequestOutput("0", None, [], outputs=[CompletionOutput(0, text, [token], finish_reason=reason)])
            if self.interrupt:
                raise KeyboardInterrupt


def talk(lines: list, llm: FakeLLM, *, system: str = "", colours: bool = False) -> tuple[Chat, str]:
    """The chat after it has read these lines, and what it showed."""
    out = io.StringIO()
    chat = Chat(llm, SamplingParams(max_tokens=None), system, Screen(out, colours))
    source = iter(lines)

    def read(prompt: str) -> str:
        line = next(source, None)
        if line is None:
            raise EOFError
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    chat.run(read)
    return chat, out.getvalue()


def test_a_conversation():
    llm = FakeLLM()
    chat, shown = talk(["w7", "", "w8 w9"], llm)
    assert [turn["content"] for turn in chat.turns] == ["w7", "w5 w6", "w8 w9", "w5 w6"]
    tokenizer = llm.tokenizer
    said = "user w7 assistant w5 w6 user w8 w9 w2"
    assert llm.prompts[1] == tokenizer.encode(said, add_special_tokens=False), "the whole conversation is the prompt"
    assert shown.startswith("w5 w6\n2 tokens, first after ") and "of 64 tokens of context" in shown
    assert llm.params[0].output_kind is RequestOutputKind.DELTA


def test_commands():
    llm = FakeLLM()
    lines = ["/system w9", "w7", "/retry", "/set temperature 0.5", "/set stop_token_ids 4 5", "/set", "/stats", "/help"]
    chat, shown = talk([*lines, "/new", "/retry", "/nothing", "/set colour 1", "/set top_k x", "/exit", "w8"], llm)
    first = llm.tokenizer.encode("system w9 user w7 w2", add_special_tokens=False)
    assert llm.prompts == [first, first], "an answer again, and nothing after the end"
    assert chat.turns == [] and chat.system == "w9"
    assert chat.params.temperature == 0.5 and chat.params.stop_token_ids == (4, 5)
    for expected in (
        "KV blocks: 0 used, 3 cached, 7 free of 10",
        "/retry           answer the last message again",
        "There is nothing to answer again.",
        "There is no command /nothing; /help lists them.",
        "Parameters are temperature, top_k",
        "top_k must be a number, got 'x'",
        "temperature=0.5",
    ):
        assert expected in shown


def test_several_lines():
    chat, _ = talk(['"""w7', "w8", 'w9"""', '"""w1"""'], FakeLLM())
    assert [turn["content"] for turn in chat.turns[::2]] == ["w7\nw8\nw9", "w1"]


def test_an_answer_can_be_ended():
    llm = FakeLLM()
    llm.interrupt = True
    chat, shown = talk([KeyboardInterrupt, "w7"], llm)
    assert chat.turns[-1] == {"role": "assistant", "content": "w5"} and "ended by you" in shown
    assert "(Ctrl-D or /exit ends)" in shown


def test_a_full_context_forgets_the_oldest():
    llm = FakeLLM(limit=24)
    chat, shown = talk(["w7 w7 w7 w7", "w8 w8 w8 w8", "w9 w9 w9 w9", "w1 " * 30], llm)
    assert "the oldest 2 messages are forgotten" in shown
    assert "This message is too long for the model's context of 24 tokens." in shown
    assert all(len(prompt) + 6 <= 24 for prompt in llm.prompts) and len(llm.prompts) == 3
    assert chat.turns[-1]["role"] == "assistant"


def test_colours_are_for_terminals():
    assert "\x1b[2m" in talk(["w7"], FakeLLM(), colours=True)[1]
    assert "\x1b" not in talk(["w7"], FakeLLM())[1]


def test_bad_options_are_found_before_a_model_is_loaded(capsys):
    assert cli.main(["chat", "no/such/model", "--temperature", "-1"]) == 1
    assert "jpaged chat: error: temperature must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["chat", "--help"], *(["bench", name, "--help"] for name in ("serve", "startup"))]
)
def test_help(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    assert "usage: jpaged" in capsys.readouterr().out
