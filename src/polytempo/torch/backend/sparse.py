"""The sum of sparse tensors: what DDP asks for when an embedding's gradient is sparse."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.native.group import Group


def sum_of_sparse(group: Group, tensor: Tensor, op: str, timeout_s: float) -> None:
    """`tensor`, a sparse COO tensor, becomes the sum (or average) of all ranks' tensors, coalesced.

    Every rank gathers all ranks' indices and values and adds them up. Cost per rank, with n entries of d values on
    each of N ranks: (N - 1) n (8 + 4 d) bytes read.
    """
    if tensor.layout != torch.sparse_coo or op not in ("sum", "average"):
        raise ValueError(f"polytempo sums and averages sparse COO tensors, and was asked for {op} of {tensor.layout}")
    mine = tensor if tensor.is_coalesced() else tensor.coalesce()
    shape = torch.tensor([mine._nnz()])
    counts = [torch.zeros_like(shape) for _ in range(group.size)]
    group.exchange("all_gather", [shape], counts, timeout_s=timeout_s)
    numbers = [int(count) for count in counts]
    indices = _gathered(group, mine.indices().T.contiguous(), numbers, timeout_s)
    values = _gathered(group, mine.values().contiguous(), numbers, timeout_s)
    total = torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False).coalesce()
    if op == "average":
        total = total / group.size
    tensor.copy_(total)


def _gathered(group: Group, rows: Tensor, numbers: list[int], timeout_s: float) -> Tensor:
    whole = rows.new_empty((sum(numbers), *rows.shape[1:]))
    group.exchange("all_to_all", [rows], list(whole.split(numbers)), timeout_s=timeout_s)
    return whole
