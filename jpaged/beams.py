"""Beam search on the device: the candidates of all groups are ranked, and block tables follow the beams they continue.

A group of W beams has W slots, all of the same length. In every iteration each beam offers its most likely next tokens;
over the group the best W that do not end the text go on, the i-th in the slot of beam i. A beam that goes on in another
slot takes its whole block table there by reference count: nothing is computed again and no cache is copied but a partly
filled last block, by copy on write, when two beams that share it write (Kwon et al. 2023, section 4.4).

Which beams are finished, and when a group is, the host decides from what it is sent: for each rank i < W the i-th best
of all candidates if it ends the text (it is finished), and the candidate that beam i goes on with. This is the rule of
transformers' `generate(num_beams=W)`.

R rows, S slots, V vocabulary, K candidates of a row, W at most `MAX_WIDTH`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.allocator import BlockPool, BlockTables, reorder
from pallas_kernels.indexing import gather, scatter

MAX_WIDTH = 16
UNUSED = -1.0e9  # score of the beams of a group before the first has branched
RECORD = 6  # words of a row's record: parent, token, score's bits of the beam that goes on; the same of one that ends


class BeamState(NamedTuple):
    """For each slot, the group it belongs to."""

    group: jax.Array  # i32[S]  slot of the group's beam 0; S: no beam
    member: jax.Array  # i32[S]  number of the beam in its group
    score: jax.Array  # f32[S]  sum of log-probabilities of its tokens


def init_beams(num_slots: int) -> BeamState:
    return BeamState(
        jnp.full(num_slots, num_slots, jnp.int32), jnp.zeros(num_slots, jnp.int32), jnp.zeros(num_slots, jnp.float32)
    )


class Advance(NamedTuple):
    """What one iteration did to the rows that are beams; others have parent = their own slot, and token -1."""

    tokens: jax.Array  # i32[R]
    scores: jax.Array  # f32[R]
    parents: jax.Array  # i32[R] slots
    records: jax.Array  # i32[R, RECORD], slots of parents; -1 for none


def advance_beams(
    logits: jax.Array, beams: BeamState, slots: jax.Array, active: jax.Array, stop_ids: jax.Array
) -> Advance:
    """Rank the candidates of every group among the rows of `active` bool[R].

    logits    f32[R, V]
    slots     i32[R]; the rows of a group are all active or none is
    stop_ids  i32[R, E], -1 for none
    """
    num_rows, vocab = logits.shape
    num_slots = beams.group.shape[0]
    width = min(MAX_WIDTH, num_rows)
    group = jnp.where(active, gather(beams.group, slots, fill=num_slots), num_slots)  # [R]
    member = gather(beams.member, slots)
    score = gather(beams.score, slots)
    row = jnp.arange(num_rows, dtype=jnp.int32)

    # Each row's best: as many as the group has beams, and as many more as may end the text.
    count = min(vocab, width + stop_ids.shape[1])
    log_probs = logits - jax.nn.logsumexp(logits, axis=1, keepdims=True)
    values, tokens = lax.top_k(log_probs, count)  # [R, K]
    total = score[:, None] + values
    ends = jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=2)

    # By group, then from the best to the worst; of equals the lower beam first.
    keys = jnp.broadcast_to(group[:, None], total.shape).reshape(-1)
    order = (member[:, None] * count + jnp.arange(count)).reshape(-1)
    place = jnp.arange(num_rows * count, dtype=jnp.int32)
    keys, _, _, place = lax.sort((keys, -total.reshape(-1), order, place), num_keys=3)
    source, token = place // count, tokens.reshape(-1)[place]
    end, best = ends.reshape(-1)[place], total.reshape(-1)[place]
    first = jnp.searchsorted(keys, keys, side="left").astype(jnp.int32)  # where its group begins
    rank = jnp.arange(num_rows * count, dtype=jnp.int32) - first
    going = jnp.cumsum(~end, dtype=jnp.int32)
    going_rank = going - 1 - jnp.where(first > 0, going[jnp.maximum(first - 1, 0)], 0)

    # The row of beam i of each group.
    seat = jnp.full((num_slots + 1, width), num_rows, jnp.int32)
    seat = scatter(seat, (jnp.where(group < num_slots, group, num_slots + 1), member), row)

    def seats(wanted: jax.Array, ranks: jax.Array) -> jax.Array:
        """The rows that candidates are for, R where they are for none."""
        fits = wanted & (ranks < width) & (keys < num_slots)
        return jnp.where(fits, gather(seat, (keys, jnp.minimum(ranks, width - 1)), mode="clip"), num_rows)

    parent_slot = slots[source]
    on, over = seats(~end, going_rank), seats(end, rank)
    bits = lax.bitcast_convert_type(best, jnp.int32)
    record, none = jnp.stack([parent_slot, token, bits], axis=1), jnp.full((num_rows, RECORD // 2), -1, jnp.int32)
    return Advance(
        tokens=scatter(jnp.full(num_rows, -1, jnp.int32), on, token),
        scores=scatter(score, on, best),
        parents=scatter(slots, on, parent_slot),
        records=jnp.concatenate([scatter(none, on, record), scatter(none, over, record)], axis=1),
    )


def follow_beams(
    pool: BlockPool, tables: BlockTables, slots: jax.Array, parents: jax.Array, *, block_size: int
) -> tuple[BlockPool, BlockTables]:
    """Give the rows' slots the block tables of their parents, i32[R] each."""
    num_slots = tables.length.shape[0]
    source = scatter(jnp.arange(num_slots, dtype=jnp.int32), slots, parents)
    return reorder(pool, tables, source, block_size=block_size)
