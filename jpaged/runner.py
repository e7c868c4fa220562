"""The device side of an engine: owns the parameters and the state, compiles, dispatches, reads back."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jpaged_models import LoadedModel, describe_backend, pack_model, pick_linear_backend, prefer_huge_pages

from jpaged.audit import AllocatorError, audit, check
from jpaged.config import EngineConfig, pick_bucket
from jpaged.control_rows import CONTROL_ROW, empty_row, make_row
from jpaged.controls import Controls, write_controls, write_masks
from jpaged.logprobs import record_size
from jpaged.memory import pick_kv_dtype
from jpaged.plan import PlanLayout, pack_plan
from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.schedule import PrefillChunk, Schedule
from jpaged.state import count_blocks, init_state
from jpaged.stats import BlockCounts
from jpaged.step import Records, StepResult, StepSpec, decode_loop, mixed_step, unpack_result

log = logging.getLogger(__name__)
Program = Any  # what jax.jit returns
MASKS_AT_ONCE = 8
MAX_COMPILE_THREADS = 8  # each needs memory too


class Dispatched(NamedTuple):
    """A step under way: what was asked for, and where its result will be."""

    schedule: Schedule
    rows: int
    result: jax.Array
    records: Records


class Programs(NamedTuple):
    """The jitted programs of one model and configuration, by bucket."""

    decode: dict[int, tuple[PlanLayout, Program]]
    mixed: dict[int, tuple[PlanLayout, Program]]
    count_blocks: Program
    audit: Program
    write_controls: Program
    write_masks: Program


@functools.lru_cache(maxsize=64)
def build_program(step: Callable[..., tuple], spec: StepSpec) -> Any:
    """A jitted step, not yet compiled. Kept, so that engines of the same shape share what is compiled."""
    return jax.jit(functools.partial(step, spec), donate_argnums=1)


def build_programs(graphdef: nnx.GraphDef, config: EngineConfig, vocab_size: int) -> Programs:
    """The programs an engine of this configuration can need."""

    size = record_size(config.max_logprobs, vocab_size)

    def build(step: Callable[..., tuple], rows: int, tokens: int) -> tuple[PlanLayout, Program]:
        layout = PlanLayout(config.max_num_seqs, config.max_stop_ids, config.max_orders, rows, tokens)
        steps = 1 if tokens else config.decode_steps
        spec = StepSpec(
            graphdef, layout, config.block_size, steps, config.attention_backend, size, config.logits_processor
        )
        return layout, build_program(step, spec)

    return Programs(
        decode={rows: build(decode_loop, rows, 0) for rows in config.decode_buckets},
        mixed={t: build(mixed_step, min(t, config.decode_buckets[-1]), t) for t in config.token_buckets},
        count_blocks=build_count(count_blocks, config.block_size),
        audit=build_count(audit, config.block_size),
        write_controls=build_writer(write_controls),
        write_masks=build_writer(write_masks),
    )


@functools.lru_cache(maxsize=64)
def build_count(function: Callable[..., Any], block_size: int) -> Program:
    return jax.jit(functools.partial(function, block_size=block_size))


@functools.lru_cache
def build_writer(write: Callable[..., Controls]) -> Program:
    return jax.jit(write, donate_argnums=0)


class Runner:
    """Runs schedules on the device, in the order they are dispatched."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.config = config
        self.vocab_size = loaded.config.vocab_size
        linear = pick_linear_backend(config.linear_backend)
        attention = config.attention_backend
        products = linear if loaded.quantization is None else f"{linear}, {loaded.quantization}"
        self.backends = (describe_backend() if attention == "auto" else attention, products)
        log.info("attention by %s, products by %s", *self.backends)
        if linear == "cpu":
            loaded = pack_model(loaded)
        self.params = loaded.params
        self.programs = build_programs(loaded.graphdef, config, self.vocab_size)
        self.state = init_state(loaded.config, config, pick_kv_dtype(loaded, config.kv_cache_dtype))
        prefer_huge_pages(jax.tree.leaves(self.state.cache))

    def dispatch(self, schedule: Schedule) -> Dispatched:
        """Start a step and return without waiting for it."""
        if schedule.prefill:
            layout, program = self.programs.mixed[pick_bucket(self.config.token_buckets, schedule.size)]
        else:
            layout, program = self.programs.decode[pick_bucket(self.config.decode_buckets, len(schedule.decode))]
        return self._run(layout, program, schedule)

    def read(self, dispatched: Dispatched) -> StepResult:
        """Wait for a step's result. Raises RuntimeError if its allocation failed: the host's count was wrong."""
        result = unpack_result(np.asarray(dispatched.result), dispatched.rows)
        if not result.ok:
            raise RuntimeError(
                "the block allocator ran out inside a step, although the scheduler counts every block before it "
                f"admits: {result.counts.free} blocks free, {dispatched.schedule.num_tokens} tokens scheduled. "
                "This is a bug in jpaged; nothing was overwritten."
            )
        return result

    def warm_up(self, on_program: Callable[[str], None] | None = None) -> None:
        """Compile every program, as many at a time as there are cores; nothing compiles after this.

        Calls on_program(name), from any thread, when a program is ready.
        """

        def compile_one(name: str, layout: PlanLayout, program: Program) -> None:
            program.lower(self.params, self.state, pack_plan(Schedule(), layout)).compile()
            if on_program:
                on_program(name)

        # Largest first: the last one to finish should be a short one.
        todo = [(f"mixed {size}", *each) for size, each in reversed(self.programs.mixed.items())]
        todo += [(f"decode {size}", *each) for size, each in reversed(self.programs.decode.items())]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILE_THREADS)) as pool:
            for done in [pool.submit(compile_one, *each) for each in todo]:
                done.result()
        # XLA:CPU prepares the parts of a program when they first run, so each is run once: on a request of one token
        # in slot 0, whose block the next plan releases.
        one = Request("warm-up", [0], SamplingParams(temperature=0.0), max_tokens=2, seed=0, slot=0)
        for _, layout, program in todo:
            step = Schedule(admit=[one])
            if layout.tokens:
                step.prefill = [PrefillChunk(one, 0, 0, 1, last=True)]
            else:
                step.decode, step.decode_slots = [one], np.zeros(1, np.int32)
            for schedule in (step, Schedule(release=[0])):
                jax.block_until_ready(self._run(layout, program, schedule).result)
        row = empty_row(self.vocab_size, self.config)
        self._write_controls(0, row)
        self.write_masks([0], [row.mask])
        self.count_blocks()
        self.audit()

    def write_masks(self, slots: list[int], masks: list[np.ndarray]) -> None:
        """Write masks i32[W] of allowed tokens, MASKS_AT_ONCE in one dispatch."""
        for start in range(0, len(slots), MASKS_AT_ONCE):
            some, count = slice(start, start + MASKS_AT_ONCE), len(slots[start : start + MASKS_AT_ONCE])
            places = np.full(MASKS_AT_ONCE, self.config.max_num_seqs, np.int32)  # one past the last: left out
            places[:count] = slots[some]
            words = np.zeros((MASKS_AT_ONCE, len(masks[0])), np.int32)
            words[:count] = masks[some]
            controls = self.programs.write_masks(self.state.controls, places, words)
            self.state = self.state._replace(controls=controls)

    def count_blocks(self) -> BlockCounts:
        """Blocks by state and what is in them, once every dispatched step is done."""
        counts = jax.device_get(self.programs.count_blocks(self.state.pool, self.state.tables, self.state.named))
        return BlockCounts(*(int(count) for count in counts))

    def audit(self) -> None:
        """Raise AllocatorError if the allocator's state breaks an invariant."""
        check(self.programs.audit(self.state.pool, self.state.tables, self.state.named.held))

    def names_in_use(self) -> int:
        """Names that have a block, once every dispatched step is done."""
        named = jax.device_get(self.state.named)
        ids = named.block[named.block > 0]
        if not np.array_equal(np.bincount(ids, minlength=len(named.held)), named.held):
            raise AllocatorError("the blocks that have names are not those that are held")
        return len(ids)

    def _run(self, layout: PlanLayout, program: Program, schedule: Schedule) -> Dispatched:
        for request in schedule.admit:
            if request.features & CONTROL_ROW:
                self._write_controls(request.slot, make_row(request, self.vocab_size, self.config))
        self.state, result, records = program(self.params, self.state, pack_plan(schedule, layout))
        return Dispatched(schedule, layout.rows, result, records)

    def _write_controls(self, slot: int, row: Controls) -> None:
        controls = self.programs.write_controls(self.state.controls, np.int32(slot), row)
        self.state = self.state._replace(controls=controls)
