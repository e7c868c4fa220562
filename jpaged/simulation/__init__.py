"""The engine without a device: its scheduler, prefix index and block accounting, driven by a model of a device's speed.

    cost = roofline("h200", "llama-3.1-8b")
    config = EngineConfig(num_blocks=20_000, max_model_len=4096, max_num_seqs=512, max_num_batched_tokens=4096)
    report = SimulatedEngine(config, cost).run(poisson_jobs(sharegpt_lengths(), 10, 600, np.random.default_rng(0)))

Beside it stand the systems that paging is compared with (`baselines.py`). Nothing here imports JAX.
"""

from __future__ import annotations

from jpaged.simulation.baselines import ContiguousSystem
from jpaged.simulation.beam_parents import RecordedParents, recorded_parents
from jpaged.simulation.costs import FittedCost, Roofline, fit_cost, roofline
from jpaged.simulation.engine import SimulatedEngine, make_config
from jpaged.simulation.jobs import Job, poisson_jobs, read_jobs, sharegpt_lengths
from jpaged.simulation.records import Report

__all__ = [
    "ContiguousSystem",
    "FittedCost",
    "Job",
    "RecordedParents",
    "Report",
    "Roofline",
    "SimulatedEngine",
    "fit_cost",
    "make_config",
    "poisson_jobs",
    "read_jobs",
    "recorded_parents",
    "roofline",
    "sharegpt_lengths",
]
