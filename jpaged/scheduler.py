"""Which sequences run in the next step, with how many tokens: host policy. Imports no JAX.

The device allocates blocks inside the step; the host only counts them (slots.py says how), so that the device's
allocator cannot run out and a step can be planned before the tokens of the one before it are read:

    schedule() -> Schedule     counts move to the upper bound: every dispatched iteration yields a token
    update(schedule, tokens)   counts move back to what really happened; finished sequences give up their slot

A policy (policies.py) says who is next and who makes way; by default first come, first served. Decoding sequences
come first in the token budget; what is left goes to prompts, in chunks. When the pool is full, the last of the order is
preempted: it gives up its slot and waits to go on from its tokens. What others need of its blocks is copied to the host
and back (swapping.py) or computed again (Kwon et al. 2023, section 4.5).

Full blocks get names (prefix_index.py), prompt blocks in the plan that computes them: a prompt admitted later, even
in the same plan, shares those it begins with and computes the rest. Since prompts are worked off in order, each with
all the budget that is left, two never compute the same block at once. What a sequence generated is named when it ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import islice

import numpy as np

from jpaged.beam_groups import advance_groups, blocks_to_start, check_group, take_results
from jpaged.block_naming import BlockNaming
from jpaged.config import EngineConfig, cut_to_bucket
from jpaged.features import Feature
from jpaged.policies import FirstComeFirstServed, SchedulingPolicy
from jpaged.prefix_index import EvictionPolicy, NamedBlock, PrefixIndex
from jpaged.request import Request, Status
from jpaged.schedule import Order, PrefillChunk, Schedule
from jpaged.sliding import Sliding
from jpaged.slots import UNBOUNDED, SlotCounts
from jpaged.swapping import NOTHING_FOUND, Found, Swapping
from jpaged.tiers import HostStore


class Scheduler:
    """Queues, slots and the block count of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy | None = None,
        eviction_policy: EvictionPolicy | None = None,
        store: HostStore | None = None,
        swap_pays: Callable[[int], bool] = lambda blocks: True,
    ) -> None:
        """store: host memory for blocks; None: there is none. swap_pays: see `Swapping`."""
        self.config = config
        self.usable_blocks = config.num_blocks - 1  # block 0 is the null block
        self.watermark_blocks = int(config.watermark * self.usable_blocks)
        self.waiting: SchedulingPolicy = FirstComeFirstServed() if policy is None else policy
        self.arrivals = 0
        self.num_preemptions = 0
        self.steps_dispatched = 0
        self.steps_read = 0
        self.running: dict[int, Request] = {}  # slot -> request, in order of admission
        self.prefilling: list[Request] = []  # of the running, those whose prompt is not all dispatched
        self.free_slots = list(range(config.max_num_seqs))
        self.counts = SlotCounts(config)
        self.index = PrefixIndex(config.num_names, eviction_policy, windowed=config.window is not None)
        self.names = BlockNaming(config, self.index, self.counts)
        self.store = HostStore(1) if store is None else store
        self.swapping = Swapping(self.index, self.store, swap_pays)
        self.sliding = Sliding(config, self.index, self.counts)
        self.num_beams = 0  # running requests that are beams
        self.held_slots = 0  # free ones, for the other beams of groups whose prompt is being computed
        self.to_release: list[int] = []  # slots that finished; the next plan releases their blocks
        self.to_name: list[Order] = []  # blocks of theirs to keep; the next plan names them first
        self.prefix_queries = 0  # tokens of admitted requests
        self.prefix_hits = 0  # of them, those found in the cache

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError at once for a prompt that can never run."""
        request.check_length(self.config.max_model_len)
        if request.beams is not None:
            check_group(request, self.config, self.usable_blocks - self.index.num_pinned)
        self.names.hash_blocks(request)
        self.arrivals += 1
        for each in request.group:
            each.arrival = self.arrivals
        self.waiting.add(request)

    def resume(self, request: Request) -> None:
        """The mask for the next token of a structured request is on the device."""
        if request.slot >= 0:
            self.counts.held[request.slot] = False

    def abort(self, request: Request) -> None:
        """End a request wherever it is; its blocks are released by the next step. Finished ones are left alone."""
        if not request.finished:
            if request.beams is not None and request.status is not Status.WAITING:
                self.held_slots -= len(request.forks)
            for fork in request.forks:  # they are not queued before their prompt is computed
                fork.finish("abort")
            request.forks = []
            self.end(request, "abort")

    def end(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request for a reason that only the host knows, or give a finished one that reason."""
        status = request.status
        request.finish(reason, stop_reason)
        if status is Status.WAITING:
            self._forget_waiting(request)
        elif status is not Status.FINISHED:
            self._retire(request)

    def has_unfinished(self) -> bool:
        """Whether any request runs or waits, or a finished one still owns blocks."""
        return bool(self.running or self.waiting or self.to_release or self.index.garbage)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. Returns whether all of their memory is free (or will be after the next steps):
        False if running sequences still use some, which are freed with them."""
        self.index.forget_all()
        self.store.clear()
        return len(self.index.garbage) == self.index.num_named

    def pin_prefix(self, keys: list[bytes]) -> tuple[int, int]:
        """Keep the cached blocks at the beginning of `keys` from being evicted. Returns (pin, number of blocks).

        Raises ValueError where the blocks left over could no longer hold one sequence of max_model_len.
        """
        chain = self.index.match(keys)
        return self.index.pin(chain, self.usable_blocks - self.config.most_held_blocks), len(chain)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> Schedule:
        """Plan the next step from counts alone. A plan without rows and releases means: nothing to do yet."""
        plan = Schedule(name_first=self.to_name)
        self.to_name = []
        self.swapping.begin(self.free_blocks)
        self._release_finished(plan)
        self.sliding.slide(plan, self.running, self.prefilling)
        self._pick_decode(plan)
        self._pick_prefill(plan)
        if not plan.prefill and plan.decode:
            self._extend_decode(plan)
        self._commit(plan)
        self._reclaim(plan)
        return plan

    def update(
        self, plan: Schedule, tokens: np.ndarray, remaining: np.ndarray, beams: np.ndarray | None = None
    ) -> list[Request]:
        """Take a step's results. Returns the requests that got tokens or finished.

        tokens     i32[K, R]: per iteration and row the sampled token, -1 for none
        remaining  i32[R]: per row the tokens its request may still generate; 0 = it finished on the device
        beams      i32[K, R, 6]: what became of the rows that are beams (beams.py); needed where there are any
        """
        touched: list[Request] = []
        self.steps_read += 1
        decoded = len(plan.decode)
        counts = (tokens[:, :decoded] >= 0).sum(axis=0)
        self.counts.settle(plan.decode_slots, plan.epochs, plan.num_steps, counts)
        self.waiting.charge(plan, counts)
        columns = tokens.T.tolist()
        ended = (remaining[:decoded] == 0).tolist()
        for request, column, count, end in zip(plan.decode, columns, counts.tolist(), ended, strict=False):
            if not count or request.status is Status.FINISHED or request.beams is not None:
                continue
            touched.append(request)
            # Beyond the stop ids the device looks at, the host has to.
            if end or len(request.stop_ids) > self.config.max_stop_ids:
                self._take_tokens(request, column[:count])
            else:
                request.output_token_ids += column[:count]
        for column, chunk in zip(columns[decoded:], plan.prefill, strict=False):
            if chunk.last and chunk.request.status is not Status.FINISHED and chunk.request.beams is None:
                touched.append(chunk.request)
                self._take_tokens(chunk.request, column[:1])
        if plan.has_beams:
            assert beams is not None
            for group in advance_groups(plan, self.counts, tokens, beams):
                for request in group:
                    request.finish("length")
                    self._retire(request)
                take_results(group)
                touched += group
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
            slots = np.flatnonzero(self.counts.ready & (self.counts.left_known > self.counts.in_flight))
            short = self.counts.growth(slots, 1).sum() - self.available_blocks
            if short <= 0 or not self._preempt_last(plan):
                break
        slots = slots[np.argsort(self.counts.order[slots], kind="stable")]
        plan.decode_slots = slots.astype(np.int32)
        plan.decode = [self.running[slot] for slot in slots.tolist()]

    def _pick_prefill(self, plan: Schedule) -> None:
        """Give the budget left to prompts under way, then to waiting ones."""
        budget = self._prefill_budget(len(plan.decode))
        # Blocks for this step's decode tokens are spoken for before anyone is admitted.
        spoken_for = int(self.counts.growth(plan.decode_slots, 1).sum())
        for request in list(self.prefilling):
            if budget <= 0:
                break
            budget -= self._take_chunk(plan, request, budget, spoken_for)
        while budget > 0 and self.open_slots > 0:
            admitted = self._admit_next(plan, spoken_for)
            if admitted is None:
                break
            budget -= self._take_chunk(plan, admitted, budget, spoken_for)
        # Rows that sample come first, so that the head is computed for a prefix of the rows.
        plan.prefill.sort(key=lambda chunk: not chunk.last)

    def _extend_decode(self, plan: Schedule) -> None:
        """Choose the decode iterations of one dispatch: as many as are wanted and as the pool can hold."""
        left, once = self.counts.left(plan.decode_slots), self.counts.structured[plan.decode_slots]
        left[once] = 1
        steps = min(self.config.decode_steps, int(left.max()))
        if self.waiting:
            # Stop where the first sequence is known to end; one that ends in a step under way frees its slot
            # when that step is read, so do not run far ahead of it.
            plan.stop_early = True
            ending = len(plan.decode) < int(self.counts.ready.sum())
            steps = 1 if ending else min(steps, int(left[~once].min(initial=steps)))
        growth = self.counts.growth
        while steps > 1 and growth(plan.decode_slots, np.minimum(left, steps)).sum() > self.available_blocks:
            steps //= 2
        plan.num_steps = steps

    def _commit(self, plan: Schedule) -> None:
        """Move the counts to what the step will have done at most."""
        plan.has_beams = self.num_beams > 0
        plan.epochs = self.counts.epoch[plan.decode_slots]
        self.counts.plan_iterations(plan.decode_slots, plan.num_steps)
        for chunk in plan.prefill:
            request = chunk.request
            request.prefilled += chunk.length
            if chunk.last:
                request.status = Status.DECODE
                self.counts.begin_decoding(chunk.slot)
        if plan.prefill:
            self.prefilling = [request for request in self.prefilling if request.status is Status.PREFILL]

    def _reclaim(self, plan: Schedule) -> None:
        """Take from the cache what the plan needs, and clear away what can never be found again."""
        needed = max(-self.free_blocks, 0)
        spare = self.config.max_orders - sum(map(len, plan.orders))
        for _ in range(max(needed, min(len(self.index.garbage), spare))):
            self.swapping.evict(plan)
        self.index.close_plan()
        if plan.has_work:
            self.steps_dispatched += 1

    # ------------------------------------------------------------------ blocks

    @property
    def open_slots(self) -> int:
        """Slots for whoever comes: those held for beams are not."""
        return len(self.free_slots) - self.held_slots

    @property
    def free_blocks(self) -> int:
        """Blocks in use by nobody and not cached; below 0 while a plan counts on blocks that the cache will give up."""
        return self.usable_blocks - self.counts.private - self.index.num_named

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had, cached ones included."""
        return self.free_blocks + self.index.reclaimable

    # ------------------------------------------------------------------ slots

    def _admit_next(self, plan: Schedule, spoken_for: int) -> Request | None:
        """Admit the head of the queue if it fits; the reserve of blocks is waived when nothing runs."""
        request = self.waiting.first()
        if request is None or request.readable_from > self.steps_read:  # preempted: its last tokens are to be read
            return None
        beams = len(request.group) if request.beams is not None else 1
        if beams > self.open_slots:
            return None
        self.names.hash_blocks(request)
        window = self.config.window if request.beams is None else None
        most = UNBOUNDED if window is None else self.config.most_held_blocks
        reserve = self.watermark_blocks if self.running else 0
        found = self.swapping.find(request, self.config.block_size, window)
        needed, usable = self._weigh(request, found, most)
        if needed > usable and not self.running:  # alone it fits; with a window only without what it would begin with
            found = NOTHING_FOUND
            needed, usable = self._weigh(request, found, most)
        evicted = max(needed + spoken_for - self.free_blocks, 0)
        room = self._order_room(plan)
        if needed > usable - spoken_for - reserve or len(found.keys) + evicted > room:
            return None
        growth = int(self.counts.growth(plan.decode_slots, self.config.decode_steps).sum())
        if not self.swapping.make_room(plan, found, growth, room):
            return None
        chain = self.swapping.take(plan, request, found)
        if chain is None:
            return self._admit_next(plan, spoken_for)
        self.waiting.remove(request)
        self._admit(plan, request, chain, found.first, most)
        self.held_slots += beams - 1
        return request

    def _weigh(self, request: Request, found: Found, most_private: int) -> tuple[int, int]:
        """(blocks that a request needs besides those found on the device, blocks that can be had without these)."""
        private = min(-(-request.num_tokens // self.config.block_size) - found.end, most_private)
        return private + found.stored, self.available_blocks - sum(not block.locks for block in found.here)

    def _order_room(self, plan: Schedule) -> int:
        """Orders that may still be spent on admissions: what the others of this plan may need is kept back."""
        kept = max(self.config.max_filled_blocks - len(plan.name), 0)
        return self.config.max_orders - sum(map(len, plan.orders)) - kept

    def _admit(self, plan: Schedule, request: Request, chain: list[NamedBlock], first: int, most_private: int) -> None:
        """Give the request a slot, the blocks it begins with, from column `first` on, and reserve those it adds."""
        request.chain, request.slid, request.admitted = chain, first, self.index.tick()
        self.swapping.come_back(request)
        self._start(plan, request, len(chain) - first, most_private)
        request.prefilled = len(chain) * self.config.block_size
        if request.num_cached_tokens is None:  # not so after a preemption
            request.num_cached_tokens = request.prefilled
            self.prefix_queries += request.num_tokens
            self.prefix_hits += request.prefilled
        plan.share += [(request.slot, column, chain[column].name) for column in range(first, len(chain))]

    def _start(self, plan: Schedule, request: Request, named: int, most_private: int = UNBOUNDED) -> None:
        slot = heapq.heappop(self.free_slots)
        request.slot = slot
        request.status = Status.PREFILL
        request.prefill_target = request.num_tokens
        self.running[slot] = request
        self.num_beams += request.beams is not None
        self.prefilling.append(request)
        left, structured = request.max_tokens - len(request.output_token_ids), request.features & Feature.STRUCTURED
        self.counts.begin(slot, request.num_tokens, left, named, bool(structured), request.slid, most_private)
        plan.admit.append(request)

    def _take_chunk(self, plan: Schedule, request: Request, budget: int, spoken_for: int) -> int:
        """Give a prompt its next chunk and, at its end, start what forks from it. Returns the budget spent."""
        left = request.prefill_target - request.prefilled
        length = min(budget, left)
        if request.beams is not None and length == left and not self._beams_fit(plan, request, budget, spoken_for):
            length -= 1  # the others of the group start with the last token or not at all: wait for room
        if not length:
            return 0
        end, last = request.prefilled + length, length == left
        plan.prefill.append(PrefillChunk(request, request.slot, request.prefilled, length, last))
        if request.block_keys:
            self.names.name_blocks(request, end, plan.name, self.config.max_filled_blocks)
        return length + (self._fork(plan, request, budget - length, spoken_for) if last else 0)

    def _fork(self, plan: Schedule, request: Request, budget: int, spoken_for: int) -> int:
        """Start the other outputs of a prompt in the step that computes its last token: they share all its blocks.

        Those that find no slot, no blocks or no budget queue up as requests of their own, which begin with the blocks
        in the cache, if it is on. Returns the budget spent: a row each.
        """
        forks, request.forks = request.forks, []
        tokens = request.prefill_target
        if forks and not request.block_keys and tokens // self.config.block_size <= self._order_room(plan):
            self.names.name_blocks(request, tokens, plan.name, tokens)
        if request.beams is not None:
            self.held_slots -= len(forks)
            plan.beam.append((request.slot, request.slot, 1))
        own = -(-tokens // self.config.block_size) - request.slid - int(self.counts.named[request.slot])
        started = 0
        for fork in forks[:budget]:
            if request.beams is None and not self._fork_fits(plan, own, spoken_for):
                break
            fork.block_keys = list(request.block_keys)
            fork.chain, fork.slid, fork.foreign = list(request.chain), request.slid, set(request.foreign)
            fork.admitted = request.admitted
            self.index.lock(fork.chain[fork.slid :])
            self._start(plan, fork, named=int(self.counts.named[request.slot]))
            fork.prefilled = tokens
            fork.num_cached_tokens = request.num_cached_tokens
            plan.fork.append((fork.slot, request.slot, 1))
            if request.beams is not None:
                plan.beam.append((fork.slot, request.slot, 1 + fork.index))
            plan.prefill.append(PrefillChunk(fork, fork.slot, tokens, 0, last=True))
            started += 1
        for fork in forks[started:]:
            fork.block_keys = list(request.block_keys)
            self.waiting.add(fork)
        return started

    def _fork_fits(self, plan: Schedule, own: int, spoken_for: int) -> bool:
        """Whether one more sequence can start that owns `own` blocks."""
        evicted = max(own + spoken_for - self.free_blocks, 0)
        room = self.available_blocks - spoken_for - self.watermark_blocks
        return self.open_slots > 0 and own <= room and 1 + evicted <= self._order_room(plan)

    def _beams_fit(self, plan: Schedule, request: Request, budget: int, spoken_for: int) -> bool:
        """Whether all beams of a group can start with the last token of their prompt, with slots held for them."""
        width, left = len(request.group), request.prefill_target - request.prefilled
        own, named = blocks_to_start(request, self.index, self.config.block_size)
        evicted = max(own + spoken_for - self.free_blocks, 0)
        fits = own <= self.available_blocks - spoken_for and 2 * width + evicted + named <= self._order_room(plan)
        return fits and left + width - 1 <= budget

    def _prefill_budget(self, decode_rows: int) -> int:
        """Tokens this step may prefill: up to the limit, cut to a bucket that is not mostly padding."""
        limit = self.config.max_num_batched_tokens - decode_rows
        if self.config.free_padding:
            return limit
        wanted = sum(request.prefill_target - request.prefilled for request in self.prefilling)
        for request in islice(self.waiting, max(self.open_slots, 0)):
            if wanted >= limit:
                break
            wanted += request.num_tokens - len(self.index.match(request.block_keys)) * self.config.block_size
        total = decode_rows + min(wanted, limit)
        return cut_to_bucket(self.config.token_buckets, total, decode_rows, limit + decode_rows) - decode_rows

    def _preempt_last(self, plan: Schedule) -> bool:
        """Send the last of the policy's order back to wait, beams all together. False if nobody else runs."""
        if not self.running:
            return False
        victim = self.waiting.last(self.running.values())
        group = [each for each in victim.group if each.slot >= 0] if victim.beams is not None else [victim]
        if len(group) == len(self.running):
            return False
        first = victim if victim.beams is None else victim.group[0]
        for request in group:
            keys = self._take_slot(plan, request)
            if request is first:
                self.swapping.keep(first, keys)
        if victim.beams is not None:
            # Beams hang together: the group begins again from its prompt.
            self.held_slots -= len(first.forks)
            first.forks = victim.group[1:]
            victim.beams.restart()
        first.readable_from = self.steps_dispatched
        first.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(first)
        return True

    def _take_slot(self, plan: Schedule, request: Request) -> list[bytes]:
        """A running request loses its slot in the plan that is being made. Returns the keys of blocks that stay."""
        slot = request.slot
        del self.running[slot]
        self.num_beams -= request.beams is not None
        keys = self.names.leave_slot(request, plan.name_first, swapped=self.store.swap_blocks > 0)
        if request.status is Status.PREFILL:
            self.prefilling.remove(request)
        request.slot = -1
        request.status = Status.WAITING
        self._free_slot(slot)
        plan.release.append(slot)
        return keys

    def _forget_waiting(self, request: Request) -> None:
        """A request that waits has ended."""
        self.waiting.remove(request)
        self.swapping.come_back(request)
        self.names.forget(request)

    def _retire(self, request: Request) -> None:
        """A running request ended: its slot and blocks are released by the next plan."""
        if request in self.prefilling:
            self.prefilling.remove(request)
        del self.running[request.slot]
        self.num_beams -= request.beams is not None
        self.names.leave_slot(request, self.to_name, swapped=False)
        self.names.forget(request)
        self.counts.decoding[request.slot] = False
        self.to_release.append(request.slot)
        request.slot = -1

    def _free_slot(self, slot: int) -> None:
        """Count a slot's blocks as free: the plan that is being made releases them before it allocates."""
        self.counts.end(slot)
        heapq.heappush(self.free_slots, slot)

    # ------------------------------------------------------------------ tokens

    def _take_tokens(self, request: Request, token_ids: list[int]) -> None:
        """Append tokens one by one, watching for the end."""
        queued = request.status is Status.WAITING
        request.append(token_ids)
        if not request.finished:
            return
        if queued:  # it was preempted while this step ran
            self._forget_waiting(request)
        else:
            self._retire(request)
