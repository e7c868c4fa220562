"""The same requests on a real engine and on a simulated one: is the schedule the same, and how long does a step take?

All requests are added before the first step, so that what is planned depends on counts alone and never on the clock.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jpaged.beam_search import BeamGroup, BeamSearchParams
from jpaged.engine import Engine
from jpaged.sampling_params import SamplingParams
from jpaged.schedule import Schedule
from jpaged.simulation.beam_parents import DIGITS
from jpaged.simulation.costs import CostModel
from jpaged.simulation.device import Parents, Step
from jpaged.simulation.engine import SimulatedEngine
from jpaged.simulation.jobs import Job
from jpaged.simulation.shape import StepShape
from jpaged.stats import BlockCounts


class Planned(NamedTuple):
    """One step as the scheduler planned it, and what its blocks were when it had run."""

    plan: tuple[Any, ...]
    blocks: tuple[int, ...]


def describe_plan(plan: Schedule) -> tuple[Any, ...]:
    """Kind, rows and tokens of a step, its iterations, and all its orders about blocks."""
    chunks = [
        (each.request.request_id, each.request.index, each.start, each.length, each.last) for each in plan.prefill
    ]
    decode = [(request.request_id, request.index) for request in plan.decode]
    kind = "mixed" if plan.prefill else "decode"
    return kind, decode, chunks, plan.num_steps, plan.stop_early, list(plan.release), tuple(map(tuple, plan.orders))


class _Watch:
    """A runner that notes what it is given and when results are there."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps: list[Planned] = []
        self.ends: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def read(self, dispatched: Any) -> Any:
        result = self.runner.read(dispatched)
        self.ends.append(time.perf_counter())
        self.steps.append(Planned(describe_plan(dispatched.schedule), _blocks(result.counts)))
        return result


def record_parents(beams: BeamGroup) -> list[str]:
    """A list that fills with what `RecordedParents` plays back: for each iteration of a group that is about to run,
    the beams that its beams go on from."""
    lines: list[str] = []
    advance = beams.advance

    def watch(records: np.ndarray, members: dict[int, int]) -> None:
        # Where fewer candidates go on than there are beams, the others' blocks stay what they were.
        origins = [members.get(int(slot), index) for index, slot in enumerate(records[:, 0])]
        lines.append("".join(DIGITS[origin] for origin in origins))
        advance(records, members)

    beams.advance = watch  # type: ignore[method-assign]
    return lines


def run_engine(
    engine: Engine, jobs: Sequence[Job], seed: int = 0, parents: dict[int, list[str]] | None = None
) -> tuple[list[Planned], list[float]]:
    """Serve jobs, all at once. Returns the steps and the seconds from the end of one to the end of the next.

    parents: gets, by the job's number, what the beams of jobs that are searches did.
    """
    rng = np.random.default_rng(seed)
    watch = _Watch(engine.runner)
    engine.runner = watch  # type: ignore[assignment]
    try:
        for number, job in enumerate(jobs):
            prompt = rng.integers(0, engine.model.vocab_size, job.prompt).tolist()
            if job.beams:
                beams = BeamSearchParams(beam_width=job.outputs, max_tokens=job.output, ignore_eos=True)
                request = engine.add_request(str(number), prompt, beams=beams)
                if parents is not None and request.beams is not None:
                    parents[number] = record_parents(request.beams)
            else:
                params = SamplingParams(
                    temperature=float(job.outputs > 1), n=job.outputs, max_tokens=job.output, ignore_eos=True
                )
                engine.add_request(str(number), prompt, params)
        start = time.perf_counter()
        while engine.has_unfinished():
            engine.step()
    finally:
        engine.runner = watch.runner
    return watch.steps, np.diff([start, *watch.ends]).tolist()


def simulate_engine(
    engine: Engine, jobs: Sequence[Job], cost: CostModel, parents: Parents | None = None
) -> tuple[list[Planned], list[StepShape], list[float]]:
    """The same on a simulated engine of the same configuration: steps, their shapes, and the modelled seconds."""
    steps: list[Planned] = []
    shapes: list[StepShape] = []

    def watch(plan: Schedule, step: Step) -> None:
        steps.append(Planned(describe_plan(plan), _blocks(step.counts)))
        shapes.append(step.shape)

    simulated = SimulatedEngine(
        engine.config,
        cost,
        block_bytes=engine.scheduler.store.block_bytes,
        swap_pays=engine.scheduler.swapping.pays,
        watch=watch,
        parents=parents,
    )
    simulated.run([dataclasses.replace(job, arrival=0.0) for job in jobs])
    return steps, shapes, [cost.seconds(shape) if shape.tokens else 0.0 for shape in shapes]


def first_difference(real: Sequence[Planned], simulated: Sequence[Planned]) -> int | None:
    """The number of the first step in which the two differ; None if they are the same."""
    for number, (one, other) in enumerate(zip(real, simulated, strict=False)):
        if one != other:
            return number
    return None if len(real) == len(simulated) else min(len(real), len(simulated))


def _blocks(counts: BlockCounts) -> tuple[int, ...]:
    return tuple(int(count) for count in counts)
