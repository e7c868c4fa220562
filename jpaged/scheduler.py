"""Which sequences run in the next step, with how many tokens: host policy. Imports no JAX.

The device allocates blocks inside the step; the host only counts them. `reserved[slot]` is the most blocks the
slot's sequence can own once every step already dispatched has run, so the sum over the slots never understates
the device, admission is safe, and the device's allocator cannot run out. Counts do not depend on token values,
which is why a step can be scheduled before the tokens of the one before it are read:

    schedule() -> Schedule     counts move to the upper bound: every dispatched iteration yields a token
    update(schedule, tokens)   counts move back to what really happened; finished sequences give up their slot

First come, first served. Decoding sequences come first in the token budget; what is left goes to prompts, in
chunks. When the pool is full, the sequence that came last is preempted: its blocks are released and it waits, at
the head of the queue, to be computed again from its tokens (recompute, Kwon et al. 2023, section 4.5).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from jpaged.config import EngineConfig, pick_bucket
from jpaged.request import Request, Status

# A step of 132 tokens costs as much as its bucket of 256. Below this share, fill the smaller bucket instead.
MIN_BUCKET_FILL = 0.7


@dataclass(slots=True)
class PrefillChunk:
    """Positions [start, start + length) of a request's tokens; `last` if the next token is sampled after it."""

    request: Request
    slot: int
    start: int
    length: int
    last: bool


@dataclass(slots=True)
class Schedule:
    """One step. Rows are `decode_slots` in order, then the prefill chunks, the one that does not end last."""

    release: list[int] = field(default_factory=list)  # slots whose blocks go back first
    admit: list[Request] = field(default_factory=list)  # requests that take a slot in this step
    decode: list[Request] = field(default_factory=list)
    decode_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    prefill: list[PrefillChunk] = field(default_factory=list)
    num_steps: int = 1  # decode iterations; 1 whenever there is prefill
    stop_early: bool = False  # leave the loop as soon as a sequence finishes: another waits for its slot
    epochs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of decode_slots, when scheduled

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.prefill)

    @property
    def has_rows(self) -> bool:
        return bool(self.decode) or bool(self.prefill)


class Scheduler:
    """Queues, slots and the block count of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.usable_blocks = config.num_blocks - 1  # block 0 is the null block
        self.watermark_blocks = int(config.watermark * self.usable_blocks)
        self.waiting: OrderedDict[Request, None] = OrderedDict()  # a queue from which any one can be taken
        self.num_preemptions = 0
        self.steps_dispatched = 0
        self.steps_read = 0
        slots = config.max_num_seqs
        self.running: dict[int, Request] = {}  # slot -> request, in order of admission
        self.prefilling: list[Request] = []  # of the running, those whose prompt is not all dispatched
        self.free_slots = list(range(slots))
        self.to_release: list[int] = []  # slots that finished; the next plan releases their blocks
        self.reserved = np.zeros(slots, np.int64)  # blocks
        self.reserved_total = 0
        self.kv_known = np.zeros(slots, np.int64)  # tokens in the cache by the last results read
        self.left_known = np.zeros(slots, np.int64)  # tokens still to sample, likewise
        self.in_flight = np.zeros(slots, np.int64)  # decode iterations dispatched since
        self.decoding = np.zeros(slots, bool)
        self.epoch = np.zeros(slots, np.int64)  # counts the owners of a slot
        self.order = np.zeros(slots, np.int64)  # admission number of the owner
        self.admissions = 0

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError at once for a prompt that can never run."""
        length, limit = len(request.prompt_token_ids), self.config.max_model_len
        if length >= limit:
            raise ValueError(
                f"the prompt has {length} tokens, but max_model_len is {limit}, of which at least one is generated: "
                f"at most {limit - 1} are allowed"
            )
        self.waiting[request] = None

    def abort(self, request: Request) -> None:
        """End a request wherever it is; its blocks are released by the next step. Finished ones are left alone."""
        if request.finished:
            return
        queued = request.status is Status.WAITING
        request.finish("abort")
        if queued:
            del self.waiting[request]
        else:
            self._retire(request)

    def has_unfinished(self) -> bool:
        """Whether any request runs or waits, or a finished one still owns blocks."""
        return bool(self.running or self.waiting or self.to_release)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> Schedule:
        """Plan the next step from counts alone. A plan without rows and releases means: nothing to do yet."""
        plan = Schedule()
        self._release_finished(plan)
        self._pick_decode(plan)
        self._pick_prefill(plan)
        if not plan.prefill and plan.decode:
            self._extend_decode(plan)
        self._commit(plan)
        return plan

    def update(self, plan: Schedule, tokens: np.ndarray, remaining: np.ndarray) -> list[Request]:
        """Take a step's results. Returns the requests that got tokens or finished.

        tokens     i32[K, R]: per iteration and row the sampled token, -1 for none
        remaining  i32[R]: per row the tokens its request may still generate; 0 = it finished on the device
        """
        touched: list[Request] = []
        self.steps_read += 1
        decoded = len(plan.decode)
        counts = (tokens[:, :decoded] >= 0).sum(axis=0)
        self._settle(plan, counts)
        columns = tokens.T.tolist()
        ended = (remaining[:decoded] == 0).tolist()
        for request, column, count, end in zip(plan.decode, columns, counts.tolist(), ended, strict=False):
            if not count or request.status is Status.FINISHED:
                continue
            touched.append(request)
            # Beyond the stop ids the device looks at, the host has to.
            if end or len(request.stop_ids) > self.config.max_stop_ids:
                self._take_tokens(request, column[:count])
            else:
                request.output_token_ids += column[:count]
        for column, chunk in zip(columns[decoded:], plan.prefill, strict=False):
            if chunk.last and chunk.request.status is not Status.FINISHED:
                touched.append(chunk.request)
                self._take_tokens(chunk.request, column[:1])
        return touched

    # ------------------------------------------------------------------ the parts of schedule()

    def _release_finished(self, plan: Schedule) -> None:
        for slot in self.to_release:
            self._free_slot(slot)
        plan.release = self.to_release
        self.to_release = []

    def _pick_decode(self, plan: Schedule) -> None:
        """All decoding sequences that may still generate; preempt from the end until one more token each fits."""
        while True:
            slots = np.flatnonzero(self.decoding & (self.left_known > self.in_flight))
            short = self._growth(slots, 1).sum() - self.free_blocks
            if short <= 0 or not self._preempt_last(plan):
                break
        slots = slots[np.argsort(self.order[slots], kind="stable")]
        plan.decode_slots = slots.astype(np.int32)
        plan.decode = [self.running[slot] for slot in slots.tolist()]

    def _pick_prefill(self, plan: Schedule) -> None:
        """Give the budget left to prompts under way, then to waiting ones."""
        budget = self._prefill_budget(len(plan.decode))
        # Blocks for this step's decode tokens are spoken for before anyone is admitted.
        free = self.free_blocks - int(self._growth(plan.decode_slots, 1).sum())
        chunks: list[PrefillChunk] = []
        for request in self.prefilling:
            if budget <= 0:
                break
            budget -= self._take_chunk(chunks, request, budget)
        while budget > 0 and self.free_slots:
            admitted = self._next_waiting(free, idle=not self.running)
            if admitted is None:
                break
            free -= self._admit(plan, admitted)
            budget -= self._take_chunk(chunks, admitted, budget)
        # Rows that sample come first, so that the head is computed for a prefix of the rows.
        plan.prefill = sorted(chunks, key=lambda chunk: not chunk.last)

    def _extend_decode(self, plan: Schedule) -> None:
        """Choose the decode iterations of one dispatch: as many as are wanted and as the pool can hold."""
        left = self._left(plan.decode_slots)
        steps = min(self.config.decode_steps, int(left.max()))
        if self.waiting:
            # Stop where the first sequence is known to end; one that ends in a step under way frees its slot
            # when that step is read, so do not run far ahead of it.
            plan.stop_early = True
            ending = len(plan.decode) < int(self.decoding.sum())
            steps = 1 if ending else min(steps, int(left.min()))
        while steps > 1 and self._growth(plan.decode_slots, np.minimum(left, steps)).sum() > self.free_blocks:
            steps //= 2
        plan.num_steps = steps

    def _commit(self, plan: Schedule) -> None:
        """Move the counts to what the step will have done at most."""
        slots = plan.decode_slots
        plan.epochs = self.epoch[slots]
        self.in_flight[slots] += plan.num_steps
        self._reserve(slots)
        if plan.has_rows or plan.release:
            self.steps_dispatched += 1
        for chunk in plan.prefill:
            request = chunk.request
            request.prefilled += chunk.length
            if chunk.last:
                request.status = Status.DECODE
                self.decoding[chunk.slot] = True
                self.left_known[chunk.slot] -= 1  # this one is certain
        if plan.prefill:
            self.prefilling = [request for request in self.prefilling if request.status is Status.PREFILL]

    # ------------------------------------------------------------------ counts

    @property
    def free_blocks(self) -> int:
        return self.usable_blocks - self.reserved_total

    def _left(self, slots: np.ndarray) -> np.ndarray:
        """Tokens each slot still has to sample if every dispatched iteration yields one."""
        return np.maximum(self.left_known[slots] - self.in_flight[slots], 0)

    def _kv_tokens(self, slots: np.ndarray) -> np.ndarray:
        """Most tokens each slot has in the cache once the dispatched steps have run."""
        return self.kv_known[slots] + np.minimum(self.left_known[slots], self.in_flight[slots])

    def _growth(self, slots: np.ndarray, tokens: int | np.ndarray) -> np.ndarray:
        """Blocks each slot would have to add to hold `tokens` more."""
        wanted = -(-(self._kv_tokens(slots) + tokens) // self.config.block_size)
        return np.maximum(wanted - self.reserved[slots], 0)

    def _reserve(self, slots: np.ndarray) -> None:
        before = self.reserved[slots].sum()
        self.reserved[slots] = -(-self._kv_tokens(slots) // self.config.block_size)
        self.reserved_total += int(self.reserved[slots].sum() - before)

    def _settle(self, plan: Schedule, counts: np.ndarray) -> None:
        """Replace what a step was planned to do by what it did: it may have left its loop early."""
        live = self.epoch[plan.decode_slots] == plan.epochs
        slots, counts = plan.decode_slots[live], counts[live]
        self.in_flight[slots] -= plan.num_steps
        self.kv_known[slots] += counts
        self.left_known[slots] -= counts
        self._reserve(slots)

    # ------------------------------------------------------------------ slots

    def _next_waiting(self, free: int, idle: bool) -> Request | None:
        """The head of the queue if it can be admitted now; the reserve is waived when nothing runs."""
        request = next(iter(self.waiting), None)
        if request is None or request.readable_from > self.steps_read:  # preempted: its last tokens are to be read
            return None
        needed = -(-request.num_tokens // self.config.block_size)
        if needed > free - (0 if idle else self.watermark_blocks):
            return None
        del self.waiting[request]
        return request

    def _admit(self, plan: Schedule, request: Request) -> int:
        """Give the request a slot and reserve the blocks of all its tokens. Returns their number."""
        slot = heapq.heappop(self.free_slots)
        request.slot = slot
        request.status = Status.PREFILL
        request.prefill_target = request.num_tokens
        request.prefilled = 0
        self.running[slot] = request
        self.prefilling.append(request)
        self.epoch[slot] += 1
        self.admissions += 1
        self.order[slot] = self.admissions
        self.kv_known[slot] = request.num_tokens
        self.left_known[slot] = request.max_tokens - len(request.output_token_ids)
        self._reserve(np.array([slot]))
        plan.admit.append(request)
        return int(self.reserved[slot])

    def _take_chunk(self, chunks: list[PrefillChunk], request: Request, budget: int) -> int:
        length = min(budget, request.prefill_target - request.prefilled)
        last = request.prefilled + length == request.prefill_target
        chunks.append(PrefillChunk(request, request.slot, request.prefilled, length, last))
        return length

    def _prefill_budget(self, decode_rows: int) -> int:
        """Tokens this step may prefill: up to the limit, cut to a bucket that is not mostly padding."""
        limit = self.config.max_num_batched_tokens - decode_rows
        wanted = sum(request.prefill_target - request.prefilled for request in self.prefilling)
        for request in islice(self.waiting, len(self.free_slots)):
            if wanted >= limit:
                break
            wanted += request.num_tokens
        total = decode_rows + min(wanted, limit)
        buckets = self.config.token_buckets
        bucket = pick_bucket(buckets, max(total, 1))
        smaller = buckets[max(buckets.index(bucket) - 1, 0)]
        if total < MIN_BUCKET_FILL * bucket and decode_rows < smaller < total:
            return smaller - decode_rows
        return limit

    def _preempt_last(self, plan: Schedule) -> bool:
        """Send the sequence that was admitted last back to the queue. False if only one is left."""
        if len(self.running) <= 1:
            return False
        slot = max(self.running, key=self.order.__getitem__)
        request = self.running.pop(slot)
        if request.status is Status.PREFILL:
            self.prefilling.remove(request)
        request.slot = -1
        request.status = Status.WAITING
        request.num_preemptions += 1
        request.readable_from = self.steps_dispatched
        self.num_preemptions += 1
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)
        self._free_slot(slot)
        plan.release.append(slot)
        return True

    def _retire(self, request: Request) -> None:
        """A running request ended: its slot and blocks are released by the next plan."""
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.decoding[request.slot] = False
        del self.running[request.slot]
        self.to_release.append(request.slot)
        request.slot = -1

    def _free_slot(self, slot: int) -> None:
        """Count a slot's blocks as free: the plan that is being made releases them before it allocates."""
        self.decoding[slot] = False
        self.kv_known[slot] = self.left_known[slot] = self.in_flight[slot] = 0
        self._reserve(np.array([slot]))
        self.epoch[slot] += 1
        heapq.heappush(self.free_slots, slot)

    # ------------------------------------------------------------------ tokens

    def _take_tokens(self, request: Request, token_ids: list[int]) -> None:
        """Append tokens one by one, watching for the end."""
        queued = request.status is Status.WAITING
        request.append(token_ids)
        if not request.finished:
            return
        if queued:  # it was preempted while this step ran
            del self.waiting[request]
        else:
            self._retire(request)
