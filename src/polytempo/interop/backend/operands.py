"""Operands of collectives: the operation's name, tensors in one piece, and sums of sparse tensors."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from polytempo.core.errors import Mismatch
from polytempo.native.call import DTYPES, INTEGER_AVERAGE, PLAIN
from polytempo.native.call import OPS as NUMBERS
from polytempo.native.group import Group

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
    """The operation that the native core performs for `op`, and the mark by which ranks compare their meanings."""
    if op == "average" and not (dtype.is_floating_point or dtype.is_complex):
        return "sum", INTEGER_AVERAGE
    return op, PLAIN


def divide_(tensor: Tensor, mark: int, num_ranks: int) -> None:
    """Make a sum of integers their average, as NCCL does: rounded toward zero. The sum may have wrapped around."""
    if mark == INTEGER_AVERAGE:
        tensor.div_(num_ranks, rounding_mode="trunc")


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, else a contiguous copy."""
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


_MOST_LETTERS = 200


def sum_of_sparse(group: Group, tensor: Tensor, op: str, timeout_s: float) -> None:
    """`tensor`, a sparse COO tensor, becomes the sum (or average) of all ranks' tensors, coalesced.

    Every rank gathers all ranks' indices and values and adds them up. Cost per rank, with n entries of d values on
    each of N ranks: (N - 1) n (8 + 4 d) bytes read. Raises Mismatch, on every rank, where ranks ask for something else.
    """
    if tensor.layout != torch.sparse_coo or op not in ("sum", "average"):
        raise ValueError(f"polytempo sums and averages sparse COO tensors, and was asked for {op} of {tensor.layout}")
    mine = tensor if tensor.is_coalesced() else tensor.coalesce()
    numbers = _agreed_counts(group, mine, op, timeout_s)
    indices = _gathered(group, mine.indices().T.contiguous(), numbers, timeout_s)
    values = _gathered(group, mine.values().contiguous(), numbers, timeout_s)
    total = torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False).coalesce()
    if op == "average":
        total = total / group.size
    tensor.copy_(total)


def _agreed_counts(group: Group, tensor: Tensor, op: str, timeout_s: float) -> list[int]:
    """The number of entries of each rank, once all are found to mean the same: op, dtype, shape, sparse dimensions."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{op} of {dtype} {tuple(tensor.shape)} with {tensor.sparse_dim()} sparse dimensions"
    digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True)
    told = _all_gathered(group, torch.tensor([tensor._nnz(), digest]), timeout_s)
    other = next((rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1]), None)
    if other is not None:
        letters = torch.tensor([ord(letter) for letter in text[:_MOST_LETTERS].ljust(_MOST_LETTERS)])
        texts = _all_gathered(group, letters, timeout_s)
        first, second = ("".join(map(chr, texts[rank])).rstrip() for rank in (0, other))
        raise Mismatch(
            f"sparse all_reduce: rank {group.names[0]} asks for the {first}, "
            f"rank {group.names[other]} for the {second}; let all ranks ask for the same"
        )
    return [count for count, _ in told]


def _all_gathered(group: Group, mine: Tensor, timeout_s: float) -> list[list[int]]:
    into = [torch.zeros_like(mine) for _ in range(group.size)]
    group.exchange("all_gather", [mine], into, timeout_s=timeout_s)
    return [[int(number) for number in theirs] for theirs in into]


def _gathered(group: Group, rows: Tensor, numbers: list[int], timeout_s: float) -> Tensor:
    whole = rows.new_empty((sum(numbers), *rows.shape[1:]))
    group.exchange("all_to_all", [rows], list(whole.split(numbers)), timeout_s=timeout_s)
    return whole
