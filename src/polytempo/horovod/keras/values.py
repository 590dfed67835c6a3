"""Values of Keras from all ranks to all: variables, tensors, arrays and numbers. Answers are tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polytempo.horovod.torch import functions, operations
from polytempo.horovod.torch.collectives import Average, Sum
from polytempo.horovod.torch.compression import AnyCompression, Compression


def _tensor(value: Any) -> Tensor:
    """A value of the caller, without gradients; a variable of Keras has its tensor as `value`."""
    return torch.as_tensor(getattr(value, "value", value)).detach()


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: AnyCompression = Compression.none,
) -> Tensor:
    """The mean of all ranks' values, or with `average=False` their sum. `op`: any operation, instead of `average`."""
    chosen = op if op is not None else Average if average else Sum
    return operations.allreduce(_tensor(value), None, name, compression, chosen, prescale_factor, postscale_factor)


def allgather(value: Any, name: str | None = None) -> Tensor:
    """All ranks' values, concatenated along the first dimension."""
    return operations.allgather(_tensor(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Tensor:
    """Rank `root_rank`'s value, on every rank."""
    return operations.broadcast(_tensor(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Tensor:
    """This rank's rows of the mean of all ranks' values."""
    return operations.reducescatter(_tensor(value), name, op=op)


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Overwrite variables of Keras, such as `model.weights`, by rank `root_rank`'s. They are matched by their order."""
    named = [(f"keras.{place}", _tensor(variable)) for place, variable in enumerate(variables)]
    functions.broadcast_parameters(named, root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: Keras 3 has no list of all variables. Horovod does the same without a TensorFlow session."""
    raise RuntimeError(
        f"Keras 3 has no global variables; call broadcast_variables(model.weights, root_rank={root_rank}), or give fit "
        f"callbacks.BroadcastGlobalVariablesCallback({root_rank})"
    )
