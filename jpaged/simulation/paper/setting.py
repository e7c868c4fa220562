"""What the figures share: the paper's server (OPT-13B on an A100-40GB), its workloads, and the four systems.

The paper's KV memory is 12 GiB at 819,200 bytes a token, 15,728 slots (its Table 1 says 15.7K). Two constants of its
software are not known and were read off its own results for vLLM in Fig. 13, by Little's law: 30.42 requests at 2 req/s
of 338 tokens are 45 ms a step, 132.44 at 30 req/s of 58.5 tokens are 75 ms; less the roofline, that leaves about 8 ms a
step and 0.34 ms a sequence. Everything else follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpaged.config import EngineConfig
from jpaged.simulation.baselines import ContiguousSystem
from jpaged.simulation.costs import Roofline, roofline
from jpaged.simulation.engine import SimulatedEngine
from jpaged.simulation.jobs import Job, fit_lengths, geometric_lengths, poisson_jobs, scale_lengths, sharegpt_lengths
from jpaged.simulation.records import Report

SLOTS = 15_728
SYSTEMS = ("max", "pow2", "oracle", "jpaged")
LABELS = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "jpaged": "jpaged / vLLM"}


def paper_cost() -> Roofline:
    return roofline("a100", "opt-13b", efficiency=0.9, step_seconds=0.008, row_seconds=0.00034)


def workload(name: str) -> np.ndarray:
    """Lengths i64[N, 2].

    sharegpt         fitted to the paper's means, 161 and 338, and to means weighted by the output's length, 159 and
                     598, which follow from its Fig. 2: Max runs 7 requests in 15,728 slots, 20.4 % with and 13.3 %
                     awaiting a token, so a running request has 458 tokens and 299 to come
    sharegpt scaled  only multiplied, to have the paper's means
    sharegpt ours    by our tokenizer, unchanged
    alpaca           geometric with the paper's means, 19.3 and 58.5: the data themselves are not here
    """
    if name == "alpaca":
        return np.minimum(geometric_lengths(19.3, 58.5, 20_000, np.random.default_rng(0)), 1024)
    lengths = sharegpt_lengths()
    if name == "sharegpt ours":
        return lengths
    if name == "sharegpt scaled":
        return scale_lengths(lengths, 161, 338)
    if name == "sharegpt":
        return fit_lengths(lengths, (161, 159), (338, 598))
    raise ValueError(f"workload must be sharegpt, sharegpt scaled, sharegpt ours or alpaca, got {name!r}")


def draw(name: str, rate: float, seconds: float, seed: int = 0, outputs: int = 1) -> list[Job]:
    return poisson_jobs(workload(name), rate, seconds, np.random.default_rng(seed), outputs=outputs)


def serve(system: str, jobs: Sequence[Job], *, since: float, until: float, block_size: int = 16) -> Report:
    """One of SYSTEMS on the paper's server; means over steps begun in [since, until)."""
    if system != "jpaged":
        return ContiguousSystem(system, SLOTS, paper_cost()).run(jobs, since=since, until=until)
    config = EngineConfig(
        num_blocks=SLOTS // block_size + 1,
        max_model_len=2048,
        block_size=block_size,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
        decode_steps=1,
        enable_prefix_caching=False,
        preemption="recompute",
        free_padding=True,
    )
    return SimulatedEngine(config, paper_cost()).run(jobs, since=since, until=until)
