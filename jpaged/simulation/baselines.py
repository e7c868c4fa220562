"""What paging is compared with: contiguous KV memory, with iteration-level scheduling (Orca) or static batches.

Orca (Yu et al., 2022) is closed; Kwon et al. (2023, section 6.1) compare with three versions of it that differ in how
much memory they reserve for an output of unknown length, all with a buddy allocator:

    max     the longest sequence the model can have, 2,048 tokens
    pow2    the output's true length, rounded up to a power of two
    oracle  the true length, which no real system knows

Requests run first come, first served; whoever is admitted gets its prompt computed in that iteration. Imports no JAX.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from jpaged.simulation.beam_parents import RecordedParents
from jpaged.simulation.buddy import BuddyAllocator
from jpaged.simulation.costs import CostModel
from jpaged.simulation.jobs import Job
from jpaged.simulation.records import Finished, Recorder, Report
from jpaged.simulation.shape import StepShape

RESERVATIONS: dict[str, Callable[[Job, int], int]] = {
    "max": lambda job, longest: longest,
    "pow2": lambda job, longest: min(job.prompt + (1 << (job.output - 1).bit_length()), longest),
    "oracle": lambda job, longest: job.prompt + job.output,
}


class ContiguousSystem:
    """Requests in contiguous memory of `slots` tokens. Each of several outputs, beams too, has a copy of its prompt."""

    def __init__(
        self,
        reservation: str,
        slots: int,
        cost: CostModel,
        *,
        longest: int = 2048,
        static: bool = False,
        batch: int = 0,
        parents: RecordedParents | None = None,
    ) -> None:
        """static: no request joins before all that run have ended. batch: most requests at once, 0: no limit.

        parents: how beams go on. Where one goes on from another, that one's memory is copied over its own. Without it
        copies cost nothing, in these systems' favour.
        """
        if reservation not in RESERVATIONS:
            raise ValueError(f"reservation must be one of {', '.join(RESERVATIONS)}, got {reservation!r}")
        self.reserve = RESERVATIONS[reservation]
        self.slots, self.longest, self.cost = slots, longest, cost
        self.static, self.batch = static, batch or slots
        self.parents = parents

    def run(
        self,
        jobs: Sequence[Job],
        *,
        since: float = 0.0,
        until: float = float("inf"),
        stop_at: float = float("inf"),
    ) -> Report:
        """As `SimulatedEngine.run`."""
        memory = BuddyAllocator(self.slots)
        self.admitted = 0
        recorder = Recorder(self.slots, since, until)
        waiting: deque[tuple[Job, int]] = deque()
        coming = iter(jobs)
        job = next(coming, None)
        running: list[_Sequence] = []
        now = 0.0
        while now < stop_at:
            while job is not None and job.arrival <= now:
                waiting.append((job, self._check(job)))
                job = next(coming, None)
            admitted: list[_Sequence] = (
                [] if self.static and running else self._admit(memory, waiting, len(running), now)
            )
            running += admitted
            if not running:
                if job is None:
                    break
                now = job.arrival
                continue
            seconds = self.cost.seconds(self._shape(running, admitted))
            now += seconds
            # By now every running sequence has one token more; prompts' first token comes with them.
            for each in running:
                each.done += 1
            self._record(recorder, running, now, seconds)
            ended = [each for each in running if each.done == each.job.output]
            for each in admitted:
                each.first_token = now
            for each in ended:
                for start in each.places:
                    memory.give_back(start)
                times = each.job.arrival, each.started, each.first_token, now
                tokens = each.job.output * each.job.outputs
                recorder.finished.append(Finished(*times, each.job.prompt, tokens, each.job.outputs))
            if ended:
                running = [each for each in running if each.done < each.job.output]
        return recorder.report()

    def _check(self, job: Job) -> int:
        size = self.reserve(job, self.longest)
        if job.prompt + job.output > self.longest:
            raise ValueError(f"a request of {job.prompt} + {job.output} tokens is longer than {self.longest}")
        return size

    def _admit(
        self, memory: BuddyAllocator, waiting: deque[tuple[Job, int]], running: int, now: float
    ) -> list[_Sequence]:
        admitted: list[_Sequence] = []
        while waiting and running + len(admitted) < self.batch:
            job, size = waiting[0]
            places: list[int] = []
            for _ in range(job.outputs):
                start = memory.take(size)
                if start is None:
                    break
                places.append(start)
            if len(places) < job.outputs:
                for start in places:
                    memory.give_back(start)
                if not running and not admitted:
                    raise ValueError(f"{job.outputs} times {size} tokens do not fit {self.slots} slots")
                break
            waiting.popleft()
            admitted.append(_Sequence(job, size, places, now, self.admitted))
            self.admitted += 1
        return admitted

    def _shape(self, running: list[_Sequence], admitted: list[_Sequence]) -> StepShape:
        new = len(admitted)
        old = running[: len(running) - new]
        rows = sum(each.job.outputs for each in old)
        context = sum(each.job.outputs * (each.job.prompt + each.done) for each in old)
        prompts = [each.job.prompt for each in admitted]
        attended = sum(prompt * (prompt + 1) // 2 for prompt in prompts)
        first = sum(each.job.outputs for each in admitted)
        tokens = rows + sum(prompts)
        return StepShape(
            bool(new),
            1,
            rows,
            rows,
            sum(prompts),
            first,
            rows + first,
            context,
            attended,
            tokens,
            copied=self._count_copied(old),
            block_size=1,
            requests=len(running),
        )

    def _count_copied(self, running: list[_Sequence]) -> int:
        """Tokens that this iteration copies from beam to beam."""
        if self.parents is None:
            return 0
        copied = 0
        for each in running:
            if each.job.beams:
                origins = self.parents.at(each.job.outputs, each.number, each.done)
                moved = sum(beam != origin for beam, origin in enumerate(origins))
                copied += moved * (each.job.prompt + each.done)
        return copied

    def _record(self, recorder: Recorder, running: list[_Sequence], now: float, seconds: float) -> None:
        tokens = reserved = given = 0
        for each in running:
            job, copies = each.job, each.job.outputs
            tokens += copies * (job.prompt + each.done)
            reserved += copies * (job.output - each.done)
            given += copies * each.size
        recorder.step(now, seconds, len(running), tokens, reserved, given - tokens - reserved)


class _Sequence:
    """A running request."""

    __slots__ = ("done", "first_token", "job", "number", "places", "size", "started")

    def __init__(self, job: Job, size: int, places: list[int], now: float, number: int) -> None:
        self.job, self.size, self.places, self.started, self.number = job, size, places, now, number
        self.done = 0
        self.first_token = now
