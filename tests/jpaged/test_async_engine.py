"""The engine in its thread, on an engine without a device whose steps the tests let go one by one."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest

from jpaged import SamplingParams
from jpaged.async_engine import AsyncEngine, DuplicateRequest, EngineDead, QueueFull, ShuttingDown
from jpaged.completion import OutputStream
from jpaged.output_queue import MOST_UNMERGED, OutputQueue, merge_outputs
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.request import Request
from jpaged.sampling_params import RequestOutputKind

DELTA = SamplingParams(max_tokens=5, output_kind=RequestOutputKind.DELTA)
ENDLESS = SamplingParams(max_tokens=10**6, output_kind=RequestOutputKind.DELTA)


class FakeEngine:
    """Gives each request one token a step: 0, 1, 2, … `gate` closed: steps wait."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_num_seqs=2)
        self.tokenizer = None
        self.requests: dict[str, Request] = {}
        self.waits_for_grammar = False
        self.gate = threading.Event()
        self.gate.set()
        self.failure: BaseException | None = None
        self.aborted: list[str] = []
        self.steps = 0

    def add_request(self, request_id, prompt_token_ids, params, **others) -> Request:
        if not prompt_token_ids:
            raise ValueError("a prompt must hold at least one token id")
        if prompt_token_ids == [13]:
            raise KeyError("a bug")
        request = Request(request_id, list(prompt_token_ids), params, max_tokens=params.max_tokens, seed=0)
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Request]:
        self.gate.wait(30)
        self.steps += 1
        if self.failure is not None:
            raise self.failure
        touched = list(self.requests.values())
        for request in touched:
            request.append([len(request.output_token_ids)])
            if request.finished:
                del self.requests[request.request_id]
        return touched


def run(body, **settings):
    """Run body(engine, fake) in an event loop with a started engine; every wait in it is bounded."""

    async def main():
        fake = FakeEngine()
        engine = AsyncEngine(fake, **settings)
        engine.start()
        try:
            async with asyncio.timeout(60):
                await body(engine, fake)
        finally:
            fake.gate.set()
            fake.failure = None
            await engine.shutdown(0)
            assert not engine._thread.is_alive() and not engine.live

    asyncio.run(main())


async def collect(engine, request_id, ids=(1, 2), params=DELTA):
    tokens = []
    async with engine.submit(request_id, list(ids), params) as outputs:
        async for output in outputs:
            tokens += output.outputs[0].token_ids
    return tokens


def test_requests_come_and_go():
    async def body(engine, fake):
        results = await asyncio.gather(*(collect(engine, str(i)) for i in range(2)))
        assert results == [[0, 1, 2, 3, 4]] * 2
        assert await collect(engine, "0") == [0, 1, 2, 3, 4], "an id can be used again"
        assert not engine.live and not engine._running and fake.aborted == []

    run(body)


def test_leaving_early_aborts():
    async def body(engine, fake):
        async with engine.submit("a", [1], ENDLESS) as outputs:
            await anext(outputs)
        await engine.call(lambda engine: None)
        assert fake.aborted == ["a"] and not fake.requests and not engine._running

        task = asyncio.ensure_future(collect(engine, "b", params=ENDLESS))
        while not fake.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.call(lambda engine: None)
        assert fake.aborted == ["a", "b"] and not fake.requests

    run(body)


def test_a_slow_client_gets_everything_in_one_piece_and_holds_up_nobody():
    async def body(engine, fake):
        async with engine.submit("slow", [1], DELTA) as outputs:
            assert await collect(engine, "quick") == [0, 1, 2, 3, 4]
            assert [output.outputs[0].token_ids async for output in outputs] == [[0, 1, 2, 3, 4]]

    run(body)


def test_a_bad_request_fails_alone():
    async def body(engine, fake):
        good = asyncio.ensure_future(collect(engine, "good"))
        with pytest.raises(ValueError, match="at least one token"):
            await collect(engine, "bad", ids=())
        with pytest.raises(KeyError, match="a bug"):
            await collect(engine, "worse", ids=(13,))
        assert await good == [0, 1, 2, 3, 4]
        assert engine.error is None and not engine.live

    run(body)


def test_what_cannot_be_shown_fails_alone():
    async def body(engine, fake):
        async with engine.submit("bad", [1], ENDLESS) as outputs:

            def refuse(requests):
                raise RuntimeError("cannot be shown")

            outputs.shown.next = refuse
            with pytest.raises(RuntimeError, match="cannot be shown"):
                async for _ in outputs:
                    pass
        assert await collect(engine, "good") == [0, 1, 2, 3, 4]
        assert fake.aborted == ["bad"] and engine.error is None

    run(body)


def test_a_device_error_is_told_to_everybody_who_waits_and_comes():
    async def body(engine, fake):
        fake.gate.clear()
        waiting = [asyncio.ensure_future(collect(engine, str(i))) for i in range(2)]
        asked = asyncio.ensure_future(engine.call(lambda engine: None))
        await asyncio.sleep(0.01)
        fake.failure = RuntimeError("XLA lost the device")
        fake.gate.set()
        for each in waiting:
            with pytest.raises(EngineDead, match="RuntimeError: XLA lost the device"):
                await each
        await asyncio.wait([asked])
        assert "XLA lost the device" in engine.error
        with pytest.raises(EngineDead, match="XLA lost the device"):
            await collect(engine, "late")
        with pytest.raises(EngineDead):
            await engine.call(lambda engine: None)

    run(body)


def test_a_question_is_answered_between_steps():
    async def body(engine, fake):
        thread = await engine.call(lambda engine: threading.current_thread().name)
        assert thread == "engine"
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda engine: 1 / 0)
        assert engine.error is None and not engine.calls

    run(body)


def test_the_queue_is_bounded_and_ids_are_unique():
    async def body(engine, fake):
        fake.gate.clear()
        tasks = [asyncio.ensure_future(collect(engine, str(i))) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="at most 3 may") as full:
            await collect(engine, "more")
        assert 1 <= full.value.retry_after <= 60
        fake.gate.set()
        await asyncio.gather(*tasks)
        async with engine.submit("same", [1], ENDLESS):
            with pytest.raises(DuplicateRequest, match="'same' is in use"):
                await collect(engine, "same")
        assert await collect(engine, "same") == [0, 1, 2, 3, 4]

    run(body, max_queue_len=1)


def test_shutdown_lets_requests_end():
    async def body(engine, fake):
        task = asyncio.ensure_future(collect(engine, "a"))
        await asyncio.sleep(0)
        await engine.shutdown(timeout=30)
        assert await task == [0, 1, 2, 3, 4]
        with pytest.raises(ShuttingDown):
            await collect(engine, "late")

    run(body)


def test_shutdown_ends_what_does_not_end_in_time():
    async def body(engine, fake):
        task = asyncio.ensure_future(collect(engine, "a", params=ENDLESS))
        while not fake.requests:
            await asyncio.sleep(0.001)
        await engine.shutdown(timeout=0.05)
        with pytest.raises(ShuttingDown):
            await task
        assert fake.aborted == ["a"] and not engine._thread.is_alive()

    run(body)


def test_a_grammar_under_way_holds_up_nobody():
    async def body(engine, fake):
        fake.waits_for_grammar = True
        task = asyncio.ensure_future(collect(engine, "structured"))
        await engine.call(lambda engine: None)
        await engine.call(lambda engine: None)
        assert fake.steps == 0 and not task.done()
        fake.waits_for_grammar = False
        assert await task == [0, 1, 2, 3, 4]

    run(body)


def test_the_time_in_the_inbox_counts():
    async def body(engine, fake):
        before = time.perf_counter()
        async with engine.submit("a", [1], ENDLESS) as outputs:
            between = time.perf_counter()
            await anext(outputs)
            assert before <= fake.requests["a"].arrival_time <= between

    run(body)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_pieces_of_an_interval(kind):
    params = dataclasses.replace(DELTA, max_tokens=9, output_kind=kind)
    request, stream, shown = Request("a", [1], params, max_tokens=9, seed=0), OutputStream(None, 3), []
    for token in range(9):
        request.append([token])
        output = stream.next([request])
        shown.append([] if output is None else output.outputs[0].token_ids)
        assert output is None or output.finished == (token == 8)
    pieces = {0: [0], 3: [1, 2, 3], 6: [4, 5, 6], 8: [7, 8]}
    if kind is RequestOutputKind.CUMULATIVE:
        pieces = {last: list(range(last + 1)) for last in pieces}
    assert shown == [pieces.get(token, []) for token in range(9)]


def test_a_stream_with_an_interval_loses_nothing():
    async def body(engine, fake):
        assert await asyncio.gather(collect(engine, "a"), collect(engine, "b")) == [[0, 1, 2, 3, 4]] * 2

    run(body, stream_interval=4)
    with pytest.raises(ValueError, match="stream_interval must be at least 1, got 0"):
        AsyncEngine(FakeEngine(), stream_interval=0)


def delta(index, text, tokens, reason=None, finished=False):
    logprobs = [{token: Logprob(-1.0)} for token in tokens]
    completion = CompletionOutput(index, text, tokens, logprobs=logprobs, finish_reason=reason)
    return RequestOutput("a", None, [1], outputs=[completion], finished=finished)


def test_deltas_are_merged_by_output():
    merged = merge_outputs([delta(1, "ab", [1, 2]), delta(0, "x", [9]), delta(1, "c", [3], "stop", finished=True)])
    first, second = merged.outputs
    assert (first.index, first.text, first.token_ids, first.finish_reason) == (0, "x", [9], None)
    assert (second.text, second.token_ids, second.finish_reason) == ("abc", [1, 2, 3], "stop")
    assert [list(each) for each in second.logprobs] == [[1], [2], [3]] and merged.finished


def test_what_a_client_does_not_take_is_merged_now_and_then():
    async def main():
        queue = OutputQueue(RequestOutputKind.DELTA)
        for number in range(1000):
            queue.put(delta(0, chr(97 + number % 26), [number], finished=number == 999))
            assert len(queue.waiting) <= MOST_UNMERGED
        (taken,) = [output async for output in queue]
        assert taken.outputs[0].token_ids == list(range(1000)) and len(taken.outputs[0].text) == 1000
        assert [list(each) for each in taken.outputs[0].logprobs] == [[number] for number in range(1000)]

    asyncio.run(main())


def test_an_error_comes_after_what_was_put_before_it():
    async def main():
        queue = OutputQueue(RequestOutputKind.CUMULATIVE)
        queue.put(delta(0, "a", [1]))
        queue.put(delta(0, "ab", [1, 2]))
        queue.fail(EngineDead("gone"))
        assert (await anext(queue)).outputs[0].text == "ab"
        with pytest.raises(EngineDead):
            await anext(queue)
        with pytest.raises(StopAsyncIteration):
            await anext(queue)

    asyncio.run(main())
