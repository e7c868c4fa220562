"""Compiling for machines that are not here: what is read off a compiled program, and what is refused."""

from __future__ import annotations

import importlib.util

import pytest

from jpaged.targets import NEEDS, TARGETS, find_copies, find_target

HLO = """
HloModule jit_step, is_scheduled=true

%fused_computation (param_0.1: bf16[64,128]) -> bf16[128,64] {
  %param_0.1 = bf16[64,128]{1,0} parameter(0)
  ROOT %transpose.9 = bf16[128,64]{1,0} transpose(%param_0.1), dimensions={1,0}
}

%body (arg: (bf16[64,128], s32[])) -> (bf16[64,128], s32[]) {
  %copy.1 = bf16[64,128]{1,0:T(8,128)(2,1)} copy(%gte), metadata={op_name="while/body"}
  %copy.2 = bf16[64,127]{1,0} copy(%gte.2)
  %copy.3 = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} copy(%gte.2)
  ROOT %tuple.1 = (bf16[64,128]{1,0}, s32[]) tuple(%copy.1, %gte.3)
}

ENTRY %main.1 (p0: bf16[64,128]) -> bf16[64,128] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %copy-start.3 = (bf16[64,128]{1,0:S(1)}, bf16[64,128]{1,0}, u32[]) copy-start(%p0)
  %fusion.4 = bf16[128,64]{1,0} fusion(%p0), kind=kLoop, calls=%fused_computation
  %convert.5 = f32[2,32,128]{2,1,0} convert(%bitcast)
  ROOT %custom-call.6 = bf16[64,128]{1,0} custom-call(%p0), custom_call_target="tpu_custom_call"
}
"""


def test_copies_are_found_by_their_size() -> None:
    """In loops and outside, whatever the shape and the type; not in fused computations, nor those to fast memory."""
    found = [line.split(" = ")[0] for line in find_copies(HLO, {64 * 128})]
    assert found == ["%copy.1", "%convert.5"]
    assert list(find_copies(HLO, {64 * 127})) == ["%copy.2 = bf16[64,127]{1,0} copy(%gte.2)"]
    assert list(find_copies(HLO, {12345})) == []


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target must be one of h200, .*, v6e-8, got 'v7x'"):
        find_target("v7x")


@pytest.mark.parametrize("name", TARGETS)
def test_a_missing_compiler_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    module, extra = NEEDS[TARGETS[name].platform]
    with pytest.raises(ValueError, match=rf"target '{name}' needs the compiler for .*pip install 'jpaged\[{extra}\]'"):
        find_target(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda found: found == module or None)
    assert find_target(name) is TARGETS[name]
