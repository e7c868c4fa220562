"""The step: commands, allocation, decoder, sampling, in one program that owns the engine's state.

    mixed_step   packed rows of decoding sequences and prompt chunks; one token for each row that is sampled
    decode_loop  up to `num_steps` iterations over decoding sequences with no word from the host between them

Both take (params, state, packed plan) and return (state, packed result, records of log-probabilities). Rows name
slots; padding rows name slot S, where gathers give 0 and scatters drop. R rows, T tokens, S slots, M blocks a table,
V vocabulary, C words of a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jpaged_models import Decoder, copy_cache_blocks, merge_params, paged_attend
from jpaged_models.paged import PagedBatch

from jpaged.allocator import copy_on_write, grow, release
from jpaged.beams import RECORD, Advance, advance_beams, follow_beams
from jpaged.controls import Processor, count_tokens, draw
from jpaged.features import Feature
from jpaged.logprobs import record_prompt, record_tokens
from jpaged.named_blocks import (
    NAME,
    NAME_FIRST,
    drop_names,
    fork_slots,
    join_groups,
    name_blocks,
    open_shared,
    share_names,
    slide_slots,
)
from jpaged.plan import Plan, PlanLayout, unpack_plan
from jpaged.sampling import SamplingState
from jpaged.state import EngineState, SlotState, admit, count_blocks
from jpaged.stats import BlockCounts
from jpaged.tiles import over_tiles
from pallas_kernels.indexing import gather, scatter, scatter_add

COPY_TILE = 4  # blocks copied at once where sequences part
HEAD_ROWS = (8, 32, 128)  # row counts the head is compiled for in a mixed step, besides all of its rows
Params = Mapping[str, jax.Array]


class Records(NamedTuple):
    """Records of log-probabilities, zeros where no request wants one; see `logprobs`."""

    sampled: jax.Array  # i32[K, R, C]
    prompt: jax.Array | None  # i32[T, C], mixed steps only


class StepResult(NamedTuple):
    """A step's packed result on the host."""

    tokens: np.ndarray  # i32[K, R], -1: none
    left: np.ndarray  # i32[R]
    beams: np.ndarray  # i32[K, R, 6], see beams.py; -1 for rows that are none
    ok: bool  # False: the allocator ran out or an order could not be carried out, which is a bug of the host's count
    iterations: int
    counts: BlockCounts  # when the step was done


@dataclass(frozen=True)
class StepSpec:
    """The static part of a step: how to build its program."""

    graphdef: nnx.GraphDef
    layout: PlanLayout
    block_size: int
    decode_steps: int  # most iterations of decode_loop
    attention_backend: str
    record_size: int  # words of a record of log-probabilities
    logits_processor: Processor | None = None


# ---------------------------------------------------------------- the two programs


def mixed_step(
    spec: StepSpec, params: Params, state: EngineState, packed: jax.Array
) -> tuple[EngineState, jax.Array, Records]:
    """One step over packed rows of any lengths. packed i32[layout.size] -> result with K = 1."""
    block_size, layout = spec.block_size, spec.layout
    plan = unpack_plan(packed, layout)
    assert plan.lengths is not None and plan.tokens is not None
    state, done = _apply_commands(state, plan, block_size)
    row = jnp.arange(layout.rows)
    lengths = jnp.where(row < plan.num_rows, plan.lengths, 0)  # [R]
    opened_tables, opened = open_shared(state.tables, plan.commands, block_size=block_size)
    state = state._replace(tables=opened_tables)
    state, grown = _grow_rows(state, plan.slots, lengths, block_size, -(-layout.tokens // block_size) + 1)
    state, shared = _share_prefixes(state, plan, block_size)
    ok = done & opened & grown & shared
    lengths = jnp.where(ok, lengths, 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])  # [R + 1]

    tables = gather(state.tables.blocks, plan.slots)  # [R, M]
    context = gather(state.tables.length, plan.slots)  # [R]
    kv_lengths = jnp.where(lengths > 0, context, 0)
    token = jnp.arange(layout.tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(starts[1:], token, side="right", method="compare_all")  # [T]; R for padding
    offset = gather(kv_lengths - starts[1:], owner)
    valid = token < starts[-1]
    positions = jnp.where(valid, token + offset, 0)
    last = gather(state.slots.last_token, gather(plan.slots, owner, fill=layout.num_slots))
    tokens = jnp.where(owner < plan.num_decode, last, plan.tokens)

    batch = PagedBatch(
        block_tables=tables,
        kv_lengths=kv_lengths,
        write_slots=_write_slots(tables, owner, positions, valid, block_size),
        query_starts=starts,
        num_decode=jnp.where(ok, plan.num_decode, 0),
    )
    model = merge_params(spec.graphdef, params)
    attend = paged_attend(batch, state.pool.refcount.shape[0], spec.attention_backend)
    hidden, cache = model(tokens, positions, state.cache, attend, live=starts[-1])
    # The last token of each row [R, H]: for a fork, which has no tokens here, that of the row before it.
    final = gather(hidden, jnp.maximum(starts[1:] - 1, 0), mode="clip")
    sampled = (row < plan.num_sampled) & ok
    logits = _logits_of_prefix(model, final, plan.num_sampled)
    sampling, features = _gather_sampling(state.slots, plan.slots)
    features = jnp.where(sampled, features, 0)
    live = _count_if_free(model, plan.num_sampled)
    drawn = draw(logits, sampling, features, context, state.controls, plan.slots, spec.logits_processor, live)
    state, drawn, beams = _advance_beams(state._replace(cache=cache), plan.slots, sampled, logits, drawn, block_size)
    state, left = _emit(state, plan.slots, features, drawn, sampled)
    wanted = (features & Feature.LOGPROBS) != 0
    sampled_records = jnp.zeros((1, layout.rows, spec.record_size), jnp.int32)
    records = Records(
        record_tokens(sampled_records, jnp.int32(0), wanted, logits, drawn),
        record_prompt(model.logits, hidden, _following(plan, state.slots, starts, owner), spec.record_size),
    )
    out = jnp.where(sampled, drawn, -1)[None]
    return state, _pack_result(out, left, beams[None], ok, jnp.int32(1), state, block_size), records


def decode_loop(
    spec: StepSpec, params: Params, state: EngineState, packed: jax.Array
) -> tuple[EngineState, jax.Array, Records]:
    """plan.num_steps decode iterations, or fewer: it ends when every row has, or, with plan.stop_early, when any has.

    Result with K = spec.decode_steps. With stop_early and a row that had ended before, one iteration runs.
    """
    layout = spec.layout
    plan = unpack_plan(packed, layout)
    state, done = _apply_commands(state, plan, spec.block_size)
    model = merge_params(spec.graphdef, params)
    in_rows = jnp.arange(layout.rows) < plan.num_rows
    sampling, features = _gather_sampling(state.slots, plan.slots)
    once = (features & Feature.STRUCTURED) != 0  # rows whose next token waits for a mask from the host

    def left_in(slots: SlotState) -> jax.Array:
        return jnp.where(in_rows, gather(slots.left, plan.slots), 0)

    def unfinished(carry: tuple) -> jax.Array:
        step, state, _, _, _, ok = carry
        left = left_in(state.slots)
        ended = jnp.any(in_rows & (left == 0))
        runs = (left > 0) & ~(once & (step > 0))
        return (step < plan.num_steps) & ok & jnp.any(runs) & ~(plan.stop_early & ended & (step > 0))

    def iterate(carry: tuple) -> tuple:
        step, state, out, beams, records, _ = carry
        active = (left_in(state.slots) > 0) & ~(once & (step > 0))
        state, ok = _grow_rows(state, plan.slots, active.astype(jnp.int32), spec.block_size, 1)
        active &= ok
        state, drawn, record, logits = _decode_rows(
            spec, model, state, plan.slots, plan.num_rows, active, sampling, features
        )
        records = record_tokens(records, step, active & ((features & Feature.LOGPROBS) != 0), logits, drawn)
        out, beams = scatter(out, step, drawn), scatter(beams, step, record)
        return step + 1, state, out, beams, records, ok

    shape = (spec.decode_steps, layout.rows)
    out, beams = jnp.full(shape, -1, jnp.int32), jnp.full((*shape, RECORD), -1, jnp.int32)
    records = jnp.zeros((*shape, spec.record_size), jnp.int32)
    start = (jnp.int32(0), state, out, beams, records, done)
    steps, state, out, beams, records, ok = lax.while_loop(unfinished, iterate, start)
    result = _pack_result(out, left_in(state.slots), beams, ok, steps, state, spec.block_size)
    return state, result, Records(records, None)


def next_logits(spec: StepSpec, params: Params, state: EngineState, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the next decode iteration would draw from: (f32[R, V] for slots i32[R], S for padding; ok bool[]).

    The token that a row drew last is computed on the way, so its block must be there to be had: ok says whether it is.
    """
    active = slots < state.tables.length.shape[0]
    state, ok = _grow_rows(state, slots, active.astype(jnp.int32), spec.block_size, 1)
    model, num_rows = merge_params(spec.graphdef, params), jnp.sum(active, dtype=jnp.int32)
    sampling, features = _gather_sampling(state.slots, slots)
    _, _, _, logits = _decode_rows(spec, model, state, slots, num_rows, active & ok, sampling, features)
    return logits, ok


def unpack_result(packed: np.ndarray, rows: int) -> StepResult:
    """The fields of a packed result of R rows."""
    tail = 2 + len(BlockCounts._fields)
    steps = (len(packed) - tail - rows) // (rows * (1 + RECORD))
    tokens, left, beams = np.split(packed[:-tail], [steps * rows, (steps + 1) * rows])
    ok, iterations, *counts = packed[-tail:].tolist()
    shape = (steps, rows, RECORD)
    return StepResult(
        tokens.reshape(steps, rows), left, beams.reshape(shape), bool(ok), iterations, BlockCounts(*counts)
    )


# ---------------------------------------------------------------- parts


def _apply_commands(state: EngineState, plan: Plan, block_size: int) -> tuple[EngineState, jax.Array]:
    """Blocks that the host gives back go first, so that this very step can hand them out again.

    What a finished sequence computed gets its names before the sequence is released. Returns (state, ok bool[]).
    """
    pool, named, kept = name_blocks(state.pool, state.tables, state.named, plan.commands, NAME_FIRST)
    pool, tables = release(pool, state.tables, plan.release, block_size=block_size)
    pool, tables = slide_slots(pool, tables, plan.commands, block_size=block_size)
    pool, named, dropped = drop_names(pool, tables, named, plan.commands)
    beams = state.beams._replace(group=jnp.where(plan.release, plan.release.shape[0], state.beams.group))
    state = state._replace(pool=pool, tables=tables, named=named, beams=beams, slots=admit(state.slots, plan))
    return state, kept & dropped


def _share_prefixes(state: EngineState, plan: Plan, block_size: int) -> tuple[EngineState, jax.Array]:
    """Name the blocks that rows have just been given, then attach named ones to the rows that begin with them.

    A row may so share what another fills in this step: in every layer all keys and values are written before any
    are read. Last, forks become copies of what they fork from. Returns (state, ok bool[]).
    """
    pool, named, kept = name_blocks(state.pool, state.tables, state.named, plan.commands, NAME)
    pool, tables, shared = share_names(pool, state.tables, named, plan.commands, block_size=block_size)
    pool, tables, forked = fork_slots(pool, tables, plan.commands, block_size=block_size)
    beams = join_groups(state.beams, tables, plan.commands)
    return state._replace(pool=pool, tables=tables, named=named, beams=beams), kept & shared & forked


def _grow_rows(
    state: EngineState, slots: jax.Array, added: jax.Array, block_size: int, most_blocks: int
) -> tuple[EngineState, jax.Array]:
    """Lengthen the rows' sequences by added i32[R] tokens, none of which will be written to a block of others.

    Returns (state, ok bool[]).
    """
    num_slots, max_blocks = state.tables.blocks.shape
    num_blocks = state.pool.refcount.shape[0]
    writes = scatter(jnp.zeros(num_slots, bool), slots, added > 0)
    pool, tables, src, dst, apart = copy_on_write(state.pool, state.tables, writes, block_size=block_size)
    cache = over_tiles(
        dst > 0,
        COPY_TILE,
        lambda rows, cache: copy_cache_blocks(cache, gather(src, rows), gather(dst, rows), num_blocks),
        state.cache,
    )
    length = scatter_add(tables.length, slots, added)
    pool, tables, ok = grow(pool, tables, length, block_size=block_size, max_new_blocks=min(most_blocks, max_blocks))
    return state._replace(cache=cache, pool=pool, tables=tables), apart & ok


def _decode_rows(
    spec: StepSpec,
    model: Decoder,
    state: EngineState,
    slots: jax.Array,
    num_rows: jax.Array,
    active: jax.Array,
    sampling: SamplingState,
    features: jax.Array,
) -> tuple[EngineState, jax.Array, jax.Array, jax.Array]:
    """One token for every row in active bool[R], whose table already has room; all are among the first num_rows i32[].

    Returns (state, tokens i32[R], records of beams i32[R, 6], logits f32[R, V]).
    """
    block_size = spec.block_size
    tables = gather(state.tables.blocks, slots)  # [R, M]
    lengths = jnp.where(active, gather(state.tables.length, slots), 0)
    positions = jnp.maximum(lengths - 1, 0)
    rows = jnp.arange(slots.shape[0])
    batch = PagedBatch(
        block_tables=tables,
        kv_lengths=lengths,
        write_slots=_write_slots(tables, rows, positions, active, block_size),
        query_starts=None,
        num_decode=None,
    )
    tokens = gather(state.slots.last_token, slots)
    attend = paged_attend(batch, state.pool.refcount.shape[0], spec.attention_backend)
    hidden, cache = model(tokens, positions, state.cache, attend, live=num_rows)
    features = jnp.where(active, features, 0)
    logits = model.logits(hidden, live=num_rows)
    live = _count_if_free(model, num_rows)
    drawn = draw(logits, sampling, features, lengths, state.controls, slots, spec.logits_processor, live)
    state, drawn, beams = _advance_beams(state._replace(cache=cache), slots, active, logits, drawn, block_size)
    state, _ = _emit(state, slots, features, drawn, active)
    return state, jnp.where(active, drawn, -1), beams, logits


def _advance_beams(
    state: EngineState, slots: jax.Array, sampled: jax.Array, logits: jax.Array, drawn: jax.Array, block_size: int
) -> tuple[EngineState, jax.Array, jax.Array]:
    """Where rows are beams, their groups choose the tokens, and tables follow. Returns (state, drawn, records)."""
    num_slots = state.beams.group.shape[0]
    rows = slots.shape[0]
    is_beam = sampled & (gather(state.beams.group, slots, fill=num_slots) < num_slots)
    stop_ids = gather(state.slots.stop_ids, slots, fill=-1)
    advance = lax.cond(
        jnp.any(is_beam),
        lambda: advance_beams(logits, state.beams, slots, is_beam, stop_ids),
        lambda: Advance(drawn, jnp.zeros(rows, jnp.float32), slots, jnp.full((rows, RECORD), -1, jnp.int32)),
    )
    beam_slots = jnp.where(is_beam, slots, num_slots)
    pool, tables = follow_beams(state.pool, state.tables, beam_slots, advance.parents, block_size=block_size)
    score = scatter(state.beams.score, beam_slots, advance.scores)
    state = state._replace(pool=pool, tables=tables, beams=state.beams._replace(score=score))
    return state, jnp.where(is_beam, advance.tokens, drawn), advance.records


def _write_slots(
    tables: jax.Array, owner: jax.Array, positions: jax.Array, valid: jax.Array, block_size: int
) -> jax.Array:
    """i32[T]: block * block_size + offset for each token; tokens that are padding go to the null block."""
    block = gather(tables, (owner, positions // block_size))
    return jnp.where(valid, block, 0) * block_size + positions % block_size


def _gather_sampling(slots: SlotState, rows: jax.Array) -> tuple[SamplingState, jax.Array]:
    """Sampling parameters and features of the rows; 0 for padding."""
    return jax.tree.map(lambda x: gather(x, rows), (slots.sampling, slots.features))


def _following(plan: Plan, slots: SlotState, starts: jax.Array, owner: jax.Array) -> jax.Array:
    """i32[T]: the prompt token after each token of a row that wants log-probabilities of its prompt, -1 elsewhere."""
    assert plan.tokens is not None and plan.next_tokens is not None
    token = jnp.arange(owner.shape[0], dtype=jnp.int32)
    features = gather(slots.features, plan.slots)
    wanted = ((features & Feature.PROMPT_LOGPROBS) != 0) & (jnp.arange(plan.slots.shape[0]) >= plan.num_decode)
    last = token + 1 == gather(starts[1:], owner)
    following = jnp.where(last, gather(plan.next_tokens, owner, fill=-1), jnp.roll(plan.tokens, -1))
    return jnp.where(gather(wanted, owner, fill=False), following, -1)


def _logits_of_prefix(model: Decoder, hidden: jax.Array, count: jax.Array) -> jax.Array:
    """f32[R, V] whose first `count` rows are the logits of hidden [R, H]; the others are unspecified.

    The head is the widest product of a step and most rows of a prefill step need none: it runs on the smallest of
    a few row counts that covers them.
    """
    if model.skips_padding:
        return model.logits(hidden, live=count)
    rows = hidden.shape[0]
    sizes = [*(n for n in HEAD_ROWS if n < rows), rows]
    branches = [lambda n=n: jnp.pad(model.logits(hidden[:n]), ((0, rows - n), (0, 0))) for n in sizes]
    return lax.switch(jnp.searchsorted(jnp.array(sizes), count, method="compare_all"), branches)


def _count_if_free(model: Decoder, count: jax.Array) -> jax.Array | None:
    """How many rows there are, where those beyond need not be computed; else None, and all are."""
    return count if model.skips_padding else None


def _emit(
    state: EngineState, rows: jax.Array, features: jax.Array, tokens: jax.Array, sampled: jax.Array
) -> tuple[EngineState, jax.Array]:
    """Record sampled tokens i32[R]; a stop id or the last allowed token ends its row. Returns (state, left i32[R])."""
    slots = state.slots
    stop_ids = gather(slots.stop_ids, rows, fill=-1)  # [R, E]
    left = gather(slots.left, rows)
    stopped = jnp.any(tokens[:, None] == stop_ids, axis=1)
    left = jnp.where(sampled, jnp.where(stopped, 0, left - 1), left)
    target = jnp.where(sampled, rows, slots.left.shape[0])
    slots = slots._replace(
        last_token=scatter(slots.last_token, target, tokens),
        left=scatter(slots.left, target, left),
    )
    return state._replace(slots=slots, controls=count_tokens(state.controls, target, features, tokens)), left


def _pack_result(
    tokens: jax.Array,
    left: jax.Array,
    beams: jax.Array,
    ok: jax.Array,
    steps: jax.Array,
    state: EngineState,
    block_size: int,
) -> jax.Array:
    counts = count_blocks(state.pool, state.tables, state.named, block_size=block_size)
    tail = jnp.stack([ok.astype(jnp.int32), steps, *counts])
    return jnp.concatenate([tokens.reshape(-1), left, beams.reshape(-1), tail])
