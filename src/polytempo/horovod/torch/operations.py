"""Horovod's collectives, waited for, with gradients where a tensor requires them.

Gradients are defined as in Horovod, g being the gradient of the result and N the number of ranks:

    allreduce       op(g) with the same operation and factors; of Sum and Average
    allgather       this rank's rows of Average(g)
    broadcast       Average(g) on the root, 0 elsewhere
    alltoall        g, dealt back
    reducescatter   allgather(g) for Average, N · allgather(g) for Sum
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polytempo.horovod.torch.basics import rank
from polytempo.horovod.torch.collectives import (
    Average,
    ReductionOp,
    Sum,
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    chosen_op,
    encoded_allreduce_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    reducescatter_async,
)
from polytempo.horovod.torch.compression import AnyCompression, CodecCompression, Compression
from polytempo.horovod.torch.handles import synchronize
from polytempo.horovod.torch.process_state import ProcessSet, global_process_set


def _grad_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def _check_differentiable(op: int) -> None:
    if ReductionOp(op) not in (Average, Sum):
        raise ValueError(f"{ReductionOp(op).name} has no gradient here; detach the tensor, or use Average or Sum")


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, factors: tuple[float, float], where: Any, *tensors: Tensor) -> Any:
        ctx.name, ctx.op, ctx.factors, ctx.where = name, op, factors, where
        return tuple(synchronize(grouped_allreduce_async(tensors, None, name, op, *factors, where)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _check_differentiable(ctx.op)
        name = _grad_name(ctx.name)
        return None, None, None, None, *_AllReduce.apply(name, ctx.op, ctx.factors, ctx.where, *grads)  # type: ignore[no-untyped-call]


class _EncodedAllReduce(torch.autograd.Function):
    """A codec's rounding counts as none: the gradient is the sum's or the average's."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, factors: tuple[float, float], where: Any, by: Any, *tensors: Tensor
    ) -> Any:
        ctx.name, ctx.op, ctx.factors, ctx.where = name, op, factors, where
        return tuple(synchronize(encoded_allreduce_async(tensors, name, op, factors, where, by)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        reduced = _AllReduce.apply(_grad_name(ctx.name), ctx.op, ctx.factors, ctx.where, *grads)  # type: ignore[no-untyped-call]
        return None, None, None, None, None, *reduced


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, where: ProcessSet, *tensors: Tensor) -> Any:
        ctx.name, ctx.where, ctx.rows = name, where, [len(tensor) for tensor in tensors]
        gathered = tuple(synchronize(grouped_allgather_async(tensors, name, where)))
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        name = _grad_name(ctx.name)
        reduced = _AllReduce.apply(name, Average, (1.0, 1.0), ctx.where, *grads)  # type: ignore[no-untyped-call]
        rows = torch.tensor([ctx.rows])
        by_rank = synchronize(allgather_async(rows, None if name is None else f"{name}.rows", ctx.where))
        starts = by_rank[: ctx.where.rank()].sum(0).tolist()
        mine = (g.narrow(0, start, rows) for g, start, rows in zip(reduced, starts, ctx.rows, strict=True))
        return None, None, *mine


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None, where: ProcessSet) -> Any:
        ctx.root, ctx.name, ctx.where = root, name, where
        return synchronize(broadcast_async(tensor, root, name, where))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (reduced,) = _AllReduce.apply(_grad_name(ctx.name), Average, (1.0, 1.0), ctx.where, *grads)  # type: ignore[no-untyped-call]
        return (reduced if rank() == ctx.root else torch.zeros_like(reduced)), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, where: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, where))
        ctx.received, ctx.name, ctx.where, ctx.rows = received, name, where, len(tensor)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dealt, _ = _AllToAll.apply(grads[0], ctx.received.tolist(), _grad_name(ctx.name), ctx.where)  # type: ignore[no-untyped-call]
        stayed = dealt.new_zeros((ctx.rows - len(dealt), *dealt.shape[1:]))
        return torch.cat([dealt, stayed]), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, factors: tuple[float, float], where: Any, *tensors: Tensor) -> Any:
        ctx.name, ctx.op, ctx.factors, ctx.where = name, op, factors, where
        return tuple(synchronize(grouped_reducescatter_async(tensors, name, op, where, *factors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _check_differentiable(ctx.op)
        times = ctx.factors[0] * ctx.factors[1] * (ctx.where.size() if ctx.op == Sum else 1)
        scaled = [grad if times == 1.0 else grad * times for grad in grads]
        return None, None, None, None, *_AllGather.apply(_grad_name(ctx.name), ctx.where, *scaled)  # type: ignore[no-untyped-call]


def _needs_gradient(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


# ---------------------------------------------------------------------- reductions


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """postscale · op over ranks of (prescale · tensor), in a new tensor; Average where no `op` is given.

    `compression`: the compressor that the tensor travels through.
    """
    options = (compression, op, prescale_factor, postscale_factor, process_set)
    if _needs_gradient([tensor]) or isinstance(compression, CodecCompression):
        return grouped_allreduce([tensor], average, name, *options)[0]
    sent, context = compression.compress(tensor)
    factors = (prescale_factor, postscale_factor)
    answer: Tensor = synchronize(allreduce_async(sent, average, name, op, *factors, process_set))
    return compression.decompress(answer, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Like `allreduce`, in place, and without gradients."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    answer: Tensor = synchronize(handle)
    return answer


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Several all-reduces as one."""
    chosen, factors = chosen_op(op, average), (prescale_factor, postscale_factor)
    if isinstance(compression, CodecCompression):
        exchange = compression.single()
        return list(_EncodedAllReduce.apply(name, chosen, factors, process_set, exchange, *tensors))  # type: ignore[no-untyped-call]
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent, contexts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if _needs_gradient(sent):
        answers = _AllReduce.apply(name, chosen, factors, process_set, *sent)  # type: ignore[no-untyped-call]
    else:
        answers = synchronize(grouped_allreduce_async(sent, None, name, chosen, *factors, process_set))
    return [compression.decompress(answer, context) for answer, context in zip(answers, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Like `grouped_allreduce`, in place, and without gradients."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    answer: list[Tensor] = synchronize(handle)
    return answer


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction: the first ranks have one more, where they are not equal."""
    options = (name, compression, op, process_set, prescale_factor, postscale_factor)
    if _needs_gradient([tensor]) or isinstance(compression, CodecCompression):
        return grouped_reducescatter([tensor], *options)[0]
    sent, context = compression.compress(tensor)
    handle = reducescatter_async(sent, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(synchronize(handle), context)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Several of them as one."""
    if isinstance(compression, CodecCompression):
        raise ValueError(f"{compression} is for all-reduces; a reducescatter takes Compression.none, fp16 or bf16")
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent, contexts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    factors = (prescale_factor, postscale_factor)
    if _needs_gradient(sent):
        answers = _ReduceScatter.apply(name, op, factors, process_set, *sent)  # type: ignore[no-untyped-call]
    else:
        answers = synchronize(grouped_reducescatter_async(sent, name, op, process_set, *factors))
    return [compression.decompress(answer, context) for answer, context in zip(answers, contexts, strict=True)]


# ---------------------------------------------------------------------- moving tensors


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors, concatenated along the first dimension. Other dimensions are equal."""
    if _needs_gradient([tensor]):
        return grouped_allgather([tensor], name, process_set)[0]
    answer: Tensor = synchronize(allgather_async(tensor, name, process_set))
    return answer


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Several of them as one."""
    if _needs_gradient(tensors):
        return list(_AllGather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]
    answer: list[Tensor] = synchronize(grouped_allgather_async(tensors, name, process_set))
    return answer


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Rank `root_rank`'s tensor, in a new one."""
    if _needs_gradient([tensor]):
        given: Tensor = _Broadcast.apply(tensor, int(root_rank), name, process_set)  # type: ignore[no-untyped-call]
        return given
    answer: Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
    return answer


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Like `broadcast`, in place, and without gradients."""
    answer: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return answer


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows dealt to all ranks; with `splits` the tensor and the received splits, else the tensor (`alltoall_async`)."""
    if not _needs_gradient([tensor]):
        answer: Tensor | tuple[Tensor, Tensor] = synchronize(alltoall_async(tensor, splits, name, process_set))
        return answer
    rows, size = len(tensor), process_set.size()
    given = [rows // size] * size if splits is None and rows % size == 0 else splits
    output, received = _AllToAll.apply(tensor, given, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)
