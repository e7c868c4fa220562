"""The simulator against the real engine: the same requests give the same schedule and the same blocks, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from jpaged_models import load_model
from tiny import tiny_config, tiny_model

from jpaged import Engine
from jpaged.simulation import Job, RecordedParents, roofline
from jpaged.simulation.measure import first_difference, run_engine, simulate_engine


@pytest.mark.parametrize("caching", [True, False])
def test_same_schedule_as_the_engine_on_stories260k(shared, caching):
    """Too few blocks for all, so that sequences are preempted too."""
    config = tiny_config(enable_prefix_caching=caching, preemption="recompute", watermark=0.0)
    engine = Engine(load_model(shared / "models" / "stories260k", "float32"), config)
    rng = np.random.default_rng(3)
    jobs = [Job(0.0, int(rng.integers(1, 60)), int(rng.integers(1, 50))) for _ in range(20)]
    steps, seconds = run_engine(engine, jobs)
    simulated, shapes, _ = simulate_engine(engine, jobs, roofline("h200", "smollm2-135m"))
    assert first_difference(steps, simulated) is None
    assert len(seconds) == len(shapes) == len(steps) > 20
    assert engine.scheduler.num_preemptions > 0
    assert sum(shape.sampled for shape in shapes) == sum(job.output for job in jobs)
    # One request more is another schedule.
    assert first_difference(steps, simulate_engine(engine, jobs[:-1], roofline("h200", "smollm2-135m"))[0]) is not None


@pytest.mark.parametrize("decode_steps, caching", [(1, False), (4, True)])
def test_several_outputs_and_beams_as_the_engine_has_them(decode_steps, caching):
    """Beams go on as the model's did, played back: the same steps and the same blocks.

    With the prefix cache no outputs are sampled: where two say the same by chance their blocks are one, which no count
    can know.
    """
    config = tiny_config(
        num_blocks=60,
        max_num_seqs=8,
        preemption="recompute",
        watermark=0.0,
        decode_steps=decode_steps,
        enable_prefix_caching=caching,
    )
    engine = Engine(tiny_model(), config)
    rng = np.random.default_rng(5)
    jobs = [
        Job(0.0, int(rng.integers(1, 40)), int(rng.integers(2, 30)), outputs=1 + i % 4, beams=caching or i % 3 == 1)
        for i in range(16)
    ]
    records: dict[int, list[str]] = {}
    steps, _ = run_engine(engine, jobs, parents=records)

    def parents(request, generated: int) -> list[int]:
        return [int(digit) for digit in records[request.seed][generated]]

    simulated, _, _ = simulate_engine(engine, jobs, roofline("h200", "smollm2-135m"), parents)
    assert first_difference(steps, simulated) is None
    assert sum(job.beams for job in jobs) == len(records) > 3
    assert any(len(set(line)) > 1 for lines in records.values() for line in lines)
    straight = RecordedParents({width: ["0123"[:width] * 2] for width in (1, 2, 3, 4)})
    other, _, _ = simulate_engine(engine, jobs, roofline("h200", "smollm2-135m"), straight)
    assert first_difference(steps, other) is not None
