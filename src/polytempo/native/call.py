"""What ranks say to each other that they are doing: the numbers of the native core, and their words."""

from __future__ import annotations

import ctypes

import torch

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}
"""What can be reduced."""

_ALL = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)} - DTYPES.keys(), key=str)
MOVED = DTYPES | {dtype: number for number, dtype in enumerate(_ALL, 10)}
"""What can be moved: all that torch has. The core compares these numbers, so ranks have to run the same torch."""
NOTHING = -1
"""Neither sends nor receives a tensor."""

OPS = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4, "band": 5, "bor": 6, "bxor": 7}
KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "step",
)


class Call(ctypes.Structure):
    """What a rank says that it is doing."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("number", "count", "extra")),
        *((name, ctypes.c_int32) for name in ("kind", "dtype", "op", "root")),
    )

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        details = [f"{self.count} elements of {name_of(self.dtype)}"] if kind != "barrier" else []
        if kind in ("all_reduce", "reduce", "reduce_scatter"):
            details.insert(0, list(OPS)[self.op] + " by a tree" * self.extra)
        if kind in ("broadcast", "reduce", "gather", "scatter"):
            details.append(f"root {self.root}")
        return f"call {self.number}: {kind}({', '.join(details)})"


def name_of(code: int) -> str:
    """The dtype of that number, in words."""
    return next((str(dtype).removeprefix("torch.") for dtype, number in MOVED.items() if number == code), "no dtype")
