"""The simulator against the real engine: the same requests give the same schedule and the same blocks, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from jpaged_models import load_model
from tiny import tiny_config

from jpaged import Engine
from jpaged.simulation import Job, roofline
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
