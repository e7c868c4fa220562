"""The command line, on a checkpoint of the tiny model."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import socket
import sys

import jax
import pytest
from jpaged_models import GenerationDefaults, save_checkpoint
from tiny import greedy_reference, tiny_model, word_tokenizer

from jpaged import LLM, SamplingParams, cli
from jpaged.cli_options import ENGINE, pick
from jpaged.commands import serve
from jpaged.server.settings import ServerSettings

SIZES = ["--max-model-len", "64", "--block-size", "4", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    generation = GenerationDefaults(eos_token_ids=(2,), temperature=0.5, top_k=7)
    save_checkpoint(folder, dataclasses.replace(tiny_model(), tokenizer=word_tokenizer(), generation=generation))
    return str(folder)


def words(token_ids: list[int]) -> str:
    return "".join(f" w{token}" for token in token_ids if token != 2)


def test_prompts_from_the_command_line_and_a_file(checkpoint, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("w7\n\n  \nw8 w9 w10\n")
    prompts = ["--prompt", "w5 w6", "--prompt", "w11", "--input-file", str(file)]
    assert cli.main(["generate", checkpoint, *prompts, "--json", *GREEDY, *SIZES]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["w5 w6", "w11", "w7", "w8 w9 w10"]
    expected = [greedy_reference(ids, 6) for ids in ([5, 6], [11], [7], [8, 9, 10])]
    assert [line["token_ids"] for line in lines] == expected
    assert [line["text"] for line in lines] == [words(ids) for ids in expected]
    assert {line["finish_reason"] for line in lines} == {"length"}


def test_prompts_from_standard_input(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\n"))
    assert cli.main(["generate", checkpoint, *GREEDY, *SIZES]) == 0
    assert capsys.readouterr().out == words(greedy_reference([5, 6], 6)) + "\n", "one prompt: the text, nothing else"


def test_chat_template_and_several_prompts_as_text(checkpoint, capsys):
    assert cli.main(["generate", checkpoint, "--prompt", "w5 w6", "--prompt", "w7", "--chat", *GREEDY, *SIZES]) == 0
    first, second = (words(greedy_reference([1, *ids, 2], 6)) for ids in ([5, 6], [7]))
    assert capsys.readouterr().out == f">>> w5 w6\n{first}\n\n>>> w7\n{second}\n\n"


class Recorder:
    """Stands for LLM: keeps what it is given."""

    def __init__(self, model: str, **settings: object) -> None:
        Recorder.made = (model, settings)

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.5, top_k=7)

    def generate(self, prompts: list[str], params: SamplingParams, **_: object) -> list:
        Recorder.called = (prompts, params)
        raise KeyboardInterrupt


def test_only_what_is_given_is_passed_on(monkeypatch):
    monkeypatch.setattr(cli, "LLM", Recorder)
    engine = ["--dtype", "bfloat16", "--seed", "3"]
    sampling = ["--top-p", "0.9", "--stop-token-ids", "4", "5"]
    assert cli.main(["generate", "some/model", "--prompt", "a", *engine, *sampling]) == 130, (
        "an interrupted command says so by its status"
    )
    assert Recorder.made == ("some/model", {"warm_up": False, "dtype": "bfloat16", "seed": 3})
    assert Recorder.called == (["a"], SamplingParams(temperature=0.5, top_k=7, top_p=0.9, stop_token_ids=(4, 5)))


def test_every_option_goes_somewhere():
    own = ["--prompt", "a", "--input-file", "f", "--chat", "--json"]
    options = vars(cli.make_parser().parse_args(["generate", "m", *own, *GREEDY, *SIZES]))
    rest = set(options) - {"command", "run", "model", "prompt", "input_file", "chat", "json"}
    assert rest == {"temperature", "max_tokens", "ignore_eos", "max_model_len", "block_size"} | {
        "max_num_seqs",
        "max_num_batched_tokens",
    }
    assert set(cli.SAMPLING) <= {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(cli.ENGINE) <= set(inspect.signature(LLM).parameters)
    for name in (*cli.SAMPLING, *cli.ENGINE):
        flag = "--" + name.replace("_", "-")
        words = {"scheduling_policy": ["fair"], "preemption": ["swap"]}
        value = {"ignore_eos": [], "enable_prefix_caching": [], **words}.get(name, ["1"])
        value = ["float32"] if name.endswith("dtype") else ["int8"] if name == "quantization" else value
        assert name in vars(cli.make_parser().parse_args(["generate", "m", flag, *value]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature must be finite and at least 0"),
        (["--prompt", "a"], "there is no model at 'no/such/model/at/all'"),
        (["--input-file", "no/such/file"], "no/such/file"),
        (["--input-file", "-"], "there is no prompt: give --prompt, --input-file, or lines on standard input"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert cli.main(["generate", "no/such/model/at/all", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("jpaged generate: error: ") and says in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_version(capsys):
    assert cli.main(["version"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(found) == ["jpaged", "jax", "jaxlib", "flax", "Python", "devices", "attention"]
    assert found["jax"] == jax.__version__
    assert f"{len(jax.devices())} x {jax.devices()[0].platform}" in found["devices"]
    assert jax.default_backend() in found["attention"]


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in ("version", "generate", "serve"))])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    assert "usage: jpaged" in capsys.readouterr().out


def test_without_a_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


def test_serve_finds_mistakes_before_a_model_is_loaded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("jpaged.llm.LLM", Recorder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, says in (
            (["--port", port], f"cannot listen at 127.0.0.1 port {port}: Address already in use"),
            (["--port", "70000"], "port must be in [0, 65535], got 70000"),
            (["--tool-call-parser", "x"], "tool_call_parser must be one of hermes, llama3_json, mistral, got 'x'"),
            (["--chat-template", str(tmp_path / "none.jinja")], "none.jinja"),
            (["--allowed-origins", '"*"'], '--allowed-origins must be a JSON list of texts, got "*"'),
        ):
            assert cli.main(["serve", "some/model", *arguments]) == 1
            captured = capsys.readouterr().err
            assert captured.startswith("jpaged serve: error: ") and says in captured and captured.count("\n") == 1


def test_serve_without_its_packages(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jpaged.server.serving", None)
    assert cli.main(["serve", "some/model"]) == 1
    assert 'pip install "jpaged[server]"' in capsys.readouterr().err


def test_serve_reads_its_options(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert serve.read_template(str(file)) == serve.read_template("{{ messages }}") == "{{ messages }}"
    own = ["--served-model-name", "a", "b", "--api-key", "k", "--max-queue-len", "3", "--stream-interval", "4"]
    arguments = ["serve", "m", *own, "--decode-steps", "2", "--no-enable-prefix-caching"]
    options = vars(cli.make_parser().parse_args(arguments))
    assert options["served_model_name"] == ["a", "b"] and options["api_key"] == ["k"]
    assert pick(options, ENGINE) == {"decode_steps": 2, "enable_prefix_caching": False}
    assert pick(options, serve.SETTINGS) == {"max_queue_len": 3, "stream_interval": 4}
    assert set(serve.SETTINGS) | set(serve.LISTS) < {field.name for field in dataclasses.fields(ServerSettings)}
