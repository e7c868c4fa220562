"""What the benchmarks of sharing count, on a tiny model: blocks and rows, not seconds."""

from __future__ import annotations

from sharing_measures import make_engine, measure_beams, run, take_rounds, time_copies
from tiny import SIZES, make_prompts, tiny_model

from jpaged import SamplingParams


def test_beams_share_blocks_and_greedy_requests_do_not():
    beams, greedy = measure_beams(tiny_model(), width=4, repeats=1)
    assert (beams["what"], greedy["what"]) == ("beam width 4", "4 greedy")
    assert greedy["ratio"] == greedy["blocks ratio"] == 1
    # Four sequences of 64 to 128 tokens in blocks of 16; beams have the four blocks of their prompt in common.
    assert 16 <= greedy["blocks"] <= 32
    assert beams["blocks"] <= greedy["blocks"] - 3 * 4 + 1


def test_copies_come_back_and_leave_nothing_behind():
    engine = make_engine(tiny_model(), **SIZES)
    out, back = time_copies(engine, blocks=4, repeats=2)
    assert out > 0 and back > 0
    assert engine.stats().blocks.free == 64
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert run(engine, [(prompt, {"params": params}) for prompt in make_prompts(3, 20)]) > 0
    assert engine.stats().finished == 3


def test_rounds_take_turns_and_the_first_does_not_count():
    calls = []
    times = {"a": [9.0, 1.0, 3.0, 2.0], "b": [9.0, 4.0, 6.0, 5.0]}

    def make(name: str):
        def call() -> float:
            calls.append(name)
            return times[name].pop(0)

        return call

    assert take_rounds({name: make(name) for name in times}, 3) == {"a": 2.0, "b": 5.0}
    assert "".join(calls) == "ab" * 4
