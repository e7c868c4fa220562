"""The plan of one step as one int32 array: packed by the host with NumPy, unpacked inside the jitted step.

One array is one transfer. Floats and unsigned seeds travel as their bits.

    header  [5]          num_rows, num_decode, num_sampled, num_steps, stop_early
    ends    [7]          where each section of the orders ends
    orders  [3, C]       slot, column and name of blocks to name, drop and share; forks, beams; see named_blocks.py
    release [S]          1: give the slot's blocks back first
    admit   [S, 9 + E]   flag, temperature, top_k, top_p, min_p, seed (2), left, features, stop ids (-1: none)
    slots   [R]          slot of each row; S (one past the last) for padding
    lengths [R]          query tokens of each row; 0: a fork, sampled like the row before  }
    next    [R]          prompt token after each row's, -1: none                           } mixed steps only
    tokens  [T]          prompt tokens of the packed rows                                   }

Rows are ordered: decode rows, prefill rows whose next token is sampled, the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.named_blocks import SECTIONS, Commands
from jpaged.request import Request
from jpaged.sampling import seed_words
from jpaged.schedule import Schedule

HEADER = 5
SAMPLING = 9  # words of an admission before its stop ids


@dataclass(frozen=True)
class PlanLayout:
    """Sizes that fix a plan's length: S slots, E stop ids, C orders, R rows, T tokens (0 in a decode plan)."""

    num_slots: int
    num_stop_ids: int
    num_orders: int
    rows: int
    tokens: int = 0

    @property
    def size(self) -> int:
        orders = len(SECTIONS) + 3 * self.num_orders
        mixed = 2 * self.rows + self.tokens if self.tokens else 0
        return HEADER + orders + self.num_slots * (1 + SAMPLING + self.num_stop_ids) + self.rows + mixed


class Plan(NamedTuple):
    """A plan on the device; see the module's text for the fields."""

    num_rows: jax.Array
    num_decode: jax.Array
    num_sampled: jax.Array
    num_steps: jax.Array
    stop_early: jax.Array
    commands: Commands
    release: jax.Array  # bool[S]
    admit: jax.Array  # i32[S, 9 + E]
    slots: jax.Array  # i32[R]
    lengths: jax.Array | None  # i32[R]
    next_tokens: jax.Array | None  # i32[R]
    tokens: jax.Array | None  # i32[T]


def pack_plan(schedule: Schedule, layout: PlanLayout) -> np.ndarray:
    """i32[layout.size] for a schedule that fits the layout."""
    packed = np.zeros(layout.size, np.int32)
    decoded, rows = len(schedule.decode), len(schedule.decode) + len(schedule.prefill)
    sampled = decoded + sum(chunk.last for chunk in schedule.prefill)
    packed[:HEADER] = (rows, decoded, sampled, schedule.num_steps, schedule.stop_early)
    ends = np.cumsum([len(orders) for orders in schedule.orders])
    packed[HEADER : HEADER + len(ends)] = ends
    at = HEADER + len(ends)
    if ends[-1]:
        orders = packed[at : at + 3 * layout.num_orders].reshape(3, layout.num_orders)
        orders[:, : ends[-1]] = np.array([order for orders in schedule.orders for order in orders], np.int32).T
    at += 3 * layout.num_orders
    packed[at : at + layout.num_slots][schedule.release] = 1
    at += layout.num_slots
    width = SAMPLING + layout.num_stop_ids
    admit = packed[at : at + layout.num_slots * width].reshape(layout.num_slots, width)
    for request in schedule.admit:
        admit[request.slot] = pack_admission(request, layout.num_stop_ids)
    at += layout.num_slots * width
    slots = packed[at : at + layout.rows]
    slots[:decoded] = schedule.decode_slots
    slots[decoded:rows] = [chunk.slot for chunk in schedule.prefill]
    slots[rows:] = layout.num_slots
    if not layout.tokens:
        return packed
    at += layout.rows
    lengths = packed[at : at + layout.rows]
    lengths[:decoded] = 1
    lengths[decoded:rows] = [chunk.length for chunk in schedule.prefill]
    at += layout.rows
    following = packed[at : at + layout.rows]
    following[:] = -1
    following[decoded:rows] = [chunk.request.prompt_token(chunk.start + chunk.length) for chunk in schedule.prefill]
    at += layout.rows + decoded  # decode rows take their token from the device
    for chunk in schedule.prefill:
        end = chunk.start + chunk.length
        packed[at : at + chunk.length] = chunk.request.token_range(chunk.start, end)
        at += chunk.length
    return packed


def pack_admission(request: Request, num_stop_ids: int) -> np.ndarray:
    """i32[9 + E]: what the device must know of a request."""
    params = request.params
    row = np.full(SAMPLING + num_stop_ids, -1, np.int32)
    row[0] = 1
    floats = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    row[1], row[3], row[4] = floats
    row[2] = max(params.top_k, 0)
    row[5:7] = seed_words(request.seed).view(np.int32)
    row[7] = request.max_tokens - len(request.output_token_ids)
    row[8] = request.features
    stop_ids = sorted(request.stop_ids)[:num_stop_ids]
    row[SAMPLING : SAMPLING + len(stop_ids)] = stop_ids
    return row


def unpack_plan(packed: jax.Array, layout: PlanLayout) -> Plan:
    """The fields of a packed plan, by static slices."""
    slots, width = layout.num_slots, SAMPLING + layout.num_stop_ids
    sizes = [HEADER, len(SECTIONS), 3 * layout.num_orders, slots, slots * width, layout.rows]
    if layout.tokens:
        sizes += [layout.rows, layout.rows, layout.tokens]
    parts = jnp.split(packed, np.cumsum(sizes)[:-1])
    header, ends, orders, release, admit, rows = parts[:6]
    return Plan(
        header[0],
        header[1],
        header[2],
        header[3],
        header[4] > 0,
        Commands(orders.reshape(3, layout.num_orders), ends),
        release > 0,
        admit.reshape(slots, width),
        rows,
        *(parts[6:] or (None, None, None)),
    )
