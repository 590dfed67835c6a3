"""Horovod's collectives, begun: each answers a handle for `poll` and `synchronize`.

All ranks of the process set call an operation with the same name; without one they call in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from polytempo.device import current_device
from polytempo.horovod.negotiation.message import TensorRequest
from polytempo.horovod.runtime.groups import CodecExchange, encodable
from polytempo.horovod.runtime.operation import Operation
from polytempo.horovod.torch.handles import begin, every, only, refuse, synchronize
from polytempo.horovod.torch.process_state import PROCESS, ProcessSet, global_process_set


class ReductionOp(IntEnum):
    """The operation that makes one tensor of all ranks' tensors."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReductionOp.AVERAGE
"""The mean over the process set's ranks, those included that have joined. Integers are rounded toward zero."""
Sum = ReductionOp.SUM
Adasum = ReductionOp.ADASUM
"""Adds orthogonal parts and averages parallel ones (`polytempo.aggregation.adasum`)."""
Min = ReductionOp.MIN
Max = ReductionOp.MAX
Product = ReductionOp.PRODUCT


_NAMES = {op: op.name.lower() for op in ReductionOp}


def chosen_op(op: int | None, average: bool | None) -> ReductionOp:
    """The operation; `average` is Horovod's older way to say it. ValueError where both are given."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average; give op alone")
        return Average if average else Sum
    return Average if op is None else op if isinstance(op, ReductionOp) else ReductionOp(op)


def check_reducible(tensors: Sequence[Tensor], op: ReductionOp) -> None:
    """Raise ValueError for tensors that the operation cannot reduce."""
    if op is Average or op is Sum:
        return
    for tensor in tensors:
        if op is Adasum and not tensor.is_floating_point():
            raise ValueError(f"Adasum is for floating-point tensors, got {tensor.dtype}")
        if tensor.is_complex():
            raise ValueError(f"complex numbers have no {_NAMES[op]}; use Sum or Average")


def _reduction(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: ReductionOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    answer: Callable[[Operation], Tensor | list[Tensor]],
    exchange: CodecExchange | None = None,
) -> int:
    check_reducible(tensors, op)
    return begin(
        PROCESS,
        "allreduce",
        tensors,
        name,
        process_set,
        answer,
        outputs=outputs,
        exchange=exchange,
        op=_NAMES[op],
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin postscale · op over ranks of (prescale · tensor), in a new tensor."""
    chosen = chosen_op(op, average)
    return _reduction([tensor], [], name, chosen, prescale_factor, postscale_factor, process_set, only)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like `allreduce_async`, in place."""
    chosen, given = chosen_op(op, average), [tensor]
    return _reduction(given, given, name, chosen, prescale_factor, postscale_factor, process_set, lambda _: tensor)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Several all-reduces as one: none is performed before all ranks have submitted all."""
    _check_group(tensors)
    chosen = chosen_op(op, average)
    return _reduction(tensors, [], name, chosen, prescale_factor, postscale_factor, process_set, every)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like `grouped_allreduce_async`, in place."""
    _check_group(tensors)
    chosen, given = chosen_op(op, average), list(tensors)
    return _reduction(given, given, name, chosen, prescale_factor, postscale_factor, process_set, lambda _: given)


def encoded_allreduce_async(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    exchange: CodecExchange,
    *,
    in_place: bool = False,
) -> int:
    """Begin a grouped all-reduce, a sum or an average, by a codec; tensors of other than floating-point numbers travel
    unencoded.

    `factors`: before and after. Errors: ValueError for other operations, which are not sums of encoded tensors.
    """
    chosen, given = ReductionOp(op), list(tensors)
    _check_group(given)
    outputs: list[Tensor] = given if in_place else []
    by_codec = exchange if encodable(given) else None
    if by_codec is not None and chosen not in (Average, Sum):
        raise ValueError(f"{exchange.name} encodes tensors for a sum or an average, not {chosen.name}")
    return _reduction(given, outputs, name, chosen, *factors, process_set, every, by_codec)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin the sum, or the average, of sparse COO tensors. Call the answer, or `synchronize` it, to wait.

    All ranks' entries are gathered; the answer holds them uncoalesced.
    """
    chosen = ReductionOp(op)
    if chosen not in (Average, Sum) or tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse COO tensors are summed or averaged, got {chosen.name} of {tensor.layout}")
    mine = tensor.detach().coalesce()
    entries = [mine.indices().T.contiguous(), mine.values().contiguous()]
    handle = grouped_allgather_async(entries, f"{name}.entries", process_set)

    def wait() -> Tensor:
        all_indices, all_values = synchronize(handle)
        if chosen is Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.T, all_values, tensor.shape, check_invariants=False)

    return wait


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to concatenate all ranks' tensors along the first dimension. Other dimensions are equal."""
    return begin(PROCESS, "allgather", [tensor], name, process_set, only)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Several of them as one."""
    _check_group(tensors)
    return begin(PROCESS, "allgather", tensors, name, process_set, every)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to give rank `root_rank`'s tensor to all ranks, in a new tensor. The rank is one of the world's."""
    return begin(PROCESS, "broadcast", [tensor], name, process_set, only, root=int(root_rank))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Like `broadcast_async`, in place."""
    return begin(
        PROCESS, "broadcast", [tensor], name, process_set, lambda _: tensor, outputs=[tensor], root=int(root_rank)
    )


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to deal the rows: the first `splits[0]` go to the set's first rank, and so on; equal parts without it.

    Rows beyond the splits' sum stay. With `splits` the answer is the tensor and the received splits (int32), else the
    tensor. Errors: ValueError for splits that are not integers, not one for each rank, or more than the rows; the other
    ranks raise `HorovodInternalError` then.
    """
    parts, problem = _parts(tensor, splits, process_set.size())
    answer = only if splits is None else _with_splits
    handle = begin(PROCESS, "alltoall", [tensor], name, process_set, answer, numbers=parts)
    return refuse(PROCESS, handle, problem) if problem else handle


def _parts(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> tuple[tuple[int, ...], str]:
    """The number of rows for each rank, and the reason if they cannot be split."""
    rows = len(tensor) if tensor.dim() else 0
    if splits is None:
        if rows % size:
            return (), f"{rows} rows cannot be dealt to {size} ranks in equal parts; give splits"
        return (rows // size,) * size, ""
    if isinstance(splits, Tensor) and (splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64)):
        return (), f"splits are integers in one dimension, got {splits.dtype} of shape {tuple(splits.shape)}"
    parts = tuple(int(number) for number in splits)
    if len(parts) != size or min(parts) < 0 or (tensor.dim() and sum(parts) > rows):
        return (
            parts,
            f"{rows} rows cannot be split into {list(parts)}; give {size} numbers with a sum of {rows} at most",
        )
    return parts, ""


def _with_splits(operation: Operation) -> tuple[Tensor, Tensor]:
    return operation.outputs[0], torch.tensor(operation.answer, dtype=torch.int32)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce, and to deal the rows of the answer: to the first ranks one more, where they are not equal."""
    return _scatter([tensor], name, op, prescale_factor, postscale_factor, process_set, only)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Several of them as one."""
    _check_group(tensors)
    return _scatter(tensors, name, op, prescale_factor, postscale_factor, process_set, every)


def _scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    answer: Callable[[Operation], Tensor | list[Tensor]],
) -> int:
    chosen = ReductionOp(op)
    if chosen is not Adasum:  # which the negotiation refuses
        check_reducible(tensors, chosen)
    before, after = float(prescale_factor), float(postscale_factor)
    return begin(
        PROCESS,
        "reducescatter",
        tensors,
        name,
        process_set,
        answer,
        op=_NAMES[chosen],
        prescale=before,
        postscale=after,
    )


def join(device: int = -1) -> int:
    """Wait until all ranks have called `join`; meanwhile bring zeros to the others' all-reduces. The last rank.

    For ranks with fewer batches than others. Other operations of the others are errors there. `device`: the number of
    the device of the zeros for all-reduces on one; -1: the current one.
    """
    if device < 0 and (current := current_device()) is not None:
        device = current.index or 0  # another thread may make the zeros
    session = PROCESS.opened()
    session.performer.joins_on = device
    operation = Operation(TensorRequest("join", "join", lasting=False), [], [])
    session.runtime.submit(operation)
    session.runtime.wait(operation)
    return int(operation.answer)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have come here."""
    synchronize(begin(PROCESS, "barrier", [], None, process_set, lambda _: None))


def _check_group(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("a grouped operation needs at least one tensor")
