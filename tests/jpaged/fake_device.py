"""A device in plain Python that runs schedules as the real step does, and checks what the scheduler promised."""

from collections import Counter

import numpy as np

from jpaged.request import Request
from jpaged.schedule import Schedule
from jpaged.scheduler import Scheduler
from jpaged.tiers import StoredBlock


def next_token(tokens: list[int], seed: int, window: int | None = None, vocab: int = 97) -> int:
    """A model: the next token depends on every token before it, or the last `window` of them, and on the seed."""
    state = 7 + seed
    for token in tokens[-window:] if window else tokens:
        assert token >= 0, "read behind the window"
        state = (state * 31 + token + 1) % 1_000_003
    return state % vocab


class FakeDevice:
    """Blocks that hold tokens instead of keys and values; running out is an error as it would be on the device.

    A sequence is read from its blocks, so a block shared with the wrong content, or written by two, shows.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.config = scheduler.config
        self.store = scheduler.store
        slots = self.config.max_num_seqs
        self.free = list(range(1, self.config.num_blocks))
        self.content: dict[int, list[int]] = {}
        self.owners: Counter[int] = Counter()
        self.taker: dict[int, int] = {}  # block -> the slot it was allocated for
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.length = [0] * slots
        self.named: dict[int, int] = {}  # name -> block
        self.last: list[int | None] = [None] * slots
        self.left = [0] * slots
        self.seed = [0] * slots
        self.stop_ids: list[set[int]] = [set() for _ in range(slots)]
        self.computed = 0  # tokens of prompts
        self.saves: list[tuple[StoredBlock, np.ndarray]] = []  # copies under way

    @property
    def used_blocks(self) -> int:
        return self.config.num_blocks - 1 - len(self.free)

    def cached(self, slot: int) -> list[int]:
        """The tokens that the slot's sequence finds in its blocks, -1 where it has given them up."""
        gone = [-1] * self.config.block_size
        tokens = [token for block in self.tables[slot] for token in (self.content[block] if block else gone)]
        assert len(tokens) >= self.length[slot]
        return tokens[: self.length[slot]]

    def copy(self, plan: Schedule) -> None:
        """What happens before the step: blocks are read for the host, then written from it."""
        for save in plan.save:
            block = self.named[save.name] if save.name else self.tables[save.slot][save.column]
            assert len(self.content[block]) == self.config.block_size, "only full blocks are saved"
            self.saves.append((save.block, np.array(self.content[block])))
        for load in plan.load:
            if load.block.data is None:
                self.finish_copies()
            block = self._take(-1)
            self.content[block] = load.block.data.tolist()
            assert load.name not in self.named
            self.named[load.name] = block

    def finish_copies(self) -> None:
        """What was read arrives on the host."""
        for block, data in self.saves:
            self.store.arrive(block, data)
        self.saves = []

    def run(self, plan: Schedule) -> tuple[np.ndarray, np.ndarray]:
        self.copy(plan)
        assert sum(map(len, plan.orders)) <= self.config.max_orders
        self._name(plan.name_first)
        for slot in plan.release:
            for block in filter(None, self.tables[slot]):
                self._let_go(block)
            self.tables[slot], self.length[slot], self.last[slot], self.left[slot] = [], 0, None, 0
        for slot, first, _ in plan.slide:
            for column in range(min(first, len(self.tables[slot]))):
                if self.tables[slot][column]:
                    self._let_go(self.tables[slot][column])
                self.tables[slot][column] = 0
        for _, _, name in plan.drop:
            self._let_go(self.named.pop(name))
        for request in plan.admit:
            assert not self.tables[request.slot], "admitted to a slot whose blocks were not released"
            self.left[request.slot] = request.max_tokens - len(request.output_token_ids)
            self.seed[request.slot] = request.seed
            self.stop_ids[request.slot] = set(sorted(request.stop_ids)[: self.config.max_stop_ids])
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        rows = [*plan.decode_slots.tolist(), *(chunk.slot for chunk in plan.prefill)]
        assert len(set(rows)) == len(rows)
        out = np.full((self.config.decode_steps if not plan.prefill else 1, len(rows)), -1)
        self._start_chunks(plan)
        for step in range(plan.num_steps):
            ended = any(self.left[slot] == 0 for slot in plan.decode_slots)
            if step and plan.stop_early and ended:
                break
            for row, slot in enumerate(plan.decode_slots.tolist()):
                if self.left[slot]:
                    self._part(slot)
                    self._write(slot, self.last[slot])
                    out[step, row] = self._emit(slot)
        for row, chunk in enumerate(plan.prefill, start=len(plan.decode)):
            if chunk.last:
                out[0, row] = self._emit(chunk.slot)
        return out, np.array([self.left[slot] for slot in rows], np.int64)

    def _start_chunks(self, plan: Schedule) -> None:
        """Blocks first, then names, then what is shared, then every chunk writes and forks are made."""
        size = self.config.block_size
        for slot in {slot for slot, _, _ in plan.share}:
            columns = [column for other, column, _ in plan.share if other == slot]
            assert columns == list(range(columns[0], columns[-1] + 1)) and not self.tables[slot]
            assert columns[0] == 0 or self.config.window
            self.tables[slot] = [0] * (columns[-1] + 1)
            self.length[slot] = size * (columns[-1] + 1)
        chunks = [chunk for chunk in plan.prefill if chunk.length]
        for before, chunk in zip(plan.prefill, plan.prefill[1:], strict=False):
            if not chunk.length:  # a fork samples from the row before it
                assert chunk.last and before.last and chunk.request.group is before.request.group
        for chunk in chunks:
            assert self.length[chunk.slot] == chunk.start
            while len(self.tables[chunk.slot]) * size < chunk.start + chunk.length:
                self.tables[chunk.slot].append(self._take(chunk.slot))
        self._name(plan.name)
        for slot, column, name in plan.share:
            self.tables[slot][column] = self.named[name]
            self.owners[self.named[name]] += 1
        for chunk in chunks:
            for token in chunk.request.token_range(chunk.start, chunk.start + chunk.length):
                self._write(chunk.slot, token)
            self.computed += chunk.length
        for slot, parent, _ in plan.fork:
            assert not self.tables[slot] and self.length[parent]
            self.tables[slot], self.length[slot] = list(self.tables[parent]), self.length[parent]
            for block in filter(None, self.tables[slot]):
                self.owners[block] += 1
        for chunk in plan.prefill:  # all have been written before any is read
            known = chunk.request.token_range(0, chunk.start + chunk.length)
            seen = max(chunk.start - self.config.window + 1, 0) if self.config.window else 0
            assert self.cached(chunk.slot)[seen:] == known[seen:], "the blocks do not hold the request's tokens"

    def _part(self, slot: int) -> None:
        """Copy on write: a last block that others have too is theirs from now on."""
        column, offset = divmod(self.length[slot], self.config.block_size)
        if not offset:
            return
        block = self.tables[slot][column]
        if self.owners[block] - list(self.named.values()).count(block) > 1:
            self.tables[slot][column] = self._take(slot)
            self.content[self.tables[slot][column]] = list(self.content[block])
            self._let_go(block)
        else:
            self.taker[block] = slot

    def _write(self, slot: int, token: int) -> None:
        column, offset = divmod(self.length[slot], self.config.block_size)
        if column == len(self.tables[slot]):
            self.tables[slot].append(self._take(slot))
        block = self.tables[slot][column]
        assert self.taker[block] == slot, "written by one that only shares it"
        assert len(self.content[block]) == offset
        self.content[block].append(token)
        self.length[slot] += 1

    def _emit(self, slot: int) -> int:
        token = next_token(self.cached(slot), self.seed[slot], self.config.window)
        self.last[slot] = token
        self.left[slot] = 0 if token in self.stop_ids[slot] else self.left[slot] - 1
        return token

    def _name(self, orders: list[tuple[int, int, int]]) -> None:
        for slot, column, name in orders:
            block = self.tables[slot][column]
            assert block and name not in self.named
            self.named[name] = block
            self.owners[block] += 1

    def _take(self, slot: int) -> int:
        assert self.free, "out of blocks"
        block = self.free.pop(0)
        self.content[block], self.owners[block], self.taker[block] = [], 1, slot
        return block

    def _let_go(self, block: int) -> None:
        self.owners[block] -= 1
        if not self.owners[block]:
            self.free.append(block)
            del self.content[block]


def expected_output(request: Request, window: int | None = None) -> list[int]:
    """What a request must yield, computed on its own."""
    tokens, out = list(request.prompt_token_ids), []
    while len(out) < request.max_tokens:
        out.append(next_token(tokens, request.seed, window))
        tokens.append(out[-1])
        if out[-1] in request.stop_ids:
            break
    return out
