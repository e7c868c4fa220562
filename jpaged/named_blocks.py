"""Blocks that the host can speak of: it gives them names, and the device keeps which block each name means.

The host never learns a physical id. It says "call the block in column 3 of slot 7 by the name 41", and from then on
"let slot 2 have 41 as its first block", or "41 may go". Nothing has to be read back, so that a block can be shared by
the very step that computes it. A name is one reference to its block (`hold`); it keeps the block alive when no
sequence has it any more, which is the prefix cache.

The orders of one step come as a list `commands` i32[3, C] of (slot, column, name), in seven sections, carried out in
this order and with everything else of a step between them:

    NAME_FIRST  name blocks of the tables as they are (of sequences that this very step releases)
    SLIDE       slots that give up their blocks before `column`, which a window has left behind
    DROP        names that go; slot and column are not looked at
    NAME        name blocks of the tables after they have grown
    SHARE       attach named blocks to rows that start with them
    FORK        make a slot a copy of the one that `column` says, all its blocks shared; the name is 1
    BEAM        make a slot a beam of the group whose beam 0 is in slot `column`; the name is its number + 1

Each section is walked in tiles with a traced trip count: no orders, no iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.allocator import BlockPool, BlockTables, drop, fork, hold, open_rows, share, slide
from jpaged.beams import UNUSED, BeamState
from pallas_kernels.indexing import gather, scatter, scatter_add

SECTIONS = NAME_FIRST, SLIDE, DROP, NAME, SHARE, FORK, BEAM = range(7)
_TILE = 32  # orders handled at once

State = TypeVar("State")


class NamedBlocks(NamedTuple):
    """What each name means. Name 0 is no name."""

    block: jax.Array  # i32[H]  block of each name; 0: not in use
    held: jax.Array  # i32[N]  names of each block: 1, or 2 while one of them is about to go


class Commands(NamedTuple):
    """The host's orders for one step."""

    orders: jax.Array  # i32[3, C] slot, column, name
    ends: jax.Array  # i32[7] where each section ends; each begins where the one before ends


def init_names(num_names: int, num_blocks: int) -> NamedBlocks:
    """No block has a name. Names are 1 .. num_names - 1."""
    return NamedBlocks(jnp.zeros(num_names, jnp.int32), jnp.zeros(num_blocks, jnp.int32))


def name_blocks(
    pool: BlockPool, tables: BlockTables, named: NamedBlocks, commands: Commands, section: int
) -> tuple[BlockPool, NamedBlocks, jax.Array]:
    """Hold table entries under names. Returns (pool, named, ok bool[]).

    ok is False where an entry holds no block or a name is in use: a bug of the host, after which the state is not to be
    used.
    """
    num_blocks, num_names = named.held.shape[0], named.block.shape[0]

    def body(slots: jax.Array, columns: jax.Array, names: jax.Array, state: tuple) -> tuple:
        pool, named, ok = state
        used = names > 0
        ids = gather(tables.blocks, (slots, columns))
        taken = gather(named.block, names, mode="clip") > 0
        ok = ok & ~jnp.any(used & ((ids == 0) | taken | (names >= num_names)))
        pool, held_ok = hold(pool, jnp.where(used, ids, 0))
        named = NamedBlocks(
            scatter(named.block, jnp.where(used, names, num_names), ids),
            scatter_add(named.held, jnp.where(used, ids, num_blocks), 1),
        )
        return pool, named, ok & held_ok

    return _over(commands, section, tables, body, (pool, named, jnp.asarray(True)))


def slide_slots(
    pool: BlockPool, tables: BlockTables, commands: Commands, *, block_size: int
) -> tuple[BlockPool, BlockTables]:
    """Let slots give up blocks that nothing reads any more; those that were released have none."""

    def note(slots: jax.Array, columns: jax.Array, names: jax.Array, first: jax.Array) -> jax.Array:
        return scatter(first, slots, columns)

    first = _over(commands, SLIDE, tables, note, jnp.zeros(tables.length.shape, jnp.int32))
    return slide(pool, tables, first, block_size=block_size)


def drop_names(
    pool: BlockPool, tables: BlockTables, named: NamedBlocks, commands: Commands
) -> tuple[BlockPool, NamedBlocks, jax.Array]:
    """Let go of names; blocks nobody else owns become free. ok is False where a name is not in use."""
    num_blocks, num_names = named.held.shape[0], named.block.shape[0]

    def body(slots: jax.Array, columns: jax.Array, names: jax.Array, state: tuple) -> tuple:
        pool, named, ok = state
        ids = gather(named.block, names)
        ok = ok & ~jnp.any((names > 0) & (ids == 0))
        pool, dropped_ok = drop(pool, ids)
        named = NamedBlocks(
            scatter(named.block, jnp.where(names > 0, names, num_names), 0),
            scatter_add(named.held, jnp.where(ids > 0, ids, num_blocks), -1),
        )
        return pool, named, ok & dropped_ok

    return _over(commands, DROP, tables, body, (pool, named, jnp.asarray(True)))


def open_shared(tables: BlockTables, commands: Commands, *, block_size: int) -> tuple[BlockTables, jax.Array]:
    """Rows that start with named blocks get their length; `share_names` fills the entries after `grow`."""

    # The rows must be empty before the first tile: each tile but the last of a row would find it open.
    def lengthen(slots: jax.Array, columns: jax.Array, names: jax.Array, state: tuple) -> tuple:
        length, ok = state
        opened, tile_ok = open_rows(tables, slots, columns, block_size=block_size)
        return jnp.maximum(length, opened.length), ok & tile_ok

    length, ok = _over(commands, SHARE, tables, lengthen, (tables.length, jnp.asarray(True)))
    return tables._replace(length=length), ok


def share_names(
    pool: BlockPool, tables: BlockTables, named: NamedBlocks, commands: Commands, *, block_size: int
) -> tuple[BlockPool, BlockTables, jax.Array]:
    """Attach named blocks to the entries left open. ok is False where a name is not in use or an entry not open."""

    def body(slots: jax.Array, columns: jax.Array, names: jax.Array, state: tuple) -> tuple:
        pool, tables, ok = state
        ids = gather(named.block, names)
        pool, tables, shared_ok = share(pool, tables, slots, columns, ids, block_size=block_size)
        return pool, tables, ok & shared_ok

    return _over(commands, SHARE, tables, body, (pool, tables, jnp.asarray(True)))


def fork_slots(
    pool: BlockPool, tables: BlockTables, commands: Commands, *, block_size: int
) -> tuple[BlockPool, BlockTables, jax.Array]:
    """Make empty slots copies of others. ok is False where a slot is not empty or the other one is."""

    def note(slots: jax.Array, columns: jax.Array, names: jax.Array, parent: jax.Array) -> jax.Array:
        return scatter(parent, slots, columns)

    parent = _over(commands, FORK, tables, note, jnp.full(tables.length.shape, -1, jnp.int32))
    return fork(pool, tables, parent, block_size=block_size)


def join_groups(beams: BeamState, tables: BlockTables, commands: Commands) -> BeamState:
    """Make slots beams. Only beam 0 counts at first: the others have its tokens and would offer the same again."""

    def join(slots: jax.Array, columns: jax.Array, names: jax.Array, beams: BeamState) -> BeamState:
        return BeamState(
            scatter(beams.group, slots, columns),
            scatter(beams.member, slots, names - 1),
            scatter(beams.score, slots, jnp.where(names > 1, UNUSED, 0.0)),
        )

    return _over(commands, BEAM, tables, join, beams)


def _over(
    commands: Commands,
    section: int,
    tables: BlockTables,
    body: Callable[[jax.Array, jax.Array, jax.Array, State], State],
    state: State,
) -> State:
    """Fold `body(slots, columns, names, state)`, i32[_TILE] each, over a section; padding is slot S and name 0."""
    num_rows = tables.length.shape[0]
    start = commands.ends[section - 1] if section else jnp.int32(0)
    count = commands.ends[section] - start

    def step(i: jax.Array, state: State) -> State:
        at = i * _TILE + jnp.arange(_TILE, dtype=jnp.int32)
        slots, columns, names = commands.orders.at[:, start + at].get(mode="fill", fill_value=0)
        inside = at < count
        return body(jnp.where(inside, slots, num_rows), columns, jnp.where(inside, names, 0), state)

    return lax.fori_loop(0, lax.div(count + _TILE - 1, _TILE), step, state)
