"""What the host counts of beams' blocks, beside tables that hold every block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.beam_blocks import BeamBlocks
from jpaged.simulation import Job, RecordedParents, SimulatedEngine, make_config, roofline

COST = roofline("h200", "llama-3.1-8b")


@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 5), min_size=6, max_size=6))))
def test_beams_count_as_their_tables_say(width, iterations):
    """Only full blocks: a partly filled one is each beam's own as soon as it writes."""
    blocks = BeamBlocks(width)
    tables: list[list[int]] = [[] for _ in range(width)]
    made = 0
    for filled, parents in iterations:
        if filled:
            blocks.fill()
            for table in tables:
                table.append(made)
                made += 1
        parents = [parent % width for parent in parents[:width]]
        blocks.reorder(parents)
        tables = [list(tables[parent]) for parent in parents]
        once = {block for table in tables for block in table}
        assert sum(map(len, tables)) - sum(blocks.doubled()) == len(once)
        assert all(0 <= doubled <= len(table) for doubled, table in zip(blocks.doubled(), tables, strict=True))


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([1, 4]),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_beams_never_have_more_than_is_counted(seed, width, block_size, async_scheduling, decode_steps):
    """In a pool that is too small for all, whatever the beams do. (The simulated device refuses to run out.)"""
    rng = np.random.default_rng(seed)
    config = make_config(
        160,
        block_size,
        max_model_len=32,
        max_num_seqs=16,
        max_num_batched_tokens=24,
        decode_steps=decode_steps,
        async_scheduling=async_scheduling,
        enable_prefix_caching=bool(seed % 2),
    )
    jobs = [
        Job(0.0, int(rng.integers(1, 12)), int(rng.integers(1, 20)), outputs=width if i % 3 else 1, beams=i % 3 > 0)
        for i in range(12)
    ]
    record = "".join("".join(map(str, rng.integers(0, width, width))) for _ in range(8))
    engine = SimulatedEngine(config, COST, parents=RecordedParents({width: [record]}))

    def watch(plan, step) -> None:
        scheduler = engine.scheduler
        counts = scheduler.counts
        assert step.counts.used + step.counts.cached <= counts.private + scheduler.index.num_named
        assert counts.private == (counts.reserved - counts.named).sum() and (counts.reserved >= counts.named).all()

    engine.watch = watch
    assert engine.run(jobs).finished == len(jobs)
    assert engine.scheduler.counts.private == 0


@pytest.mark.parametrize(("record", "preemptions"), [("0000" * 3, False), ("0000" + "0123" * 3, True)])
def test_what_beams_share_lets_others_run(record, preemptions):
    """Four searches of 4 beams and 64 tokens: 4 * (1 + 4 * 16) blocks if beams stay apart, of which there are 200."""
    config = make_config(
        800, 4, max_model_len=128, max_num_seqs=16, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    engine = SimulatedEngine(config, COST, parents=RecordedParents({4: [record]}))
    report = engine.run([Job(0.0, 4, 64, outputs=4, beams=True) for _ in range(4)])
    assert report.finished == 4
    assert (report.preemptions > 0) == preemptions
