"""The state of an optimizer, and of its schedule, as tensors and plain numbers, to send and save without pickle."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import Port
from polytempo.core.state import Saved
from polytempo.spec.rates.schedules import has_ended
from polytempo.spec.text.plain_values import plain, typed

_LENGTHS = ("run_steps", "in_epochs")
_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Entries of parameter groups that torch's schedules make."""


def optimizer_saved(optimizer: Optimizer, path: str = "optimizer") -> Saved:
    """The state's tensors as `path/<parameter>/<key>`, and everything else as one JSON text at `path`.

    Raises ValueError that names a hyper-parameter or state which JSON cannot hold.
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        if not isinstance(index, int):
            raise ValueError(f"{_named(optimizer)} keeps state under {index!r}; only state of parameters can be saved")
        numbers[str(index)] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{path}/{index}/{key}"] = value
            else:
                numbers[str(index)][key] = plain(value, f"{_named(optimizer)}: state {key!r} of parameter {index}")
    groups = [
        {key: plain(value, f"{_named(optimizer)}: {key!r} of parameter group {i}") for key, value in group.items()}
        for i, group in enumerate(state["param_groups"])
    ]
    return Saved(tensors, {path: json.dumps({"groups": groups, "numbers": numbers})})


def optimizer_restore(optimizer: Optimizer, source: Saved, path: str = "optimizer") -> None:
    """Load a result of `optimizer_saved`. Hyper-parameters that are tuples or tensors now stay tuples or tensors."""
    text = source.scalars.get(path)
    if not isinstance(text, str):
        raise ValueError(f"no optimizer state under {path!r}")
    described = json.loads(text)
    now = optimizer.state_dict()
    if [len(g["params"]) for g in described["groups"]] != [len(g["params"]) for g in now["param_groups"]]:
        raise ValueError(
            "the saved optimizer has other parameter groups than this one; give this one the same parameters, in the "
            "same groups"
        )
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in described["numbers"].items()}
    for name, tensor in source.tensors.items():
        if name.startswith(f"{path}/"):
            _, index, key = name.rsplit("/", 2)
            state.setdefault(int(index), {})[key] = tensor
    groups = [
        {key: typed(value, old.get(key)) for key, value in group.items()}
        for group, old in zip(described["groups"], now["param_groups"], strict=True)
    ]
    load_exactly(optimizer, {"state": state, "param_groups": groups})


def load_exactly(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state)` with every value as it was saved.

    Torch alone rounds tensors to their parameter's dtype, also tensors that an optimizer keeps in another (NAdam's
    product of momenta in float32), and makes other texts of texts.
    """
    optimizer.load_state_dict(dict(state))
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        given, own = state["state"].get(index), optimizer.state.get(parameter)
        if isinstance(given, dict) and isinstance(own, dict):
            own.update({key: _as_given(value, own[key]) for key, value in given.items() if key in own})


def _as_given(given: Any, loaded: Any) -> Any:
    """`loaded`, without the changes that loading has made."""
    if isinstance(given, Tensor) and isinstance(loaded, Tensor):
        return loaded if given.dtype == loaded.dtype else given.to(loaded.device)
    if isinstance(given, dict) and isinstance(loaded, dict):
        return {key: _as_given(value, loaded[key]) for key, value in given.items()}
    if isinstance(given, list | tuple) and isinstance(loaded, list | tuple):
        return type(given)(map(_as_given, given, loaded))
    return given


async def broadcast_optimizer(
    port: Port, optimizer: Optimizer, *, source: int = 0, into: frozenset[int] | None = None
) -> None:
    """Give the optimizer state of `source` to the ranks in `into` (None: to all); they may not have any yet.

    Hyper-parameters too.
    """
    mine = optimizer_saved(optimizer)
    layout = {
        name: [list(t.shape), str(t.dtype).removeprefix("torch."), t.device.type] for name, t in mine.tensors.items()
    }
    about = json.dumps({"text": mine.scalars["optimizer"], "layout": layout}).encode()
    length = int(await port.broadcast(torch.tensor([len(about)]), source))
    text = torch.zeros(length, dtype=torch.uint8)
    if port.rank == source:
        text = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    described = json.loads(bytes((await port.broadcast(text, source)).tolist()))
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype, device_type) in described["layout"].items():
        if port.rank == source:
            # Transports send raw memory: strides other than a fresh tensor's would arrive as a permutation.
            given = mine.tensors[name].detach().clone(memory_format=torch.contiguous_format)
        else:
            device = state_device(optimizer, name, device_type)
            given = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        tensors[name] = await port.broadcast(given, source)
    if port.rank != source and (into is None or port.rank in into):
        optimizer_restore(optimizer, Saved(tensors, {"optimizer": described["text"]}))


def state_device(optimizer: Optimizer, name: str, device_type: str) -> torch.device:
    """The device of state `name` (`path/<parameter>/<key>`) on this rank if it is on a `device_type` elsewhere.

    State on the CPU, as some optimizers' step counters, stays there; other state goes where the parameter is.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    place: torch.device = parameters[int(name.rsplit("/", 2)[1])].device
    return place


def steps_each_by_itself(optimizer: Optimizer) -> bool:
    """True if a step treats each parameter alone, calls nothing, and skips parameters without a gradient."""
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "polytempo.")) and not isinstance(
        optimizer, LBFGS
    )


def plain_step(optimizer: Optimizer) -> None:
    """The optimizer's own step, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


@torch.no_grad()
def begin_states(
    optimizer: Optimizer,
    unused: Mapping[nn.Parameter, torch.layout],
    in_float32: Callable[[], AbstractContextManager[None]],
) -> None:
    """Give parameters that no step has used the state that they have before their first one.

    `unused`: these, each with the layout of its gradients. A step by zeros makes the state, with no weight decay and
    uncounted; parameters stay as they are.
    """
    groups = optimizer.param_groups
    held = [(p, p.grad) for group in groups for p in group["params"]]
    decays = [group.get("weight_decay") for group in groups]
    for parameter, _ in held:
        parameter.grad = None
    for group in groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    try:
        with in_float32():
            values = [parameter.clone() for parameter in unused]
            for parameter, layout in unused.items():
                parameter.grad = torch.zeros_like(parameter, layout=layout)
            plain_step(optimizer)
            torch._foreach_copy_(list(unused), values)
            for parameter in unused:
                parameter.grad = None
    finally:
        for group, decay in zip(groups, decays, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = decay
        for parameter, gradient in held:
            parameter.grad = gradient
    for parameter in unused:
        state = optimizer.state.get(parameter, {})
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0


def _named(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def moments(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state tensors, as `name|key`, of any dtype and shape.

    Counts of steps and other single numbers, the same on all ranks, are none of them. Raises ValueError for state that
    has no mean: codes, and lists of tensors.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and (key == "step" or (value.ndim == 0 and parameter.ndim)):
                continue
            if isinstance(value, Tensor) and value.is_floating_point():
                found[f"{name}|{key}"] = value
            elif isinstance(value, Tensor | list):
                what = str(value.dtype) if isinstance(value, Tensor) else "a list"
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} as {what}, and these have no mean; use "
                    "parameter_averaging(optimizer_state=False), or an optimizer with a state of floating-point tensors"
                )
    return found


def schedule_saved(scheduler: LRScheduler) -> str:
    """A schedule's state as JSON. Raises ValueError that names a value that JSON cannot hold."""
    return json.dumps(
        {key: plain(value, f"{type(scheduler).__name__}: {key!r}") for key, value in scheduler.state_dict().items()}
    )


def schedule_restore(scheduler: LRScheduler, text: str, step: int | None = None) -> None:
    """Load the result of `schedule_saved` into a schedule that was made alike.

    Where the run has another length, epochs of other steps, or another place, a schedule of lengths is stepped from its
    beginning to `step`, or to the step of the saved one.
    """
    saved, present = json.loads(text), scheduler.state_dict()
    lengths = [saved.get(name) for name in _LENGTHS]
    is_there = lengths == [None, None] or step is None or abs(saved["last_epoch"] - step) <= 1  # held in the last step
    if lengths == [present.get(name) for name in _LENGTHS] and is_there:
        scheduler.load_state_dict(typed(saved, present))
        return
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    schedule_forward(scheduler, saved["last_epoch"] if step is None else step)


def schedule_forward(scheduler: LRScheduler, step: int) -> None:
    """Step a schedule to where it is after `step` steps, or to its end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before", UserWarning)
        while scheduler.last_epoch < step and not has_ended(scheduler):
            scheduler.step()


def schedule_begun(optimizer: Optimizer, first: Sequence[Mapping[str, Any]]) -> None:
    """Give the optimizer the numbers `first` that its groups had before a schedule, and no others of schedules."""
    for group, numbers in zip(optimizer.param_groups, first, strict=True):
        for key in _OF_SCHEDULES:
            group.pop(key, None)
        for key, value in numbers.items():
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = typed(value, group[key])
