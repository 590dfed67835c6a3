"""Parameters, optimizer states and Python values from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from polytempo.horovod.plain_values import decoded, encoded
from polytempo.horovod.torch.basics import rank
from polytempo.horovod.torch.collectives import allgather_async, broadcast_async_
from polytempo.horovod.torch.handles import synchronize
from polytempo.horovod.torch.process_state import ProcessSet, global_process_set
from polytempo.training.checkpoint.optimizer_state import load_exactly

_VALUE, _ERROR = 0, 1


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any] | Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters in place by rank `root_rank`'s: `model.state_dict()` or `model.named_parameters()`.

    A list of tensors will do, such as `list(model.parameters())`: they are matched by their order. Errors: ValueError
    for something else.
    """
    pairs = sorted(params.items()) if isinstance(params, Mapping) else params
    if isinstance(pairs, Tensor | str) or not isinstance(pairs, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}; give a state_dict or named_parameters()")
    handles = []
    for pair in pairs:
        if isinstance(pair, Tensor):
            handles.append(broadcast_async_(pair, root_rank, None, process_set))
            continue
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f"params has {type(pair)} where a name and a tensor are needed; give named_parameters()")
        name, tensor = pair
        if isinstance(tensor, Tensor):
            handles.append(broadcast_async_(tensor, root_rank, f"parameter.{name}", process_set))
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the state and the options (learning rates, …) of rank `root_rank`'s optimizer.

    An optimizer without state gets gradients of zeros, as Horovod gives it; embeddings of `model` with sparse gradients
    get none. LBFGS's history travels, too, which Horovod refuses.
    """
    if not optimizer.state and not isinstance(optimizer, SparseAdam):
        sparse = {layer.weight for layer in model.modules() if getattr(layer, "sparse", False)} if model else set()
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and parameter.grad is None and parameter not in sparse:
                parameter.grad = torch.zeros_like(parameter)
    mine = optimizer.state_dict() if rank() == root_rank else None
    state = broadcast_object(mine, root_rank, "optimizer_state", process_set)
    if rank() != root_rank:
        load_exactly(optimizer, state)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank `root_rank`'s value, on every rank: plain values, tensors and NumPy arrays (`horovod.plain_values`).

    Errors: TypeError, on every rank, for values that would need pickle.
    """
    label, is_root = name or "object", rank() == root_rank
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    synchronize(broadcast_async_(size, root_rank, f"object_size.{label}", process_set))
    if not is_root:
        data = torch.empty(int(size), dtype=torch.uint8)
    synchronize(broadcast_async_(data, root_rank, f"object.{label}", process_set))
    value = _unpacked(data, root_rank)
    return obj if is_root else value


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` with its other arguments filled in."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """All ranks' values, by rank of the set. Values and errors are the same as in `broadcast_object`."""
    label = name or "object"
    data = _packed(obj)
    sizes = synchronize(allgather_async(torch.tensor([data.numel()]), f"object_sizes.{label}", process_set)).tolist()
    whole: Tensor = synchronize(allgather_async(data, f"objects.{label}", process_set))
    return [_unpacked(part, place) for place, part in enumerate(whole.split(sizes))]


def _packed(value: Any) -> Tensor:
    """A byte that says whether it is a value or why it cannot be one, and its encoding."""
    try:
        return _bytes(bytes([_VALUE]) + encoded(value))
    except (TypeError, ValueError) as error:
        return _bytes(bytes([_ERROR]) + str(error).encode())


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(data: Tensor, source: int) -> Any:
    kind, rest = int(data[0]), data[1:].numpy().tobytes()
    if kind == _ERROR:
        raise TypeError(f"rank {source}: {rest.decode()}")
    return decoded(rest)
