"""Clients that go away, clients that never read, and what the metrics say of them."""

from __future__ import annotations

import json
import re
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

ENDLESS = {"prompt": "abcdefgh", "max_tokens": 118, "n": 4, "ignore_eos": True}


def read_metrics(http: httpx.Client) -> dict[str, float]:
    """{name{labels but those all have}: value}."""
    found = {}
    for line in http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'(engine="0"|model_name="tiny"),?', "", name).replace("{}", "").replace(",}", "}")
            found[name] = float(value)
    return found


def wait_until(check, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def is_empty(http: httpx.Client) -> bool:
    found = read_metrics(http)
    waiting = found["jpaged:num_requests_running"] + found["jpaged:num_requests_waiting"]
    used = found['jpaged:kv_blocks{state="private"}'] + found['jpaged:kv_blocks{state="shared"}']
    return waiting == 0 and used == 0 and found["jpaged:kv_cache_usage_perc"] == 0


def connect(url: str, body: dict) -> socket.socket:
    """A client that has asked and read nothing."""
    content = json.dumps(body).encode()
    parts = urlsplit(url)
    client = socket.create_connection((parts.hostname, parts.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_no_block_behind(server, http, stream):
    before = read_metrics(http)
    # Eight such prompts with 4 outputs: 8 outputs run, the rest waits; then all go away at once.
    clients = [connect(server.url, ENDLESS | {"stream": stream}) for _ in range(8)]
    wait_until(lambda: read_metrics(http)["jpaged:num_requests_running"] > 0)
    for client in clients:
        client.close()
    wait_until(lambda: is_empty(http))
    after = read_metrics(http)
    ended = {name: after[name] - before.get(name, 0) for name in after if "request_success_total" in name}
    assert ended['jpaged:request_success_total{finished_reason="abort"}'] >= 1
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_client_that_never_reads_holds_up_nobody(server, http):
    with connect(server.url, ENDLESS | {"stream": True}):
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 50}).status_code == 200
        wait_until(lambda: is_empty(http))
    assert http.get("/health").status_code == 200


def test_metrics_add_up(http):
    wait_until(lambda: is_empty(http))
    before = read_metrics(http)
    body = {"prompt": "metrics!", "max_tokens": 7, "n": 2, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert http.post("/v1/completions", json=body).status_code == 200
    wait_until(lambda: is_empty(http))
    after = read_metrics(http)
    new = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert new["jpaged:prompt_tokens_total"] == 16 and new["jpaged:generation_tokens_total"] == 28
    assert new['jpaged:request_success_total{finished_reason="length"}'] == 4
    assert new["jpaged:time_to_first_token_seconds_count"] == 4
    assert new["jpaged:inter_token_latency_seconds_count"] == 24, "6 between 7 tokens, 4 times"
    assert new["jpaged:e2e_request_latency_seconds_count"] == 4
    assert new["jpaged:request_prompt_tokens_sum"] == 16 and new["jpaged:request_generation_tokens_sum"] == 28
    assert new["jpaged:prefix_cache_queries_total"] == 16
    assert new["jpaged:prefix_cache_hits_total"] == 4, "the second time the first block is known, and one token left"
    assert new['jpaged:http_requests_total{method="POST",path="/v1/completions",status="200"}'] == 2
    blocks = {name: value for name, value in after.items() if name.startswith("jpaged:kv_blocks{")}
    assert sum(blocks.values()) == int(re.search(r'num_gpu_blocks="(\d+)"', http.get("/metrics").text)[1]) - 1
    assert after["jpaged:step_duration_seconds_count"] > before["jpaged:step_duration_seconds_count"]


def test_the_prefix_cache_can_be_reset(http):
    body = {"prompt": "reset it", "max_tokens": 1}
    http.post("/v1/completions", json=body)
    wait_until(lambda: is_empty(http))
    assert http.post("/reset_prefix_cache").json() == {"complete": True}
    assert read_metrics(http)['jpaged:kv_blocks{state="cached"}'] == 0
    usage = http.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
