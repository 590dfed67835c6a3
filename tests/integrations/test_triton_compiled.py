"""Kernels of codecs for accelerators: Triton compiles them all, for a card that is not here."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from polytempo.compression.kernels import triton_kernels

POINTERS = {
    "*fp32": ("x", "r", "out", "scales", "means", "steps", "values"),
    "*fp64": ("sums",),
    "*i32": ("codes", "firsts", "words", "prefix", "counts", "least", "above", "equal", "ties", "indices"),
    "i32": ("n", "block", "length", "tiles", "bucket", "num_words"),
    "i64": ("key_lower", "key_upper"),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}
CONSTANTS = {
    "has_residual": True,
    "tile": 1024,
    "rows": 16,
    "columns": 256,
    "greatest": 2.7e36,
    "least": 2.0**-126,
    "words_each": 128,
    "levels": 3,
    "most": 1e37,
    "width": 3,
    "positions": 32,
    "words_per_lane": 3,
    "add": True,
    "shift": 20,
    "digit_bits": 11,
}
KERNELS = [name for name, each in vars(triton_kernels).items() if hasattr(each, "arg_names") and name[0] != "_"]


@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_and_rounds_each_operation(name: str) -> None:
    """Multiplications are not fused with additions, and divisions are exact."""
    kernel = getattr(triton_kernels, name)
    is_constant = {each.name: each.is_constexpr for each in kernel.params}
    signature = {each: "constexpr" if is_constant[each] else TYPES[each] for each in kernel.arg_names}
    given = {(i,): CONSTANTS[each] for i, each in enumerate(kernel.arg_names) if is_constant[each]}
    source = ASTSource(fn=kernel, signature=signature, constexprs=given)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assembly = made.asm["ptx"]
    assert not [each for each in ("fma", "div.full", "div.approx") if each in assembly]


def test_they_are_all_there() -> None:
    assert len(KERNELS) == 12
