"""What collectives compute on: the operation's name, and tensors that lie in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from polytempo.native.call import DTYPES, INTEGER_AVERAGE, PLAIN
from polytempo.native.call import OPS as NUMBERS

OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "average",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
"""torch's operations by the native core's names. PREMUL_SUM is NCCL's alone."""


def _makes_sense(op: str, dtype: torch.dtype) -> bool:
    return op not in ("band", "bor", "bxor") if dtype.is_floating_point else op != "average"


CODES = {
    (dtype, op): (code, NUMBERS[name])
    for dtype, code in DTYPES.items()
    for op, name in OPS.items()
    if _makes_sense(name, dtype)
}
"""The native core's numbers for each dtype and operation that go together."""


def op_of(opts: Any, dtype: torch.dtype) -> str:
    """The operation that `opts` asks for. ValueError where it makes no sense for `dtype`."""
    op = "sum" if opts is None else OPS.get(opts.reduceOp.op)
    if op is None:
        raise ValueError(f"polytempo has no {opts.reduceOp.op}; it has {', '.join(OPS.values())}")
    if dtype.is_complex and op in ("sum", "average"):
        return op
    if dtype not in DTYPES:
        raise ValueError(f"polytempo cannot compute {op} of {dtype}; convert to one of {', '.join(map(str, DTYPES))}")
    if dtype.is_floating_point and op in ("band", "bor", "bxor"):
        raise ValueError(f"{op} is for integers and bool, and this tensor is {dtype}")
    if op == "average" and dtype == torch.bool:
        raise ValueError("average is for numbers, and this tensor is torch.bool; convert it to a float first")
    return op


def in_core(op: str, dtype: torch.dtype) -> tuple[str, int]:
    """The operation that the native core performs for `op`, and the mark by which ranks compare what they mean."""
    if op == "average" and not (dtype.is_floating_point or dtype.is_complex):
        return "sum", INTEGER_AVERAGE
    return op, PLAIN


def divide_(tensor: Tensor, mark: int, num_ranks: int) -> None:
    """Make a sum of integers their average, as NCCL does: rounded toward zero. The sum may have wrapped around."""
    if mark == INTEGER_AVERAGE:
        tensor.div_(num_ranks, rounding_mode="trunc")


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself where it lies in one piece, else a copy that does."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def reducible(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def pieces(whole: Tensor, like: Tensor, num: int, what: str) -> list[Tensor]:
    """`whole`, cut into `num` pieces as long as `like`."""
    if whole.numel() != num * like.numel() or whole.dtype != like.dtype or not whole.is_contiguous():
        raise ValueError(
            f"{what}: the large tensor must be contiguous, {num} times the small one, and of its dtype; got "
            f"{tuple(whole.shape)} of {whole.dtype} and {tuple(like.shape)} of {like.dtype}"
        )
    return list(whole.view(-1).split(like.numel())) if like.numel() else [whole] * num


def check_pieces(found: Sequence[Tensor], like: Tensor, num: int, what: str) -> None:
    """Raise ValueError unless there are `num` pieces as long as `like`, of its dtype."""
    sizes = [piece.numel() for piece in found]
    if sizes != [like.numel()] * num or any(piece.dtype != like.dtype for piece in found):
        raise ValueError(f"{what}: {num} pieces of {like.numel()} elements of {like.dtype} expected, got {sizes}")


def rows(tensor: Tensor, sizes: Sequence[int], num: int) -> list[Tensor]:
    """`tensor`, cut along its first dimension into `sizes`, or into `num` equal parts."""
    if sizes:
        return list(tensor.split(list(sizes)))
    if tensor.shape[0] % num:
        raise ValueError(f"all_to_all_single: {tensor.shape[0]} rows cannot be dealt to {num} ranks; give split sizes")
    return list(tensor.chunk(num)) if tensor.shape[0] else [tensor] * num
