"""The end of the server. The name makes it the last file of this folder, all of which have one server."""

from __future__ import annotations

import json
import signal

import httpx
import pytest


def test_the_end(server):
    """Who is being answered gets the rest, and the process says good-bye."""
    with httpx.Client(base_url=server.url, timeout=60) as other:
        body = {"prompt": "abcdefgh", "max_tokens": 118, "n": 4, "ignore_eos": True, "stream": True}
        with other.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            chunks = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            assert reasons.count("length") == 4, "requests under way are finished"
    output, _ = server.process.communicate(timeout=60)
    # 0 where the tests are a background job of a shell: an interrupt is ignored there, except by the server itself.
    assert server.process.returncode in (130, 0), output
    assert "Traceback" not in output and "Finished server process" in output
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")
