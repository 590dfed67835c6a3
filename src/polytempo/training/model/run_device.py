"""`run_device`: the device that a run's process computes on."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refusal_of
from polytempo.data.mover import BatchMover
from polytempo.device import HOST, accelerator_kind, device_number, num_devices, use_device
from polytempo.spec.job import Job
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

T = TypeVar("T")


def run_device(options: RunOptions, strategy: Strategy, local: int | None = None) -> torch.device:
    """The device of this process for `options.device`, with its number.

    "auto" is the accelerator of this process where there is one, except for strategies and options that need the
    memory of the host. Processes of one host share its devices round robin: `local` is the number of this one, and
    its device becomes the current one; None: it is that already (`pt.init` sets it by the rank on its host).

    Errors: ValueError for a device that is not there.
    """
    asked = options.device
    if asked == "cpu":
        return HOST
    found = accelerator_kind()
    if asked == "auto" and (found is None or not suits_device(options, strategy)):
        return HOST
    number = device_number(asked, local or 0)
    if ":" in asked or local is not None:
        use_device(number)
    return torch.device(accelerator_kind() or HOST.type, torch.accelerator.current_device_index())


def suits_device(options: RunOptions, strategy: Strategy) -> bool:
    """False for features that are the CPU's alone: "auto" is then the CPU, and another device is refused."""
    more = {"device"} | ({"threads"} if options.inter_threads > 1 else set())
    row = refusal_of(strategy.features | more)
    return row is None or "device" not in row.features


def may_use_device(options: RunOptions, strategy: Strategy) -> bool:
    """False for runs that compute on the host, also where there is a device."""
    return options.device != HOST.type and suits_device(options, strategy)


def on_device(spec: RunSpec, device: torch.device) -> RunSpec:
    """The run with a loss on `device`."""
    job = with_loss_on(spec.job, device)
    return spec if job is spec.job else replace(spec, job=job)


def with_loss_on(job: Job, device: torch.device) -> Job:
    """The job with a loss on `device`: a copy, if it has tensors such as weights of classes.

    These are found in modules, and among the arguments of `functools.partial`.
    """
    loss = _copied(job.loss, device)
    return job if loss is job.loss else replace(job, loss=loss)


def _copied(part: Any, device: torch.device) -> Any:
    """`part` with its tensors on `device`; itself where it has none."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, nn.Module) and [*part.parameters(), *part.buffers()]:
        return deepcopy(part).to(device)
    if isinstance(part, partial):
        before = [part.func, *part.args, *part.keywords.values()]
        after = [_copied(each, device) for each in before]
        if any(there is not here for there, here in zip(after, before, strict=True)):
            func, args, values = after[0], after[1 : len(part.args) + 1], after[len(part.args) + 1 :]
            return partial(func, *args, **dict(zip(part.keywords, values, strict=True)))
    return part


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), HOST)


def beside(model: nn.Module, batch: T) -> T:
    """The batch on the model's device, which may be "meta"."""
    device = device_of(model)
    moved: T = tree_map_only(Tensor, _sizes, batch) if device.type == "meta" else BatchMover(device).moved(batch)
    return moved


def _sizes(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def synchronize(device: torch.device) -> None:
    """Wait for the computations of `device`, before a clock is read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def devices_of(options: RunOptions, strategy: Strategy) -> int:
    """The number of devices that the workers of this host share; 0 if they compute on the CPU."""
    if run_device(options, strategy).type == "cpu":
        return 0
    return 1 if ":" in options.device else num_devices()
