"""The engine's state stepped by hand: for research, where sequences are forked, rewound, edited and looked into.

    engine = FunctionalEngine(random_model(), EngineConfig(num_blocks=64, max_model_len=128))
    state = engine.init()
    state, first = engine.extend(state, {0: [5, 6, 7]})  # slot 0 computes three tokens, and draws one
    state, drawn = engine.decode(state, [0], steps=8)  # {0: [eight tokens]}
    state = engine.fork(state, {1: 0})  # slot 1 shares all blocks of slot 0

There is no scheduler: whoever calls says which slot runs what. The programs are those that serve (step.py), so blocks
are allocated, shared and copied on write as there; and a state is a pytree like any other, so what no method does is
done with `state._replace`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jpaged_models import LoadedModel, read_sequence

from jpaged import allocator
from jpaged.audit import audit, check
from jpaged.config import EngineConfig, pick_bucket
from jpaged.memory import find_window, pick_kv_dtype
from jpaged.plan import pack_plan
from jpaged.request import Request
from jpaged.runner import build_programs, make_spec, make_state, prepare
from jpaged.sampling_params import SamplingParams
from jpaged.schedule import PrefillChunk, Schedule
from jpaged.state import EngineState
from jpaged.step import StepResult, next_logits, unpack_result

SERVED = {"temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos", "max_tokens"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class FunctionalEngine:
    """Programs for one model and configuration, and no state: every method takes a state and returns the next.

    donate  False: a state stays good when it has been stepped, which costs a copy of the pages in every step.
            True: a step works in the memory of the state it is given, which is gone then; to keep one,
            `jax.tree.map(jnp.copy, state)` first.

    Slots are 0 to max_num_seqs - 1. A token that was drawn is in the cache only once the next one has been, so a
    sequence has one token more than its blocks hold: `state.slots.last_token`.

    Raises ValueError for a configuration on several devices, and as `EngineConfig` and the model's loading do.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, *, donate: bool = False) -> None:
        if config.tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size must be 1 here, got {config.tensor_parallel_size}")
        config = dataclasses.replace(config, window=find_window(model.config))
        self.eos_token_ids = frozenset(model.generation.eos_token_ids)
        self.model, self.config, _ = prepare(model, config)
        vocab = model.config.vocab_size
        self.programs = build_programs(self.model.graphdef, self.config, vocab, donate=donate)
        layout, _ = self.programs.decode[self.config.decode_buckets[0]]
        spec = make_spec(self.model.graphdef, self.config, vocab, layout)
        self._next_logits = jax.jit(functools.partial(next_logits, spec))

    def init(self) -> EngineState:
        """A state of empty slots and free blocks."""
        kv_dtype = pick_kv_dtype(self.model, self.config.kv_cache_dtype)
        return make_state(self.model.config, self.config, kv_dtype, self.model.runs, None)

    def run(self, state: EngineState, schedule: Schedule) -> tuple[EngineState, StepResult]:
        """One step of the engine, any that a schedule can say. Raises RuntimeError where blocks run out."""
        layout, program = self.programs.pick(schedule)
        state, packed, _ = program(self.model.params, state, pack_plan(schedule, layout))
        result = unpack_result(np.asarray(packed), layout.rows)
        if not result.ok:
            raise RuntimeError(f"the step could not be carried out: {result.counts.free} blocks are free")
        return state, result

    def extend(
        self, state: EngineState, tokens: Mapping[int, Sequence[int]], params: SamplingParams = GREEDY
    ) -> tuple[EngineState, dict[int, int]]:
        """Append tokens to the sequences in slots, and draw the token after them: (state, {slot: token}).

        A new sequence begins in an empty slot. In one that has a sequence, the token drawn last is forgotten unless it
        is the first of `tokens`: that is how another continuation is forced. `params` are the slots' from now on.
        Raises ValueError for tokens or slots that cannot be, RuntimeError where blocks run out.
        """
        self._check_slots(state, tokens)
        count = sum(map(len, tokens.values()))
        if count > self.config.max_num_batched_tokens:
            raise ValueError(f"{count} tokens, but max_num_batched_tokens is {self.config.max_num_batched_tokens}")
        lengths, schedule = np.asarray(state.tables.length), Schedule()
        for slot, ids in tokens.items():
            self._check_tokens(slot, ids, int(lengths[slot]))
            request = self._make_request(slot, params, ids)
            schedule.admit.append(request)
            schedule.prefill.append(PrefillChunk(request, slot, 0, len(ids), last=True))
        state, result = self.run(state, schedule)
        return state, dict(zip(tokens, result.tokens[0].tolist(), strict=False))

    def decode(
        self, state: EngineState, slots: Sequence[int], steps: int = 1
    ) -> tuple[EngineState, dict[int, list[int]]]:
        """Draw so many tokens in each slot, one after the other: (state, {slot: tokens}).

        A sequence ends at one of its stop ids, and where it has max_tokens. Raises ValueError for a slot without a
        sequence and for more tokens than max_model_len allows, RuntimeError where blocks run out.
        """
        slots = list(slots)
        self._check_slots(state, slots, holds=True)
        longest = int(np.asarray(state.tables.length)[list(slots)].max(initial=0)) + steps
        if steps < 1 or longest > self.config.max_model_len:
            raise ValueError(f"steps={steps}: a sequence would have {longest} of {self.config.max_model_len} tokens")
        drawn: dict[int, list[int]] = {slot: [] for slot in slots}
        rows = [self._make_request(slot, GREEDY) for slot in slots]
        while steps > 0:
            each = min(steps, self.config.decode_steps)
            schedule = Schedule(decode=rows, decode_slots=np.asarray(slots, np.int32), num_steps=each)
            state, result = self.run(state, schedule)
            for row, slot in enumerate(slots):
                drawn[slot] += [token for token in result.tokens[:, row].tolist() if token >= 0]
            steps -= each
        return state, drawn

    def logits(self, state: EngineState, slots: Sequence[int]) -> jax.Array:
        """What the next token of each slot would be drawn from, f32[len(slots), V]; the state stays as it is."""
        self._check_slots(state, slots, holds=True)
        padded = np.full(pick_bucket(self.config.decode_buckets, len(slots)), self.config.max_num_seqs, np.int32)
        padded[: len(slots)] = slots
        found, ok = self._next_logits(self.model.params, state, padded)
        if not ok:
            raise RuntimeError(f"no block is free for the last token of each of {len(slots)} sequences")
        return found[: len(slots)]

    def fork(self, state: EngineState, parents: Mapping[int, int]) -> EngineState:
        """Let empty slots become copies of others, {slot: parent}: all blocks are shared, and copied when written to.

        A copy draws as its parent does; `set_sampling` gives it another seed.
        """
        self._check_slots(state, parents, holds=False)
        self._check_slots(state, set(parents.values()), holds=True)
        parent = np.full(self.config.max_num_seqs, -1, np.int32)
        parent[list(parents)] = list(parents.values())
        pool, tables, ok = _fork(state.pool, state.tables, parent, block_size=self.config.block_size)
        assert ok, "checked above"
        source = np.where(parent < 0, np.arange(len(parent)), parent)
        slots, controls = jax.tree.map(lambda rows: rows[source], (state.slots, state.controls))
        return state._replace(pool=pool, tables=tables, slots=slots, controls=controls)

    def release(self, state: EngineState, slots: Iterable[int]) -> EngineState:
        """Empty slots; blocks that no other slot shares become free."""
        slots = list(slots)
        self._check_slots(state, slots)
        mask = np.zeros(self.config.max_num_seqs, bool)
        mask[slots] = True
        pool, tables = _release(state.pool, state.tables, mask, block_size=self.config.block_size)
        left = jnp.where(mask, 0, state.slots.left)
        return state._replace(pool=pool, tables=tables, slots=state.slots._replace(left=left))

    def set_sampling(self, state: EngineState, params: Mapping[int, SamplingParams]) -> EngineState:
        """Give slots other sampling parameters."""
        self._check_slots(state, params)
        admit = [self._make_request(slot, each) for slot, each in params.items()]
        return self.run(state, Schedule(admit=admit))[0]

    def read_kv(self, state: EngineState, slot: int) -> tuple[jax.Array, jax.Array]:
        """The keys (rotated) and values of a slot's sequence, f32[layers, tokens, KV heads, D] each."""
        self._check_slots(state, [slot])
        length = int(state.tables.length[slot])
        blocks = state.tables.blocks[slot, : -(-length // self.config.block_size)]
        return read_sequence(state.cache, blocks, length, self.config.num_blocks, self.model.config.head_dim)

    def check(self, state: EngineState) -> None:
        """Raise AllocatorError if the blocks of a state break an invariant."""
        slides = self.config.window is not None
        check(audit(state.pool, state.tables, state.named.held, block_size=self.config.block_size, slides=slides))

    def _make_request(self, slot: int, params: SamplingParams, tokens: Sequence[int] = ()) -> Request:
        """What an admission tells the device. Raises ValueError for parameters that need more than that."""
        default = SamplingParams()
        given = {f.name for f in dataclasses.fields(params) if getattr(params, f.name) != getattr(default, f.name)}
        if given - SERVED:
            raise ValueError(f"{sorted(given - SERVED)} cannot be served by hand; allowed: {', '.join(sorted(SERVED))}")
        stray = [token for token in params.stop_token_ids if token >= self.model.config.vocab_size]
        if stray or len(params.stop_token_ids) + len(self.eos_token_ids) > self.config.max_stop_ids:
            raise ValueError(
                f"at most max_stop_ids={self.config.max_stop_ids} tokens may end a sequence, all below "
                f"{self.model.config.vocab_size}, got {params.stop_token_ids} and the model's {set(self.eos_token_ids)}"
            )
        limit = self.config.max_model_len if params.max_tokens is None else params.max_tokens
        seed, eos = params.seed or 0, self.eos_token_ids
        return Request(str(slot), list(map(int, tokens)), params, limit, seed, eos, slot=slot)

    def _check_slots(self, state: EngineState, slots: Iterable[int], holds: bool | None = None) -> None:
        """ValueError for a slot that is none, comes twice, or has a sequence where it should not, or the reverse."""
        lengths, slots = np.asarray(state.tables.length), list(slots)
        for slot in slots:
            if not 0 <= slot < len(lengths):
                raise ValueError(f"slot {slot} is none: they are 0 to {len(lengths) - 1} (max_num_seqs)")
            if holds is not None and holds != bool(lengths[slot]):
                wanted = "hold a sequence" if holds else "be empty"
                raise ValueError(f"slot {slot} must {wanted}, and has {lengths[slot]} tokens")
        if len(set(slots)) < len(slots):
            raise ValueError(f"each slot may be named once, got {slots}")

    def _check_tokens(self, slot: int, tokens: Sequence[int], length: int) -> None:
        vocab, limit = self.model.config.vocab_size, self.config.max_model_len
        if not len(tokens) or length + len(tokens) > limit:
            raise ValueError(f"slot {slot} has {length} tokens: 1 to {limit - length} may be added, got {len(tokens)}")
        if min(tokens) < 0 or max(tokens) >= vocab:
            raise ValueError(f"tokens of slot {slot} must be 0 to {vocab - 1}, got {min(tokens)} to {max(tokens)}")


_fork = jax.jit(allocator.fork, static_argnames="block_size")
_release = jax.jit(allocator.release, static_argnames="block_size")
