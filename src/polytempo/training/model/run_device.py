"""`run_device`: the device that a run's process computes on."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refusal_of, refuse
from polytempo.data.mover import BatchMover
from polytempo.spec.run_options import RunOptions

T = TypeVar("T")
CPU = torch.device("cpu")


def run_device(options: RunOptions, strategy: Strategy) -> torch.device:
    """The device of this process for `options.device`, with its number.

    "auto" is the accelerator of this process where there is one, except for strategies and options that need the
    memory of the host. A device without a number is the process's current one, which `pt.init` sets by the rank on its
    host. Errors: ValueError for a device that is not there.
    """
    asked = options.device
    if asked == "cpu":
        return CPU
    found = torch.accelerator.current_accelerator(check_available=True)
    if asked == "auto" and (found is None or not suits_device(options, strategy)):
        return CPU
    kind, _, number = asked.partition(":")
    if found is None or (kind not in ("auto", found.type)):
        has = "no accelerator" if found is None else f"{torch.accelerator.device_count()} of {found.type}"
        raise ValueError(f"device={asked} is not here: torch sees {has}; give device=auto, cpu, or what is there")
    count = torch.accelerator.device_count()
    if number and int(number) >= count:
        raise ValueError(f"device={asked} is not here: there are {count}, numbered from 0; give one of these")
    return torch.device(found.type, int(number) if number else torch.accelerator.current_device_index())


def suits_device(options: RunOptions, strategy: Strategy) -> bool:
    """False for features that are the CPU's alone: "auto" is then the CPU, and another device is refused."""
    more = {"device"} | ({"threads"} if options.inter_threads > 1 else set())
    row = refusal_of(strategy.features | more)
    return row is None or "device" not in row.features


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), CPU)


def beside(model: nn.Module, batch: T) -> T:
    """The batch on the model's device."""
    moved: T = BatchMover(device_of(model)).moved(batch)
    return moved


def synchronize(device: torch.device) -> None:
    """Wait for the computations of `device`, before a clock is read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def num_devices(options: RunOptions, strategy: Strategy) -> int:
    """The number of devices that the workers of this host share; 0 if they compute on the CPU."""
    if run_device(options, strategy).type == "cpu":
        return 0
    return 1 if ":" in options.device else torch.accelerator.device_count()


def check_fork(options: RunOptions, strategy: Strategy) -> None:
    """`Incompatible` if workers of a run on a device were forked from this process, which has used it."""
    used = options.device != "cpu" and suits_device(options, strategy) and is_in_use()
    found = torch.accelerator.current_accelerator() if used else None
    refuse({"forked", *(["device in use"] if used else [])}, device=found)


def is_in_use() -> bool:
    """True if this process has begun to use an accelerator."""
    found = torch.accelerator.current_accelerator()
    return found is not None and bool(torch.get_device_module(found.type).is_initialized())
