"""Chat templates: Jinja programs from a checkpoint, rendered in a sandbox as transformers does."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """A chat template that does not parse, fails, or refuses the messages."""


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Callable[..., str]:
    """``render(messages, **variables) -> str``; raises ``ChatTemplateError`` for bad syntax."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template does not parse: {error}") from error

    def render(messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        check_messages(messages)
        try:
            return template.render(messages=list(messages), **variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error

    return render


def cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """A rendered conversation up to the end of its last message's content, as transformers cuts it.

    Raises ``ChatTemplateError`` if the content is not in the text (templates may drop or change it).
    """
    content = messages[-1].get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):  # a list of parts: the last text of them
        texts = [part["text"] for part in content if isinstance(part, Mapping) and "text" in part]
        content = texts[-1] if texts else None
    if not isinstance(content, str) or not content.strip():
        raise ChatTemplateError(f"continue_final_message needs a last message with text in it, got {content!r}")
    start = text.rfind(content.strip())
    if start < 0:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not show the last message as it is, so that it cannot be "
            f"continued: {content!r}"
        )
    # A template that keeps trailing spaces shows them before the end of the turn; others trim them.
    kept = content.lstrip()
    return text[: start + len(kept if text.startswith(kept, start) else content.strip())]


def check_messages(messages: Any) -> None:
    """Raises ``ValueError`` unless ``messages`` is a non-empty list of dicts with a role."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a non-empty list of {{'role', 'content'}} dicts, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be a dict with a 'role' string, got {message!r}")


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
