"""The command line, `jpaged`: each command is a function, the longer ones in `commands/`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
from jpaged_models import describe_backend

from jpaged.cli_options import ENGINE, SAMPLING, add_engine_arguments, add_sampling_arguments, pick
from jpaged.commands.bench import add_bench
from jpaged.commands.chat import add_chat
from jpaged.commands.plan import add_plan
from jpaged.commands.serve import add_serve
from jpaged.llm import LLM
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams

PACKAGES = ("jpaged", "jax", "jaxlib", "flax")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for what cannot be done, 130 if interrupted; bad usage exits 2."""
    options = make_parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"jpaged {options.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """All commands, each with its function in `run`."""
    parser = argparse.ArgumentParser(prog="jpaged", description="LLM inference in JAX with PagedAttention.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    version = commands.add_parser(
        "version",
        help="print versions, devices and the attention backend",
        description="Print the versions of jpaged and what it runs on: what a bug report needs.",
    )
    version.set_defaults(run=run_version)

    generate = commands.add_parser(
        "generate",
        help="continue prompts, or answer them",
        description="Continue prompts as one batch and print the outputs in their order.",
        epilog="Without --prompt and --input-file prompts are read from standard input, one a line.",
        argument_default=argparse.SUPPRESS,  # an option that is not given is not passed on
    )
    generate.set_defaults(run=run_generate)
    generate.add_argument("model", metavar="MODEL", help="a Hugging Face folder or hub id, or a .gguf file")
    add_prompt_arguments(generate.add_argument_group("prompts and output"))
    add_sampling_arguments(generate.add_argument_group("sampling (default: as the model's checkpoint recommends)"))
    add_engine_arguments(generate.add_argument_group("engine"))
    add_serve(commands)
    add_chat(commands)
    add_bench(commands)
    add_plan(commands)
    return parser


def add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    add("-i", "--input-file", metavar="FILE", help="a file with a prompt on each line that is not blank; - is stdin")
    add("--chat", action="store_true", help="put each prompt through the model's chat template, as a user's message")
    add("--json", action="store_true", help="print a JSON object a line: prompt, text, finish_reason, token_ids")


def run_version(options: argparse.Namespace) -> None:
    for name, value in describe_installation().items():
        print(f"{name:<10} {value}")


def describe_installation() -> dict[str, str]:
    """What a bug report needs to say: versions, devices, attention backend."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    found["Python"] = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    kinds = Counter(f"{device.platform}: {device.device_kind}" for device in jax.devices())
    found["devices"] = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    found["attention"] = describe_backend()
    return found


def run_generate(options: argparse.Namespace) -> None:
    given = vars(options)
    prompts = read_prompts(given.get("prompt", []), given.get("input_file"))
    chosen = pick(given, SAMPLING)
    SamplingParams(**chosen)  # a bad value should not cost the time a model takes to load
    progress = sys.stderr.isatty()
    # A batch or two need few of the programs, and compile them when they come to them.
    llm = LLM(options.model, warm_up=False, **pick(given, ENGINE))
    params = dataclasses.replace(llm.default_sampling_params(), **chosen)
    if "chat" in given:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(conversations, params, use_tqdm=progress)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=progress)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(format_json(prompt, output) if "json" in given else format_text(prompt, output, alone=len(prompts) == 1))


def read_prompts(prompts: Sequence[str], file: str | None) -> list[str]:
    """The prompts of the command line, then those of the file, or of standard input if there are none.

    Raises ValueError for no prompt at all, OSError or UnicodeDecodeError (a ValueError) for an unreadable file.
    """
    if file is None and not prompts:
        file = "-"
    text = ""
    if file is not None:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    found = [*prompts, *(line for line in text.split("\n") if line.strip())]
    if not found:
        raise ValueError("there is no prompt: give --prompt, --input-file, or lines on standard input")
    return found


def format_json(prompt: str, output: RequestOutput) -> str:
    completion = output.outputs[0]
    fields = {
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
    }
    return json.dumps(fields, ensure_ascii=False)


def format_text(prompt: str, output: RequestOutput, alone: bool) -> str:
    """The output as it is for one prompt; below its prompt where there are several."""
    text = output.outputs[0].text
    return text if alone else f">>> {prompt}\n{text}\n"
