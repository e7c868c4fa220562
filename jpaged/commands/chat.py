"""`jpaged chat MODEL`: a conversation in the terminal, answers as they come."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from jpaged.cli_options import ENGINE, SAMPLING, add_engine_arguments, add_sampling_arguments, pick
from jpaged.llm import LLM
from jpaged.sampling_params import RequestOutputKind, SamplingParams

HELP = """\
/help            this list
/new             begin a new conversation
/retry           answer the last message again
/system TEXT     what the model is told first; alone: nothing
/set NAME VALUE  a sampling parameter, as in: /set temperature 0.2; alone: show them
/stats           how the KV cache stands
/exit            or Ctrl-D
A line of three quotation marks begins and ends a message of several lines. Ctrl-C ends an answer."""
MIN_ANSWER = 64  # tokens that must be left for an answer, or the oldest turns are forgotten
QUOTES = '"""'


def add_chat(commands: argparse._SubParsersAction) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model. " + HELP.splitlines()[-1] + " /help lists the commands.",
        argument_default=argparse.SUPPRESS,
    )
    chat.set_defaults(run=run_chat)
    chat.add_argument("model", metavar="MODEL", help="a Hugging Face folder or hub id, or a .gguf file")
    chat.add_argument("--system-prompt", default="", metavar="TEXT", help="what the model is told first")
    add_sampling_arguments(chat.add_argument_group("sampling (default: as the model's checkpoint recommends)"))
    add_engine_arguments(chat.add_argument_group("engine"))


def run_chat(options: argparse.Namespace) -> None:
    given = vars(options)
    chosen = pick(given, SAMPLING)
    SamplingParams(**chosen)  # a bad value should not cost the time a model takes to load
    terminal = sys.stdout.isatty()
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history and keys to edit with)
    settings = {"max_num_seqs": 8, **pick(given, ENGINE)}  # one conversation: fewer programs to compile
    print(f"Loading {options.model} ...", file=sys.stderr, flush=True)
    llm = LLM(options.model, progress=sys.stderr.isatty(), **settings)
    defaults = dataclasses.replace(llm.default_sampling_params(), max_tokens=None, **chosen)
    chat = Chat(llm, defaults, options.system_prompt, Screen(sys.stdout, terminal))
    chat.screen.note("Ask something. /help lists the commands, Ctrl-D ends.")
    chat.run(lambda prompt: input(prompt if sys.stdin.isatty() else ""))


@dataclass
class Screen:
    """Where things are shown; in colours on a terminal."""

    out: TextIO
    colours: bool

    def note(self, text: str) -> None:
        """What is said by the program and not by the model."""
        print(f"\x1b[2m{text}\x1b[0m" if self.colours else text, file=self.out, flush=True)

    def piece(self, text: str) -> None:
        print(text, end="", file=self.out, flush=True)

    @property
    def prompt(self) -> str:
        # The marks tell readline that the colours take no room.
        return "\x01\x1b[1;36m\x02>>> \x01\x1b[0m\x02" if self.colours else ">>> "


@dataclass
class Chat:
    llm: LLM
    params: SamplingParams
    system: str
    screen: Screen
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self, read: Callable[[str], str]) -> None:
        """Read and answer until the end of the input."""
        while True:
            try:
                line = self._read_message(read)
            except EOFError:
                return
            except KeyboardInterrupt:
                self.screen.note("\n(Ctrl-D or /exit ends)")
                continue
            if line.startswith("/"):
                if line.split()[0] in ("/exit", "/quit"):
                    return
                try:
                    self._command(line)
                except ValueError as error:
                    self.screen.note(str(error))
            elif line.strip():
                self.turns.append({"role": "user", "content": line})
                self._answer()

    def _read_message(self, read: Callable[[str], str]) -> str:
        line = read(self.screen.prompt)
        if not line.strip().startswith(QUOTES):
            return line
        lines = [line.strip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(read("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                self.screen.note(HELP)
            case "/new":
                self.turns = []
                self.screen.note("A new conversation.")
            case "/system":
                self.system, self.turns = rest, []
                self.screen.note("A new conversation" + (f", told first: {rest}" if rest else "."))
            case "/retry":
                if self.turns and self.turns[-1]["role"] == "assistant":
                    self.turns.pop()
                if not self.turns:
                    raise ValueError("There is nothing to answer again.")
                self._answer()
            case "/set":
                self._set(*rest.split(maxsplit=1))
            case "/stats":
                blocks = self.llm.stats().blocks
                self.screen.note(
                    f"KV blocks: {blocks.used} used, {blocks.cached} cached, {blocks.free} free of {blocks.total}"
                )
            case _:
                raise ValueError(f"There is no command {name}; /help lists them.")

    def _set(self, name: str = "", value: str = "") -> None:
        if name:
            if name not in SAMPLING:
                raise ValueError(f"Parameters are {', '.join(SAMPLING)}.")
            old = getattr(SamplingParams(), name)
            new: Any = value if isinstance(old, tuple) else _read_number(name, value)
            if name == "stop_token_ids":
                new = [int(each) for each in value.split()]
            if isinstance(old, bool):
                new = value.lower() in ("true", "yes", "1")
            self.params = dataclasses.replace(self.params, **{name: new})
        self.screen.note("  ".join(f"{each}={getattr(self.params, each)}" for each in SAMPLING))

    def _answer(self) -> None:
        """Answer the last message; what was said is kept, also of an answer that was ended with Ctrl-C."""
        try:
            prompt, forgotten = self._prompt()
        except ValueError as error:
            self.turns.pop()
            self.screen.note(str(error))
            return
        if forgotten:
            self.screen.note(f"(the context is full: the oldest {forgotten} messages are forgotten)")
        params = dataclasses.replace(self.params, output_kind=RequestOutputKind.DELTA)
        start, first, count, reason, text = time.perf_counter(), None, 0, None, ""
        try:
            for output in self.llm.stream([prompt], params):
                piece = output.outputs[0]
                first = first if first is not None else time.perf_counter()
                count, reason, text = count + len(piece.token_ids), piece.finish_reason, text + piece.text
                self.screen.piece(piece.text)
        except KeyboardInterrupt:
            reason = "ended by you"
        self.screen.piece("\n")
        self.turns.append({"role": "assistant", "content": text})
        if first is not None:
            now = time.perf_counter()
            rate = f", {(count - 1) / (now - first):.0f} tokens/s" if count > 1 else ""
            limit = self.llm.config.max_model_len
            context = f"{len(prompt) + count} of {limit} tokens of context"
            ended = "" if reason == "stop" else f", {reason}"
            self.screen.note(f"{count} tokens, first after {first - start:.2f} s{rate}; {context}{ended}")

    def _prompt(self) -> tuple[list[int], int]:
        """(token ids, messages that were forgotten to make room)."""
        tokenizer, limit, forgotten = self.llm.get_tokenizer(), self.llm.config.max_model_len, 0
        for turns in self._shorter():
            forgotten = len(self.turns) - len(turns)
            told = [{"role": "system", "content": self.system}] if self.system else []
            ids = tokenizer.encode(tokenizer.apply_chat_template(told + turns), add_special_tokens=False)
            if len(ids) + min(MIN_ANSWER, limit // 4) <= limit:
                self.turns = turns
                return ids, forgotten
        raise ValueError(f"This message is too long for the model's context of {limit} tokens.")

    def _shorter(self) -> Iterator[list[dict[str, str]]]:
        """The conversation, then without its oldest question and answer, and so on."""
        for start in range(0, len(self.turns), 2):
            yield self.turns[start:]


def _read_number(name: str, value: str) -> int | float:
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, got {value!r}") from None
