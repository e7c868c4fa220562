"""Compiles the kernels and the engine's steps for machines that are not here, and checks what their compilers say.

    python scripts/aot_check.py v5e            # also: v6e, h200
    python scripts/aot_check.py h200x8         # the steps of a model divided among eight; also v5e-8, v6e-8, ...
    python scripts/aot_check.py h200 --smoke   # the least of it, in seconds
    python scripts/aot_check.py h200 --triton  # instead: registers, spills, tensor-core instructions of the GPU kernels

The compilers come with `pip install '.[tpu,cuda-compiler]'`, in an environment of their own. Checked
are, of every program: it compiles; the pool is updated in place (aliased); nothing of the size of the pool or of a
weight is copied; temporaries take less than 5 % of the pool; our kernels are called.
Of several chips, numbers are those of each.
Status 1 if anything fails. The last lines are a table, with kernels of all shapes in one row; --json writes it as JSON.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from aot_triton import ARCHITECTURES, compile_triton, summarize_triton
from bench_tools import make_parser, print_table, save_json
from jax import ShapeDtypeStruct as Array
from jpaged_models import ModelConfig, cache_shapes, repeat_kv_heads

from jpaged import EngineConfig
from jpaged.planner import byte_size, describe_engine
from jpaged.targets import Target, find_target, inspect, lower_for, prepare
from pallas_kernels import AttentionSpec, KVPages, PagedBatch, copy_blocks, page_shapes, paged_attention, write_kv
from pallas_kernels.triton.attention import attention as triton_attention
from pallas_kernels.triton.choices import KernelTiles, choose_prefill

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
QWEN = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TINY = {**LLAMA, "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
TINY |= {"num_key_value_heads": 2, "head_dim": 128}
MODELS = {"llama-3-8b": LLAMA, "qwen3-0.6b": QWEN, "tiny": TINY}
POOL_BYTES = 4 << 30
TOKENS, ROWS, BLOCKS_A_ROW = 512, 64, 128


class Program(NamedTuple):
    """Something to compile: a jitted function, its arguments, and what must be true of it."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    pool_bytes: int  # aliased; 0: nothing is written
    sizes_kept: frozenset[int]  # elements of the arrays that must not be copied
    kernels: int  # at least so many calls


# ---------------------------------------------------------------- kernels


class Case(NamedTuple):
    """A shape of the kernels: KV heads, queries a KV head, head size, page and query dtype, options."""

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    query: str = "bfloat16"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def sinks(self) -> bool:
        return dict(self.options).get("sinks", False)

    @property
    def static(self) -> dict[str, Any]:
        return {name: value for name, value in self.options if name != "sinks"}

    def __str__(self) -> str:
        options = "".join(f" {name}" for name, _ in self.options)
        return f"{self.kv_heads}x{self.group}x{self.head_dim} {self.dtype} q {self.query}{options}"


KERNELS = ("decode", "mixed", "write")  # what kernel_programs' names begin with
EVERY_OPTION = (("window", 100), ("soft_cap", 30.0), ("sinks", True), ("return_lse", True))
CASES = (
    Case(),
    Case(options=EVERY_OPTION),
    Case(dtype="int8"),
    Case(dtype="float8_e4m3fn", options=EVERY_OPTION),
    Case(dtype="float32", query="float32"),
    Case(kv_heads=1, group=8, head_dim=256),
    Case(kv_heads=32, group=1, head_dim=80),
    Case(group=3, head_dim=96),
    Case(kv_heads=2, group=9, head_dim=192),
    Case(head_dim=64),
    Case(head_dim=32, dtype="int8", query="float32"),
)


def kernel_programs(case: Case, platform: str) -> Iterator[Program]:
    """Decode, mixed attention, and writing and copying of pages."""
    quantised = case.dtype in ("int8", "float8_e4m3fn")
    block_size = 128 if platform == "tpu" and quantised else 16
    token = page_shapes(1, case.kv_heads, 1, case.head_dim, case.dtype, platform).k
    blocks = POOL_BYTES // 16 // (block_size * byte_size(token))
    pages = page_shapes(blocks, case.kv_heads, block_size, case.head_dim, case.dtype, platform)
    heads = case.kv_heads * case.group

    def attend(q: Any, pages: KVPages, batch: PagedBatch, sinks: Any) -> Any:
        return paged_attention(q, pages, batch, scale=case.head_dim**-0.5, sinks=sinks, **case.static)

    kept = large_sizes(pages)
    sinks = Array((heads,), jnp.float32) if case.sinks else None
    for name, rows in (("decode", ROWS), ("mixed", TOKENS)):
        mixed = name == "mixed"
        batch = PagedBatch(
            Array((ROWS, BLOCKS_A_ROW), jnp.int32),
            Array((ROWS,), jnp.int32),
            Array((rows,), jnp.int32),
            Array((ROWS + 1,), jnp.int32) if mixed else None,
            Array((), jnp.int32) if mixed else None,
        )
        q = Array((rows, heads, case.head_dim), case.query)
        yield Program(f"{name} {case}", jax.jit(attend), (q, pages, batch, sinks), 0, kept, 2 if mixed else 1)

    def write(pages: KVPages, k: Any, v: Any, slots: Any, src: Any, dst: Any) -> KVPages:
        return copy_blocks(write_kv(pages, k, v, slots), src, dst)

    new, some = Array((TOKENS, case.kv_heads, case.head_dim), case.query), Array((4,), jnp.int32)
    arguments = (pages, new, new, Array((TOKENS,), jnp.int32), some, some)
    yield Program(f"write {case}", jax.jit(write, donate_argnums=0), arguments, byte_size(pages), kept, 2)


# ---------------------------------------------------------------- steps of the engine


def step_programs(name: str, layers: int, target: Target) -> Iterator[Program]:
    """A mixed step and a decode loop of a model with so many layers, divided among the target's chips."""
    model = ModelConfig.from_hf({**MODELS[name], "num_hidden_layers": layers})
    chips, whole = target.chips, repeat_kv_heads(model, target.chips)
    config = EngineConfig(
        num_blocks=POOL_BYTES * chips // byte_size(cache_shapes(whole, 1, 16, "bfloat16", target.platform)),
        max_model_len=4096,
        max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS,
        tensor_parallel_size=chips,
    )
    programs, params, state = describe_engine(model, config, "bfloat16", "bfloat16", target)
    kept = large_sizes((state.cache, params), chips)
    for kind, (layout, program) in (
        (f"mixed step of {TOKENS} tokens", programs.mixed[TOKENS]),
        (f"decode loop of {ROWS} rows", programs.decode[ROWS]),
    ):
        plan = Array((layout.size,), jnp.int32)
        arguments = (params, state, plan)
        yield Program(f"{name}, {kind}", program, arguments, byte_size(state.cache) // chips, kept, 2 * layers)


def large_sizes(tree: Any, chips: int = 1) -> frozenset[int]:
    """How many elements of pools and weights a chip has; small weights might be as large as some activations."""
    return frozenset(size for x in jax.tree.leaves(tree) if (size := math.prod(x.shape) // chips) >= 1 << 20)


# ---------------------------------------------------------------- checking


def check(program: Program, target: Target) -> dict[str, Any]:
    """Compiles a program: a row of the table, with what is wrong under "problems"."""
    started = time.perf_counter()
    row: dict[str, Any] = {"program": program.name, "problems": []}
    try:
        lowered = lower_for(target, program.function, *program.arguments)
        report = inspect(lowered, lowered.compile(), program.sizes_kept)
    except Exception as error:  # a compiler's refusals have no class in common
        return {**row, "problems": [f"{type(error).__name__}: {str(error)[:500]}"]}
    problems = row["problems"]
    if report.alias_bytes < program.pool_bytes:
        problems.append(f"only {report.alias_bytes} of the pool's {program.pool_bytes} bytes are aliased")
    if program.pool_bytes and report.temporary_bytes > 0.05 * POOL_BYTES:
        problems.append(f"{report.temporary_bytes >> 20} MiB of temporaries, more than 5 % of {POOL_BYTES >> 20} MiB")
    # Before compiling, layers share a kernel's call.
    expected = program.kernels if report.has_text else min(program.kernels, 2)
    if report.kernels < expected:
        problems.append(f"{report.kernels} kernels are called, {expected} were expected")
    problems += [f"a copy: {line}" for line in report.copies]
    return {
        **row,
        "seconds": round(time.perf_counter() - started, 1),
        "aliased_mib": report.alias_bytes >> 20,
        "temporary_mib": round(report.temporary_bytes / 2**20, 1),
        "kernels": report.kernels,
        "copies": len(report.copies) if report.has_text else None,
    }


def run(target_name: str, smoke: bool, layers: int, triton: bool) -> list[dict[str, Any]]:
    """A row for each program, printed as they come."""
    target = find_target(target_name)
    if triton:
        return list(run_triton(target, CASES[:2] if smoke else CASES))
    cases = () if target.chips > 1 else CASES[:2] if smoke else CASES  # a chip's kernels do not know of others
    programs = [program for case in cases for program in kernel_programs(case, target.platform)]
    rows = []
    for name in ("tiny",) if smoke else ("llama-3-8b", "qwen3-0.6b"):
        steps = list(step_programs(name, 1 if smoke else layers, target))
        programs += steps[1:] if smoke else steps
    for program in programs:
        rows.append(check(program, target))
        print_row(rows[-1])
    return rows


def run_triton(target: Target, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A row for each GPU kernel, shape and architecture, with the tiles that are chosen there."""
    if target.platform != "cuda" or target.chips > 1:
        raise ValueError("--triton needs the target h200: it is about the kernels of one GPU")
    for case, architecture in itertools.product(cases, ARCHITECTURES):
        mixed = next(program for program in kernel_programs(case, "cuda") if program.name.startswith("mixed "))
        tiles = KernelTiles(prefill=choose_prefill(*mixed.arguments[:2], architecture))
        lowered = lower_for(target, with_tiles(case, tiles), *mixed.arguments)
        for row in compile_triton(lowered, mixed.name, architecture):
            print_row(row)
            yield row


def with_tiles(case: Case, tiles: KernelTiles) -> Any:
    """The GPU kernels as a jitted function of what `paged_attention` takes."""
    spec = AttentionSpec(case.head_dim**-0.5, **case.static)

    def attend(q: Any, pages: KVPages, batch: PagedBatch, sinks: Any) -> Any:
        return triton_attention(q, pages, batch, spec, sinks, tiles=tiles)

    return jax.jit(attend)


def summarize(target_name: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table: a row for each step, and one for each kind of kernel at all its shapes; bytes are the most of them."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kind = row["program"].split()[0]
        groups.setdefault(f"{kind} kernels" if kind in KERNELS else row["program"], []).append(row)
    table = []
    for name, group in groups.items():
        compiled = [row for row in group if "kernels" in row]
        copies = [row["copies"] for row in compiled]
        table.append(
            {
                "target": target_name,
                "program": name,
                "as it should be": f"{sum(not row['problems'] for row in group)} of {len(group)}",
                "pool aliased MiB": max((row["aliased_mib"] for row in compiled), default=0) or None,
                "temporaries MiB": max((row["temporary_mib"] for row in compiled), default=None),
                "calls of our kernels": min((row["kernels"] for row in compiled), default=None),
                "copies of pool or weights": "not readable" if None in copies else sum(copies),
            }
        )
    return table


def list_compilers() -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for name in ("libtpu", "jax-cuda13-plugin", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def print_row(row: dict[str, Any]) -> None:
    numbers = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("program", "problems"))
    print(f"{'FAILED' if row['problems'] else 'ok':6} {row['program']}: {numbers}", flush=True)
    for problem in row["problems"]:
        print(f"       {problem}", flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("target", help="a target of jpaged plan: v5e, v6e-8, h200, h200x8, ...")
    parser.add_argument("--smoke", action="store_true", help="two shapes, and a tiny model's decode loop")
    parser.add_argument("--layers", type=int, default=2, help="layers of the models (default: 2)")
    parser.add_argument("--triton", action="store_true", help="compile the GPU kernels with the triton wheel instead")
    options = parser.parse_args()
    prepare()
    try:
        rows = run(options.target, options.smoke, options.layers, options.triton)
    except ValueError as error:
        print(f"aot_check: {error}", file=sys.stderr)
        return 2
    table = summarize_triton(rows) if options.triton else summarize(options.target, rows)
    print_table(list(table[0]), [list(row.values()) for row in table])
    save_json(options.json, table, list_compilers())
    failed = sum(bool(row["problems"]) for row in rows)
    print(f"{options.target}: {len(rows) - failed} of {len(rows)} programs as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
