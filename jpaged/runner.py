"""The device side of an engine: owns the parameters and the state, compiles, dispatches, reads back."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jpaged_models import (
    LoadedModel,
    ModelConfig,
    available_backends,
    describe_backend,
    pack_model,
    pick_linear_backend,
    repeat_kv_heads,
    settle_memory,
)

from jpaged.audit import AllocatorError, audit, check
from jpaged.block_copies import (
    COPIED_AT_ONCE,
    content_shapes,
    join_content,
    load_blocks,
    save_blocks,
    split_content,
)
from jpaged.config import EngineConfig, pick_bucket
from jpaged.control_rows import CONTROL_ROW, empty_row, make_row
from jpaged.controls import Controls, write_controls, write_masks
from jpaged.logprobs import record_size
from jpaged.memory import pick_kv_dtype
from jpaged.parallel import CACHE, CONTENT, PARAMS, SAME, STATE, on_all
from jpaged.plan import PlanLayout, pack_plan
from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from jpaged.schedule import Load, PrefillChunk, Save, Schedule
from jpaged.state import EngineState, count_blocks, init_state
from jpaged.stats import BlockCounts
from jpaged.step import Records, StepResult, StepSpec, decode_loop, mixed_step, unpack_result
from jpaged.tiers import HostStore, StoredBlock

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
    loaded: list[jax.Array]  # bool[] for each program that loaded blocks before it
    saved: int  # programs that saved blocks, until then


class Saving(NamedTuple):
    """Blocks on their way to the host."""

    content: list[jax.Array]
    blocks: list[StoredBlock]


class Programs(NamedTuple):
    """The jitted programs of one model and configuration, by bucket."""

    decode: dict[int, tuple[PlanLayout, Program]]
    mixed: dict[int, tuple[PlanLayout, Program]]
    count_blocks: Program
    audit: Program
    write_controls: Program
    write_masks: Program
    save_blocks: Program
    load_blocks: Program

    def pick(self, schedule: Schedule) -> tuple[PlanLayout, Program]:
        """The smallest step that holds a schedule."""
        steps, size = (self.mixed, schedule.size) if schedule.prefill else (self.decode, len(schedule.decode))
        return steps[pick_bucket(tuple(steps), size)]


def make_spec(graphdef: nnx.GraphDef, config: EngineConfig, vocab_size: int, layout: PlanLayout) -> StepSpec:
    """What is static in a step of this layout."""
    steps = 1 if layout.tokens else config.decode_steps
    size = record_size(config.max_logprobs, vocab_size)
    backend, processor = config.attention_backend, config.logits_processor
    return StepSpec(graphdef, layout, config.block_size, steps, backend, size, processor)


@functools.lru_cache(maxsize=64)
def build_program(step: Callable[..., tuple], spec: StepSpec, mesh: Mesh | None, donate: bool = True) -> Any:
    """A jitted step, not yet compiled. Kept, so that engines of the same shape share what is compiled."""
    run = on_all(functools.partial(step, spec), mesh, (PARAMS, STATE, SAME), (STATE, SAME, SAME))
    return jax.jit(run, donate_argnums=(1,) if donate else ())


def build_programs(
    graphdef: nnx.GraphDef, config: EngineConfig, vocab_size: int, mesh: Mesh | None = None, *, donate: bool = True
) -> Programs:
    """The programs an engine of this configuration can need.

    mesh    the devices its model is divided among
    donate  whether a step takes the state's memory for the next one; else the old state stays, and pages are copied
    """

    def build(step: Callable[..., tuple], rows: int, tokens: int) -> tuple[PlanLayout, Program]:
        layout = PlanLayout(config.max_num_seqs, config.max_stop_ids, config.max_orders, rows, tokens)
        return layout, build_program(step, make_spec(graphdef, config, vocab_size, layout), mesh, donate)

    return Programs(
        decode={rows: build(decode_loop, rows, 0) for rows in config.decode_buckets},
        mixed={t: build(mixed_step, min(t, config.decode_buckets[-1]), t) for t in config.token_buckets},
        count_blocks=build_once(count_blocks, mesh, block_size=config.block_size),
        audit=build_once(audit, mesh, block_size=config.block_size, slides=config.window is not None),
        write_controls=build_once(write_controls, mesh, (0,)),
        write_masks=build_once(write_masks, mesh, (0,)),
        save_blocks=build_once(save_blocks, mesh, specs=((CACHE, SAME, SAME, SAME), CONTENT)),
        load_blocks=build_once(
            load_blocks, mesh, (0, 1, 2), specs=((CACHE, SAME, SAME, SAME, CONTENT), (CACHE, SAME, SAME, SAME))
        ),
    )


@functools.lru_cache(maxsize=64)
def build_once(
    function: Callable[..., Any],
    mesh: Mesh | None = None,
    donated: tuple[int, ...] = (),
    specs: tuple[Any, Any] = (SAME, SAME),
    **static: Any,
) -> Program:
    """A jitted function with its static arguments, shared by engines as `build_program`'s are.

    specs: of its arguments and results, where the model is divided.
    """
    return jax.jit(on_all(functools.partial(function, **static), mesh, *specs), donate_argnums=donated)


def make_state(
    model: ModelConfig, config: EngineConfig, kv_dtype: str, runs: Sequence[int] | None, mesh: Mesh | None
) -> EngineState:
    """A fresh state; on a mesh each device makes its own part."""
    devices = config.tensor_parallel_size
    part = dataclasses.replace(model, num_kv_heads=repeat_kv_heads(model, devices).num_kv_heads // devices)
    make = functools.partial(init_state, part, config, kv_dtype, runs)
    return make() if mesh is None else jax.jit(on_all(make, mesh, (), STATE))()


def prepare(loaded: LoadedModel, config: EngineConfig) -> tuple[LoadedModel, EngineConfig, tuple[str, str]]:
    """The model as the kernels here want it, the configuration without "auto"; what computes attention, and products.

    Raises ValueError for a model that cannot be divided among so many devices, and for products that are not there.
    """
    devices = config.tensor_parallel_size
    linear = pick_linear_backend(config.linear_backend, devices)
    attention = config.attention_backend
    products = linear if loaded.quantization is None else f"{linear}, {loaded.quantization}"
    backends = describe_backend() if attention == "auto" else attention, products
    over = "" if devices == 1 else f", on {devices} devices"
    log.info("attention by %s, products by %s%s", *backends, over)
    loaded = loaded.split(devices)
    if linear == "cpu":
        loaded = pack_model(loaded)
    if attention == "auto":  # decided here: programs for every platform take twice as long to trace
        config = dataclasses.replace(config, attention_backend=available_backends()[0])
    return loaded, config, backends


class Runner:
    """Runs schedules on the device, in the order they are dispatched."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, store: HostStore) -> None:
        self.config = config
        self.store = store
        self.saving: deque[Saving] = deque()
        self.num_saved = 0  # programs that saved blocks and were waited for
        self.vocab_size = loaded.config.vocab_size
        loaded, config, self.backends = prepare(loaded, config)
        self.params, self.graphdef = loaded.params, loaded.graphdef
        self.mesh = loaded.mesh
        self.programs = build_programs(loaded.graphdef, config, self.vocab_size, self.mesh)
        kv_dtype = pick_kv_dtype(loaded, config.kv_cache_dtype)
        self.state = make_state(loaded.config, config, kv_dtype, loaded.runs, self.mesh)
        self.content_shapes = content_shapes(self.state.cache, config.num_blocks)

    def dispatch(self, schedule: Schedule) -> Dispatched:
        """Start a step, with the copies that go before it, and return without waiting for them."""
        self.save(schedule.save)
        loaded = self.load(schedule.load)
        layout, program = self.programs.pick(schedule)
        return self._run(layout, program, schedule)._replace(loaded=loaded, saved=self.num_saved + len(self.saving))

    def read(self, dispatched: Dispatched) -> StepResult:
        """Wait for a step's result. Raises RuntimeError if its allocation failed: the host's count was wrong."""
        result = unpack_result(np.asarray(dispatched.result), dispatched.rows)
        self._finish_saving(dispatched.saved)
        if not result.ok or not all(map(bool, dispatched.loaded)):
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

        def compile_one(name: str, lowered: jax.stages.Lowered) -> None:
            lowered.compile()
            if on_program:
                on_program(name)

        row = empty_row(self.vocab_size, self.config)
        # Largest first: the last one to finish should be a short one.
        todo = [(f"mixed {size}", *each) for size, each in reversed(self.programs.mixed.items())]
        todo += [(f"decode {size}", *each) for size, each in reversed(self.programs.decode.items())]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILE_THREADS)) as pool:
            # Traced here, one after the other: that is Python, and threads of it would only wait for each other.
            jobs: list[Future[Any]] = [pool.submit(lowered.compile) for lowered in self._lower_small(row)]
            for name, layout, program in todo:
                lowered = program.lower(self.params, self.state, pack_plan(Schedule(), layout))
                jobs.append(pool.submit(compile_one, name, lowered))
            for done in jobs:
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
        self._write_controls(0, row)
        self.write_masks([0], [row.mask])
        self.count_blocks()
        self.audit()
        if self.store.in_use:
            self._copy_nothing()
        settle_memory()

    def _lower_small(self, row: Controls) -> list[jax.stages.Lowered]:
        """The programs that run between steps, traced; `row`: some slot's controls."""
        programs, state = self.programs, self.state
        small = [
            programs.write_controls.lower(state.controls, np.int32(0), row),
            programs.write_masks.lower(state.controls, *self._padded_masks([0], [row.mask])),
            programs.count_blocks.lower(state.pool, state.tables, state.named),
            programs.audit.lower(state.pool, state.tables, state.named.held),
        ]
        if self.store.in_use:
            names = np.zeros(COPIED_AT_ONCE, np.int32)
            small += [
                programs.save_blocks.lower(state.cache, state.tables, state.named, self._padded_places()),
                programs.load_blocks.lower(state.cache, state.pool, state.named, names, self.content_shapes),
            ]
        return small

    def wait_for_saves(self) -> None:
        """Wait until every block on its way to the host has arrived."""
        self._finish_saving(self.num_saved + len(self.saving))

    def read_blocks(self, names: Sequence[tuple[bytes, int]]) -> Iterator[tuple[bytes, np.ndarray]]:
        """(key, content) of blocks given by key and name, waited for."""
        for start in range(0, len(names), COPIED_AT_ONCE):
            some = names[start : start + COPIED_AT_ONCE]
            places = self._padded_places()
            places[:, : len(some)] = [[0] * len(some), [0] * len(some), [name for _, name in some]]
            content = split_content(self._start_saving(places), len(some))
            yield from zip((key for key, _ in some), content, strict=True)

    def measure_copies(self) -> float:
        """Seconds that a block takes to the host and back."""
        times = []
        for _ in range(4):  # the first may compile
            start = time.perf_counter()
            self._copy_nothing()
            times.append(time.perf_counter() - start)
        return min(times[1:]) / COPIED_AT_ONCE

    def write_masks(self, slots: list[int], masks: list[np.ndarray]) -> None:
        """Write masks i32[W] of allowed tokens, MASKS_AT_ONCE in one dispatch."""
        for start in range(0, len(slots), MASKS_AT_ONCE):
            some = slice(start, start + MASKS_AT_ONCE)
            padded = self._padded_masks(slots[some], masks[some])
            controls = self.programs.write_masks(self.state.controls, *padded)
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
        return Dispatched(schedule, layout.rows, result, records, [], 0)

    def save(self, saves: Sequence[Save]) -> None:
        """Start to copy blocks to the host."""
        for start in range(0, len(saves), COPIED_AT_ONCE):
            some = saves[start : start + COPIED_AT_ONCE]
            places = self._padded_places()
            places[:, : len(some)] = np.array([save[:3] for save in some], np.int32).T
            self.saving.append(Saving(self._start_saving(places), [save.block for save in some]))

    def _start_saving(self, places: np.ndarray) -> list[jax.Array]:
        content = self.programs.save_blocks(self.state.cache, self.state.tables, self.state.named, places)
        for array in content:
            array.copy_to_host_async()
        return content

    def _finish_saving(self, until: int) -> None:
        """Hand the store what the first `until` programs that saved blocks have read."""
        while self.num_saved < until:
            content, blocks = self.saving.popleft()
            for block, data in zip(blocks, split_content(content, len(blocks)), strict=True):
                self.store.arrive(block, data)
            self.num_saved += 1

    def load(self, loads: Sequence[Load]) -> list[jax.Array]:
        """Start to copy blocks to the device. Returns for each program whether it could, bool[]."""
        if any(load.block.data is None for load in loads):
            self.wait_for_saves()
        done = []
        for start in range(0, len(loads), COPIED_AT_ONCE):
            some = loads[start : start + COPIED_AT_ONCE]
            names = np.zeros(COPIED_AT_ONCE, np.int32)
            names[: len(some)] = [load.name for load in some]
            content = join_content([load.block for load in some], self.content_shapes)
            done.append(self._start_loading(names, content))
        return done

    def _start_loading(self, names: np.ndarray, content: list[np.ndarray]) -> jax.Array:
        state = self.state
        cache, pool, named, ok = self.programs.load_blocks(state.cache, state.pool, state.named, names, content)
        self.state = state._replace(cache=cache, pool=pool, named=named)
        return ok

    def _copy_nothing(self) -> None:
        """Copy the null block K times to the host, and as many blocks to nowhere."""
        blocks = split_content(self._start_saving(self._padded_places()), COPIED_AT_ONCE)
        content = join_content([StoredBlock(b"", block) for block in blocks], self.content_shapes)
        jax.block_until_ready(self._start_loading(np.zeros(COPIED_AT_ONCE, np.int32), content))

    def _padded_places(self) -> np.ndarray:
        places = np.zeros((3, COPIED_AT_ONCE), np.int32)
        places[0] = self.config.max_num_seqs
        return places

    def _padded_masks(self, slots: list[int], masks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        places = np.full(MASKS_AT_ONCE, self.config.max_num_seqs, np.int32)  # one past the last: left out
        places[: len(slots)] = slots
        words = np.zeros((MASKS_AT_ONCE, len(masks[0])), np.int32)
        words[: len(slots)] = masks
        return places, words

    def _write_controls(self, slot: int, row: Controls) -> None:
        controls = self.programs.write_controls(self.state.controls, np.int32(slot), row)
        self.state = self.state._replace(controls=controls)
