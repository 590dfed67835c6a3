"""The operations that are measured, by torch.distributed: each is prepared once, checked once, and called often.

`num_bytes` is the size of the larger tensor, such as the result of a gather; rounded down to equal f32 pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

MOVES_NOTHING = "barrier"

# torch 2.13 renamed them, and warns of the names that older ones have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Prepared(NamedTuple):
    """An operation with its tensors.

    If every rank fills `sent` with its rank + 1, then after `call()` the equal pieces of `received` hold `expected`,
    a value for each piece. A call counts as `steps` operations.
    """

    call: Callable[[], Any]
    sent: Tensor
    received: Tensor
    expected: list[float]
    steps: int = 1


def elements(num_bytes: int, size: int) -> int:
    """Number of f32 elements in `num_bytes`, rounded down to equal pieces for `size` ranks."""
    return num_bytes // 4 // size * size


def all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> Prepared:
    """The sum over all ranks, in place."""
    return Prepared(lambda: dist.all_reduce(tensor, group=group), tensor, tensor, [_sum(group)])


def broadcast(group: dist.ProcessGroup, tensor: Tensor) -> Prepared:
    """Rank 0's tensor."""
    return Prepared(lambda: dist.broadcast(tensor, 0, group=group), tensor, tensor, [1.0])


def all_gather(group: dist.ProcessGroup, tensor: Tensor) -> Prepared:
    """Every rank's piece, on every rank."""
    piece = torch.empty(tensor.numel() // group.size())
    return Prepared(lambda: _all_gather(tensor, piece, group=group), piece, tensor, _one_of_each(group))


def reduce_scatter(group: dist.ProcessGroup, tensor: Tensor) -> Prepared:
    """The sum over all ranks, a piece on each."""
    piece = torch.empty(tensor.numel() // group.size())
    return Prepared(lambda: _reduce_scatter(piece, tensor, group=group), tensor, piece, [_sum(group)])


def all_to_all(group: dist.ProcessGroup, tensor: Tensor) -> Prepared:
    """A piece from every rank to every rank."""
    received = torch.empty_like(tensor)
    return Prepared(
        lambda: dist.all_to_all_single(received, tensor, group=group), tensor, received, _one_of_each(group)
    )


def send_recv(group: dist.ProcessGroup, tensor: Tensor) -> Prepared:
    """Ranks 0 and 1, 2 and 3, … send to and fro: two steps a call. A last rank without a partner does nothing."""
    rank, partner, received = group.rank(), group.rank() ^ 1, torch.empty_like(tensor)
    if partner >= group.size():
        return Prepared(lambda: None, tensor, tensor, [rank + 1.0], 2)

    def there_and_back() -> None:
        for sender in sorted((rank, partner)):
            if sender == rank:
                dist.send(tensor, partner, group=group)
            else:
                dist.recv(received, partner, group=group)

    return Prepared(there_and_back, tensor, received, [partner + 1.0], 2)


def barrier(group: dist.ProcessGroup, tensor: Tensor) -> Prepared:
    """Wait for all ranks."""
    return Prepared(lambda: dist.barrier(group=group), tensor, tensor, [group.rank() + 1.0])


OPERATIONS: dict[str, Callable[[dist.ProcessGroup, Tensor], Prepared]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send_recv": send_recv,
    "barrier": barrier,
}


def checked(prepared: Prepared, rank: int, who: str) -> Prepared:
    """Call it once and compare. Errors: ValueError where a peer (or we) answered wrong; a wrong sum has no speed."""
    prepared.sent.fill_(rank + 1)
    prepared.call()
    pieces = prepared.received.view(len(prepared.expected), -1)
    if not bool((pieces == torch.tensor(prepared.expected)[:, None]).all()):
        raise ValueError(f"rank {rank}: {who} answered with wrong values, so there is nothing to measure")
    prepared.sent.zero_()  # repeated sums stay finite
    return prepared


def _sum(group: dist.ProcessGroup) -> float:
    return group.size() * (group.size() + 1) / 2


def _one_of_each(group: dist.ProcessGroup) -> list[float]:
    return [rank + 1.0 for rank in range(group.size())]
