"""Load tools: workloads, arrivals, what is reported, and the HTTP client against a server of canned answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged import cli
from jpaged.bench import offline, startup
from jpaged.bench.http_client import HttpClient, HttpError, split_chunks
from jpaged.bench.report import Result, format_table, read_goodput, summarize
from jpaged.bench.serve import send, send_all
from jpaged.bench.workload import Ask, arrival_times, custom_asks, fitting, random_asks, trace_asks
from jpaged.outputs import CompletionOutput, RequestOutput


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_random_prompts():
    asks = random_asks(200, rng(), 1000, input_len=40, output_len=10, prefix_len=5, ratio=0.5)
    assert {tuple(ask.prompt[:5]) for ask in asks} == {tuple(asks[0].prompt[:5])}
    assert {len(ask.prompt) - 5 for ask in asks} <= set(range(20, 61)) and len({len(ask.prompt) for ask in asks}) > 20
    assert all(ask.prompt_len == len(ask.prompt) and 5 <= ask.output_len <= 15 for ask in asks)
    assert all(10 <= token < 1000 for ask in asks for token in ask.prompt)
    exact = random_asks(3, rng(), 1000, input_len=40, output_len=10, prefix_len=0, ratio=0.0)
    assert [(ask.prompt_len, ask.output_len) for ask in exact] == [(40, 10)] * 3
    assert len(fitting(asks, 60)) < len(asks) == len(fitting(asks, None))


def test_traces_of_each_format(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9805900,396,109\n2023-11-16 18:16:00.0000000,1,1\n"
    )
    first, second = trace_asks(azure, 2, rng(), 100, speedup=2.0)
    assert (first.prompt_len, first.output_len, first.arrival) == (374, 44, 0.0)
    assert (len(second.prompt), second.output_len) == (396, 109) and second.arrival == pytest.approx(2.15)

    mooncake = tmp_path / "mooncake.jsonl.gz"
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 1000, "output_length": 6, "hash_ids": [0, 2]},
    ]
    mooncake.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    first, second = trace_asks(mooncake, 10, rng(), 100)
    assert (len(first.prompt), len(second.prompt), second.arrival) == (700, 1000, 3.0)
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512:700] != second.prompt[512:700]

    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n33,255\n17,73\n")
    assert [(a.prompt_len, a.output_len, a.arrival) for a in trace_asks(lengths, 5, rng(), 100)] == [
        (33, 255, None),
        (17, 73, None),
    ]
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no trace of a known format: its first line is 'a,b'"):
        trace_asks(other, 5, rng(), 100)


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a text"}\n{"prompt": [1, 2], "output_tokens": 3}\n{"prompt": "left out"}\n')
    assert custom_asks(file, 2, 9) == [Ask("a text", None, 9), Ask([1, 2], 2, 3)]
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match='line 1: needs a "prompt"'):
        custom_asks(file, 2, 9)


def test_arrivals():
    asks = [Ask([1], 1, 1)] * 4000
    assert set(arrival_times(asks, rng(), math.inf, 1.0)) == {0.0}
    for burstiness in (0.5, 1.0, 4.0):
        gaps = np.diff(arrival_times(asks, rng(), 20.0, burstiness))
        assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
        # Gamma intervals: standard deviation over mean is 1 / sqrt(burstiness); 1 for a Poisson process.
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)
    recorded = [Ask([1], 1, 1, 0.0), Ask([1], 1, 1, 2.5)]
    assert arrival_times(recorded, rng(), 20.0, 1.0) == [0.0, 2.5]
    with pytest.raises(ValueError, match="must be above 0"):
        arrival_times(asks, rng(), 0.0, 1.0)


def test_the_report():
    results = [
        Result(10, 5, start=0.0, ttft=0.1, latency=0.5, itl=[0.2, 0.2]),
        Result(20, 1, start=0.2, ttft=0.3, latency=0.3),
        Result(error="HttpError: 500"),
    ]
    found = summarize(results, 2.0, [50, 99], {"ttft": 200.0})
    assert (found["completed"], found["failed"], found["max_concurrent_requests"]) == (2, 1, 2)
    assert found["total_input_tokens"] == 30 and found["output_throughput"] == 3.0
    assert found["request_throughput"] == 1.0 and found["request_goodput"] == 0.5
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_tpot_ms"] == pytest.approx(100)
    assert found["p50_itl_ms"] == pytest.approx(200) and found["p99_e2el_ms"] == pytest.approx(498)
    table = format_table(found, ["ttft", "e2el"], [99])
    assert "Successful requests:" in table and "P99 E2EL (ms):" in table and "TPOT" not in table
    empty = summarize(results[2:], 1.0, [99], {})
    assert empty["mean_ttft_ms"] == 0.0 and empty["request_goodput"] is None
    assert read_goodput(["ttft:500", "e2el:2000"]) == {"ttft": 500.0, "e2el": 2000.0}
    for bad in ("itl:5", "speed:1", "ttft:fast"):
        with pytest.raises(ValueError):
            read_goodput([bad])


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body


def event(text: str, reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


def exchange(answer: bytes, times: int = 1, **options) -> tuple[list[Result], list[bytes]]:
    """Results of requests to a server that gives one answer, and what it was sent."""
    asked: list[bytes] = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head + await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0])))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main():
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", api_key="k")
            return await send_all(client, "/v1/completions", [{"n": 1}] * times, [0.0] * times, **options)

    return asyncio.run(asyncio.wait_for(main(), 30)), asked


def test_a_stream_is_read_however_it_is_cut():
    whole = event("Grüße", None) + event("", None) + event(" an", "stop") + USAGE + DONE
    for size in (1, 7, 10_000):
        answer = chunked(*(whole[at : at + size] for at in range(0, len(whole), size)))
        (result,), (asked,) = exchange(answer)
        assert result.error == "" and result.text == "Grüße an", result.error
        assert (result.prompt_len, result.output_len, len(result.itl)) == (4, 3, 1)
        assert 0 < result.ttft <= result.latency
    assert asked.startswith(b"POST /base/v1/completions HTTP/1.1\r\n") and b"Authorization: Bearer k\r\n" in asked


@given(st.lists(st.binary(min_size=1, max_size=20)), st.lists(st.integers(1, 9)), st.binary(max_size=3))
def test_chunks_are_joined_as_they_come(pieces: list[bytes], cuts: list[int], after: bytes) -> None:
    body = chunked(*pieces).partition(b"\r\n\r\n")[2] + after
    found, rest, at = b"", b"", 0
    for size in [*cuts, len(body)]:
        piece, rest, ended = split_chunks(rest + body[at : at + size])
        found, at = found + piece, at + size
        if ended:
            break
    assert ended and found == b"".join(pieces) and after.startswith(rest)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull", "HttpError: 429: full"),
        (chunked(event("a"), b'data: {"error": {"message": "it broke"}}\n\n'), "HttpError: it broke"),
        (chunked(event("a")), "HttpError: the stream ended before its end"),
        (chunked(event("a"))[:-20], "HttpError: "),
        (b"", "HttpError: the connection broke"),
    ],
)
def test_failures_are_results(answer, says):
    (result,), _ = exchange(answer)
    assert result.error.startswith(says)


def test_many_at_once():
    results, asked = exchange(chunked(event("a", "stop"), USAGE, DONE), times=20, max_concurrency=3)
    assert [result.error for result in results] == [""] * 20 and len(asked) == 20


def test_addresses():
    assert HttpClient("https://host/x/").port == 443 and HttpClient("http://host:81").port == 81
    with pytest.raises(ValueError, match="begins with http:// or https://"):
        HttpClient("host:80")
    with pytest.raises(OSError):
        asyncio.run(HttpClient("http://127.0.0.1:1").get_json("/"))
    result = asyncio.run(send(HttpClient("http://127.0.0.1:1"), "/", {}))
    assert "Error" in result.error
    assert issubclass(HttpError, RuntimeError)


class FakeLLM:
    """Stands for LLM: gives as many tokens as are asked for."""

    def __init__(self, model: str, **settings: object) -> None:
        self.config = SimpleNamespace(max_model_len=100)
        self.loaded = SimpleNamespace(config=SimpleNamespace(vocab_size=50))
        FakeLLM.asked = []

    def generate(self, prompts, params, *, use_tqdm):
        params = params if isinstance(params, list) else [params] * len(prompts)
        FakeLLM.asked.append(prompts)
        return [
            RequestOutput("0", None, prompt, outputs=[CompletionOutput(0, "", [1] * p.max_tokens)] * p.n)
            for prompt, p in zip(prompts, params, strict=True)
        ]


def test_throughput_and_latency(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(offline, "LLM", FakeLLM)
    file = str(tmp_path / "found" / "t.json")
    common = ["--model", "m", "--disable-tqdm", "--output-json", file]
    sizes = ["--input-len", "20", "--output-len", "5"]
    assert cli.main(["bench", "throughput", *common, *sizes, "--num-prompts", "4", "--n", "2"]) == 0
    found = json.loads((tmp_path / "found" / "t.json").read_text())
    assert found["num_requests"] == 4 and found["total_num_tokens"] == 4 * 20 + 8 * 5
    assert found["tokens_per_second"] == pytest.approx(found["total_num_tokens"] / found["elapsed_time"])
    assert cli.main(["bench", "throughput", *common, "--input-len", "99", "--output-len", "5"]) == 1
    assert "no request fits into the model's context of 100 tokens" in capsys.readouterr().err

    counts = ["--num-iters", "3", "--num-iters-warmup", "1", "--batch-size", "2"]
    assert cli.main(["bench", "latency", *common, *sizes, *counts]) == 0
    found = json.loads((tmp_path / "found" / "t.json").read_text())
    assert len(found["latencies"]) == 3 and found["avg_latency"] == pytest.approx(np.mean(found["latencies"]))
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    prompts = [tuple(prompt) for batch in FakeLLM.asked for prompt in batch]
    assert len(set(prompts)) == len(prompts) == 8, "no prompt is one that the cache holds"


def test_startup(monkeypatch, tmp_path, capsys):
    started = []

    def time_start(model, serve_options, environment):
        started.append((model, serve_options, sorted(environment)))
        return 2.0

    monkeypatch.setattr(startup, "time_start", time_start)
    file = tmp_path / "s.json"
    counts = ["--num-iters-cold", "1", "--num-iters-warm", "2", "--output-json", str(file)]
    assert cli.main(["bench", "startup", "--model", "m", *counts, "--", "--max-num-seqs", "8"]) == 0
    own = ["--max-num-seqs", "8"]
    assert started == [("m", own, ["XDG_CACHE_HOME"]), *[("m", own, [])] * 3], "one cold, one to warm up, two warm"
    found = json.loads(file.read_text())
    assert found["avg_warm_startup_time"] == 2.0 and found["cold_startup_times"] == [2.0]
    assert "Avg warm startup time: 2.00 seconds" in capsys.readouterr().out


def test_startup_finds_the_servers_address():
    def read(program: str) -> str:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        with process:
            return startup._read_address(process)

    assert read("print('Loading'); print('Serving m at http://h:1 (API)')") == "http://h:1"
    with pytest.raises(ValueError, match="the server did not start:\nno model"):
        read("print('no model')")


def test_bench_serve_says_what_is_wrong(capsys):
    for arguments, says in (
        (["--port", "1", "--ready-check-timeout-sec", "0"], "no server at 127.0.0.1 port 1"),
        (["--percentile-metrics", "ttft,speed"], "percentile_metrics knows ttft, tpot, itl, e2el, got speed"),
        (["--goodput", "speed:1"], "goodput limits are ttft, tpot or e2el"),
    ):
        assert cli.main(["bench", "serve", *arguments]) == 1
        assert says in capsys.readouterr().err
