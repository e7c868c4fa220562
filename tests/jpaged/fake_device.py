"""A device in plain Python that runs schedules as the real step does, and checks what the scheduler promised."""

import numpy as np

from jpaged.request import Request
from jpaged.scheduler import Schedule, Scheduler


def next_token(tokens: list[int], vocab: int = 97) -> int:
    """A model: the next token depends on every token before it."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % vocab


class FakeDevice:
    """Slots with tokens; blocks are counted, and running out is an error as it would be on the device."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.config = scheduler.config
        slots = self.config.max_num_seqs
        self.cached: list[list[int]] = [[] for _ in range(slots)]  # tokens whose K/V are in the cache
        self.last: list[int | None] = [None] * slots
        self.left = [0] * slots
        self.stop_ids: list[set[int]] = [set() for _ in range(slots)]

    @property
    def used_blocks(self) -> int:
        return sum(-(-len(tokens) // self.config.block_size) for tokens in self.cached)

    def run(self, plan: Schedule) -> tuple[np.ndarray, np.ndarray]:
        for slot in plan.release:
            self.cached[slot], self.last[slot], self.left[slot] = [], None, 0
        for request in plan.admit:
            assert not self.cached[request.slot], "admitted to a slot whose blocks were not released"
            self.left[request.slot] = request.max_tokens - len(request.output_token_ids)
            self.stop_ids[request.slot] = set(sorted(request.stop_ids)[: self.config.max_stop_ids])
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        rows = [*plan.decode_slots.tolist(), *(chunk.slot for chunk in plan.prefill)]
        assert len(set(rows)) == len(rows)
        out = np.full((self.config.decode_steps if not plan.prefill else 1, len(rows)), -1)
        for chunk in plan.prefill:
            assert len(self.cached[chunk.slot]) == chunk.start
            self.cached[chunk.slot] += chunk.request.token_range(chunk.start, chunk.start + chunk.length)
        for step in range(plan.num_steps):
            ended = any(self.left[slot] == 0 for slot in plan.decode_slots)
            if step and plan.stop_early and ended:
                break
            for row, slot in enumerate(plan.decode_slots.tolist()):
                if self.left[slot]:
                    self.cached[slot].append(self.last[slot])
                    out[step, row] = self._emit(slot)
        for row, chunk in enumerate(plan.prefill, start=len(plan.decode)):
            if chunk.last:
                out[0, row] = self._emit(chunk.slot)
        assert self.used_blocks <= self.config.num_blocks - 1, "out of blocks"
        return out, np.array([self.left[slot] for slot in rows], np.int64)

    def _emit(self, slot: int) -> int:
        token = next_token(self.cached[slot])
        self.last[slot] = token
        self.left[slot] = 0 if token in self.stop_ids[slot] else self.left[slot] - 1
        return token


def expected_output(request: Request) -> list[int]:
    """What a request must yield, computed on its own."""
    tokens, out = list(request.prompt_token_ids), []
    while len(out) < request.max_tokens:
        out.append(next_token(tokens))
        tokens.append(out[-1])
        if out[-1] in request.stop_ids:
            break
    return out
