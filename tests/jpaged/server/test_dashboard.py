"""The live page map: what it is told, and the page itself in a browser."""

from __future__ import annotations

import json
import threading

import httpx
import numpy as np
import pytest
from chromium import Browser, find_chromium

from jpaged.page_map import describe_blocks


def test_the_state_of_blocks():
    refcount = np.array([0, 0, 1, 1, 3, 2, 13, 9])
    held = np.array([0, 0, 0, 1, 1, 0, 1, 0])
    # null, free, one owner, only a name, two owners and a name, two, twelve and a name, nine
    assert describe_blocks(refcount, held) == "0.1c22+9"


def looks(http: httpx.Client, count: int) -> list[dict]:
    found = []
    with http.stream("GET", "/dashboard/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                return found
    raise AssertionError("the stream ended")


class Load:
    """Sequences that run while the block is open: prompts that begin alike, one after the other."""

    def __init__(self, url: str) -> None:
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=(url, i)) for i in range(4)]

    def ask(self, url: str, number: int) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not self.ended.is_set():
                body = {"prompt": f"the same beginning {number}", "max_tokens": 100, "n": 2, "ignore_eos": True}
                assert client.post("/v1/completions", json=body).status_code == 200

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


def test_what_the_page_is_told(server, http):
    with Load(server.url):
        found = looks(http, 6)
    total = len(found[0]["blocks"])
    assert any(look["sequences"] for look in found)
    for look in found:
        states = look["blocks"]
        assert states[0] == "0" and len(states) == total and set(states[1:]) <= set(".c123456789+")
        owners = [block for sequence in look["sequences"] for block in sequence["blocks"]]
        for block in range(1, total):
            shown = states[block]
            assert owners.count(block) == (int(shown) if shown.isdigit() else 0), "the map is of one moment"
        for sequence in look["sequences"]:
            assert len(sequence["blocks"]) == -(-sequence["tokens"] // look["block_size"])
    times = [look["time"] for look in found]
    assert times == sorted(set(times)), "a look is told once to each who watches"
    assert found[-1]["generation_tokens"] > found[0]["generation_tokens"]


def test_watchers_share_a_look(http):
    both: list[list[dict]] = []
    threads = [threading.Thread(target=lambda: both.append(looks(http, 3))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = ({look["time"] for look in each} for each in both)
    assert first & second


def test_the_page_needs_nothing_from_elsewhere(http):
    answer = http.get("/dashboard")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text and "https://" not in answer.text and "import " not in answer.text


@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_the_page_in_a_browser(server, http, tmp_path):
    browser = Browser(find_chromium(), server.url + "/dashboard")
    try:
        with Load(server.url):
            browser.wait_for("Number(document.body?.dataset.looks) > 4")
            browser.wait_for("document.querySelectorAll('#lanes li').length > 2")
            browser.evaluate("take = () => {}")  # hold the picture
            assert browser.evaluate("document.querySelector('#state').textContent") == "live"
            blocks = browser.evaluate("document.querySelector('#lanes li').dataset.blocks").split()
            pixels = "[...document.querySelector('#grid').getContext('2d').getImageData(0, 0, 900, 60).data].join()"
            before = browser.evaluate(pixels)
            browser.click("#lanes li")
            assert browser.evaluate("document.querySelectorAll('#lanes li.chosen').length") == 1
            assert "blocks " + ", ".join(blocks[:40]) in browser.evaluate("document.querySelector('#tip').textContent")
            assert browser.evaluate(pixels) != before, "the others grow pale"
            assert browser.evaluate("location.hash.length > 1"), "the address leads here again"
            browser.click("#lanes li")
            assert browser.evaluate("document.querySelectorAll('#lanes li.chosen').length") == 0
            numbers = browser.evaluate("[...document.querySelectorAll('#legend b')].map(b => b.textContent)")
            total = len(looks(http, 1)[0]["blocks"])
            assert sum(int(number.replace(",", "")) for number in numbers) == total
            browser.screenshot(tmp_path / "dashboard.png")
        assert (tmp_path / "dashboard.png").stat().st_size > 10_000
    finally:
        browser.close()
