"""What the figures share: the paper's server (OPT-13B on an A100-40GB), its workloads, and the four systems.

The paper's KV memory is 12 GiB at 819,200 bytes a token, 15,728 slots (its Table 1 says 15.7K). Two constants of its
software are not known and were read off its own results for vLLM in Fig. 13, by Little's law: 30.42 requests at 2 req/s
of 338 tokens are 45 ms a step, 132.44 at 30 req/s of 58.5 tokens are 75 ms; less the roofline, that leaves about 8 ms a
step and 0.34 ms a request. Everything else follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from jpaged.simulation.baselines import ContiguousSystem
from jpaged.simulation.beam_parents import RecordedParents, recorded_parents
from jpaged.simulation.costs import CostModel, Roofline, roofline
from jpaged.simulation.engine import SimulatedEngine, make_config
from jpaged.simulation.hardware import MODELS
from jpaged.simulation.jobs import Job, fit_lengths, geometric_lengths, poisson_jobs, scale_lengths, sharegpt_lengths
from jpaged.simulation.paper.cores import open_cores
from jpaged.simulation.records import Report

SLOTS = 15_728
HOST_BYTES = 64 << 30  # host memory for blocks that are swapped out
SUSTAINED = 0.3  # s/token that a rate must stay below to count as sustained
ALPACA = (19.3, 58.5)  # mean tokens of a prompt and an output
SYSTEMS = ("max", "pow2", "oracle", "jpaged")
LABELS = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "jpaged": "jpaged / vLLM"}


def paper_cost(**changes: float) -> Roofline:
    constants = dict(efficiency=0.9, step_seconds=0.008, request_seconds=0.00034) | changes
    return roofline("a100", "opt-13b", **constants)


@cache
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
        return np.minimum(geometric_lengths(*ALPACA, 20_000, np.random.default_rng(0)), 1024)
    lengths = sharegpt_lengths()
    if name == "sharegpt ours":
        return lengths
    if name == "sharegpt scaled":
        return scale_lengths(lengths, 161, 338)
    if name == "sharegpt":
        return fit_lengths(lengths, (161, 159), (338, 598))
    raise ValueError(f"workload must be sharegpt, sharegpt scaled, sharegpt ours or alpaca, got {name!r}")


def draw_shape(shape: str, mean: float, rng: np.random.Generator, count: int = 20_000) -> np.ndarray:
    """Lengths i64[count] of a mean: "geometric", or "lognormal S" with spread S."""
    if shape == "geometric":
        return rng.geometric(1 / mean, count)
    spread = float(shape.removeprefix("lognormal "))
    drawn = np.exp(spread * rng.standard_normal(count))
    return np.maximum(np.rint(drawn * (mean / drawn.mean())), 1).astype(np.int64)


def draw(name: str, rate: float, seconds: float, seed: int = 0, outputs: int = 1, beams: bool = False) -> list[Job]:
    rng = np.random.default_rng(seed)
    return poisson_jobs(workload(name), rate, seconds, rng, outputs=outputs, beams=beams)


def serve(
    system: str,
    jobs: Sequence[Job],
    *,
    since: float = 0.0,
    until: float = float("inf"),
    stop_at: float = float("inf"),
    block_size: int = 16,
    caching: bool = False,
    preemption: str = "recompute",
    most: int = 256,
    cost: CostModel | None = None,
    parents: RecordedParents | None = None,
) -> Report:
    """One of SYSTEMS on the paper's server, or another `cost`; means over steps begun in [since, until).

    block_size, caching, preemption and `most`, the sequences that run at once, are the engine's. parents: what beams
    do, by default as recorded; if given, the Orca systems pay for copying a beam's memory.
    """
    cost = paper_cost() if cost is None else cost
    times: dict[str, Any] = dict(since=since, until=until, stop_at=stop_at)
    if system != "jpaged":
        return ContiguousSystem(system, SLOTS, cost, parents=parents).run(jobs, **times)
    config = make_config(
        SLOTS,
        block_size,
        max_model_len=2048,
        max_num_seqs=most,
        max_num_batched_tokens=2560,
        decode_steps=1,
        enable_prefix_caching=caching,
        preemption=preemption,
        swap_space_bytes=HOST_BYTES,
    )
    block_bytes = block_size * MODELS["opt-13b"].kv_bytes
    if parents is None and any(job.beams for job in jobs):
        parents = recorded_parents()
    return SimulatedEngine(config, cost, block_bytes=block_bytes, parents=parents).run(jobs, **times)


def trace_curves(
    latency: Callable[..., float], cases: Sequence[tuple], ranges: Sequence[tuple[float, float]], rounds: int = 3
) -> list[list[tuple[float, float]]]:
    """Of each case (rate, normalized latency in s/token) about the rate where that crosses the limit, in order.

    latency(*case, rate)   the latency at a rate; grows with the rate
    ranges                 where to look. The lower end is run too
    rounds                 each runs two rates that cut a case's range in three of equal ratio, and goes on in the
                           third in which the limit is crossed

    Raises ValueError where the limit is not crossed within the range.
    """
    points: list[list[tuple[float, float]]] = [[] for _ in cases]
    ends = list(ranges)
    with open_cores() as map_all:
        for number in range(rounds):
            parts = (0, 1, 2) if number == 0 else (1, 2)
            rates = [[low * (high / low) ** (part / 3) for part in parts] for low, high in ends]
            asked = [(*case, rate) for case, some in zip(cases, rates, strict=True) for rate in some]
            found = iter(map_all(latency, asked))
            for each, some in zip(points, rates, strict=True):
                each += [(rate, next(found)) for rate in some]
            ends = [_bracket(each, high) for each, (_, high) in zip(points, ranges, strict=True)]
    for case, (_, high), (_, last) in zip(cases, ends, ranges, strict=True):
        if high == last:
            raise ValueError(f"{case}: {last} requests/s and all below are sustained: look above")
    return [sorted(each) for each in points]


def _bracket(points: Sequence[tuple[float, float]], high: float) -> tuple[float, float]:
    """The highest rate that is sustained and the lowest that is not, `high` if all are."""
    sustained = [rate for rate, latency in points if latency <= SUSTAINED]
    if not sustained:
        raise ValueError(f"{min(points)[0]} requests/s are not sustained: look below")
    return max(sustained), min((rate for rate, latency in points if latency > SUSTAINED), default=high)


def find_sustained(points: Sequence[tuple[float, float]], limit: float = SUSTAINED) -> float:
    """The rate at which latency crosses `limit`, interpolated; the last or first one if it does not."""
    for (rate, latency), (following, more) in pairwise(points):
        if latency <= limit < more:
            return rate + (following - rate) * (limit - latency) / (more - latency)
    return points[-1][0] if points[-1][1] <= limit else points[0][0]
