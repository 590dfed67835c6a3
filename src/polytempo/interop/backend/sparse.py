"""The sum of sparse tensors: what DDP asks for when an embedding's gradient is sparse."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from polytempo.core.errors import Mismatch
from polytempo.native.group import Group

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
    """How many entries each rank has, once all are found to mean the same: op, dtype, shape, sparse dimensions."""
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
