"""What is written of programs compiled for machines that are not here."""

from __future__ import annotations

import pytest
from aot_check import run_triton, summarize
from aot_triton import summarize_triton

from jpaged.targets import TARGETS


def test_kernels_of_all_shapes_are_one_row() -> None:
    """The most of what they take, the fewest calls; a failure is counted, and what could not be read is not zero."""
    good = {"problems": [], "aliased_mib": 256, "temporary_mib": 1.5, "kernels": 2, "copies": 0}
    rows = [
        {"program": "write 8x4x128 bfloat16", **good},
        {
            "program": "write 8x4x64 int8",
            **good,
            "temporary_mib": 7.0,
            "kernels": 3,
            "copies": 1,
            "problems": ["a copy"],
        },
        {"program": "write 8x4x32 int8", "problems": ["does not compile"]},
        {"program": "tiny, decode loop of 64 rows", **good, "copies": None},
    ]
    kernels, step = summarize("v5e", rows[:2] + rows[3:])
    assert kernels == {
        "target": "v5e",
        "program": "write kernels",
        "as it should be": "1 of 2",
        "pool aliased MiB": 256,
        "temporaries MiB": 7.0,
        "calls of our kernels": 2,
        "copies of pool or weights": 1,
    }
    assert step["program"] == "tiny, decode loop of 64 rows" and step["copies of pool or weights"] == "not readable"
    assert summarize("v5e", rows)[0] == {**kernels, "as it should be": "1 of 3"}
    assert summarize("v5e", rows[2:3])[0]["temporaries MiB"] is None


def test_registers_and_spills_of_all_shapes() -> None:
    made = {
        "kernel": "paged_prefill",
        "architecture": 80,
        "tensor_core_instructions": 8,
        "shared_kib": 64,
        "problems": [],
    }
    rows = [
        {**made, "registers": 255, "spilled_bytes": 80},
        {**made, "registers": 100, "spilled_bytes": 0, "shared_kib": 32},
        {"kernel": "paged_prefill", "architecture": 80, "problems": [], "refused": "no float8"},
        {**made, "architecture": 90, "registers": 230, "spilled_bytes": 0},
    ]
    old, new = summarize_triton(rows)
    assert (old["architecture"], old["shapes"], old["refused"], old["registers"]) == ("sm_80", 2, 1, 255)
    assert (old["shapes that spill"], old["spilled bytes"], old["shared KiB"]) == (1, 80, 64)
    assert (new["architecture"], new["shapes that spill"], new["tensor-core instructions"]) == ("sm_90", 0, 8)


def test_the_triton_wheel_is_for_one_gpu() -> None:
    for name in ("v5e", "h200x8"):
        with pytest.raises(ValueError, match="--triton needs the target h200"):
            list(run_triton(TARGETS[name], ()))
