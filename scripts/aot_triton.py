"""The GPU kernels' Triton code, taken out of a lowered program and compiled by the triton wheel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect

ARCHITECTURES = (80, 90)


def triton_kernels(lowered: jax.stages.Lowered) -> Iterator[tuple[str, str, int, int]]:
    """(name, Triton code, warps, stages) of each kernel that a program for GPUs calls."""

    def operations(operation: Any) -> Iterator[Any]:
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield inner
                    yield from operations(inner)

    context = ir.Context()
    dialect.register_dialect(context)
    for operation in operations(lowered.compiler_ir().operation):
        if operation.name != "stablehlo.custom_call" or "mhlo.backend_config" not in operation.attributes:
            continue
        config = operation.attributes["mhlo.backend_config"]
        if "ir" in config and "num_warps" in config:
            code = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes, context).operation.get_asm()
            warps, stages = (ir.IntegerAttr(config[name]).value for name in ("num_warps", "num_stages"))
            yield ir.StringAttr(config["name"]).value, code, warps, stages


def compile_triton(lowered: jax.stages.Lowered, program: str, architecture: int) -> Iterator[dict[str, Any]]:
    """A row for each kernel: registers, bytes spilled, shared memory, tensor-core instructions.

    Wrong is a kernel that spills, and one with 16-bit operands that does not use the tensor cores.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    assembler = next((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))
    with tempfile.TemporaryDirectory() as folder:
        for name, code, warps, stages in triton_kernels(lowered):
            source = Path(folder, f"{name}.ttir")
            source.write_text(code, encoding="utf-8")
            row: dict[str, Any] = {
                "program": f"{name} of {program}, sm_{architecture}",
                "kernel": name,
                "architecture": architecture,
                "problems": [],
            }
            target = GPUTarget("cuda", architecture, 32)
            try:
                made = triton.compile(str(source), target=target, options={"num_warps": warps, "num_stages": stages})
            except Exception as error:  # e.g. no float8 before sm_89
                yield {**row, "refused": str(error).strip().splitlines()[0][:100]}
                continue
            ptx = made.asm["ptx"]
            Path(folder, "kernel.ptx").write_text(ptx, encoding="utf-8")
            found = re.search(r"\.target (\w+)", ptx)
            assert found is not None
            command = [assembler, "-v", f"-arch={found[1]}", "kernel.ptx", "-o", "kernel.cubin"]
            said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
            spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
            products = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)", ptx))
            if spilled:
                row["problems"].append(f"{spilled} bytes are spilled")
            if "join" not in name and "float32" not in program and not products:
                row["problems"].append("no tensor-core instruction")
            yield {
                **row,
                "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
                "spilled_bytes": spilled,
                "shared_kib": made.metadata.shared >> 10,
                "tensor_core_instructions": products,
                "warps": warps,
            }


def summarize_triton(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kernel and architecture: the most of all shapes, and how many of them spill or are refused."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["architecture"]), []).append(row)
    table = []
    for (kernel, architecture), group in groups.items():
        made = [row for row in group if "registers" in row]
        spills = [row["spilled_bytes"] for row in made]
        table.append(
            {
                "kernel": kernel,
                "architecture": f"sm_{architecture}",
                "shapes": len(made),
                "refused": len(group) - len(made),
                "registers": max(row["registers"] for row in made),
                "shared KiB": max(row["shared_kib"] for row in made),
                "tensor-core instructions": max(row["tensor_core_instructions"] for row in made),
                "shapes that spill": sum(map(bool, spills)),
                "spilled bytes": max(spills),
            }
        )
    return table
