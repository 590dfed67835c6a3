"""The device of a calibrating process: its facts, and samples of its kernels and of copies between host and device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from polytempo.cluster.computing_time import KernelSpeed, Speeds
from polytempo.cluster.device_speeds import FROM_HOST, PAGEABLE, TO_HOST, DeviceSpeeds
from polytempo.cluster.fit import Sample
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.device import (
    accelerator_kind,
    backend_of,
    device_name,
    device_number,
    num_devices,
    total_memory,
    use_device,
)
from polytempo.runs.calibration.kernel_samples import around, on_device, operators, transforms

_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Bytes of the copies."""
_REPEATS = 7


def device_answer(asked: str, local: int) -> dict[str, Any] | None:
    """This process's measurements of the device `asked`, as plain data; None on the host. "auto": a device if torch
    sees one. `local`: the number of this process on its host.

    Processes that share a device measure at the same time, so each has a part of it, as in training.
    Errors: ValueError for a device that is not here.
    """
    if asked == "cpu" or (asked == "auto" and accelerator_kind() is None):
        return None
    use_device(device_number(asked, local))
    device = torch.device(accelerator_kind() or asked, torch.accelerator.current_device_index())
    where = on_device(device)
    samples = [*operators(where), *transforms(where), *around(where), *copies(device)]
    return {
        "kind": device.type,
        "name": device_name(device),
        "memory_bytes": total_memory(device),
        "devices": 1 if ":" in asked else num_devices(),
        "backend": backend_of(device.type) or "",
        "samples": [([list(use) for use in sample.uses], sample.seconds) for sample in samples],
    }


def copies(device: torch.device) -> Iterator[Sample]:
    """Samples of copies to the host and from it, through pinned memory and through other memory."""
    clock = on_device(device).clock
    for num_bytes in _SIZES:
        there = torch.zeros(num_bytes // 4, device=device)
        for pinned in (True, False):
            here = torch.zeros(num_bytes // 4, pin_memory=pinned)
            for name, target, source in ((TO_HOST, here, there), (FROM_HOST, there, here)):
                taken = []
                for _ in range(_REPEATS + 1):
                    begin_s = clock()
                    target.copy_(source, non_blocking=pinned)
                    taken.append(clock() - begin_s)
                kernel = name if pinned else name + PAGEABLE
                yield Sample((KernelUse(kernel, 1, num_bytes),), median(taken[1:]))


def assembled_device(told: Sequence[dict[str, Any]], workers: int, kernels: dict[str, KernelSpeed]) -> DeviceSpeeds:
    """The devices of all processes' answers, with `kernels`. `workers`: processes of a host.

    Errors: ValueError where hosts have other devices.
    """
    names = sorted({str(each["name"]) for each in told})
    if len(names) > 1:
        raise ValueError(f"hosts have different devices, {', '.join(names)}; calibrate hosts of one kind together")
    first, speeds = told[0], Speeds(tuple(sorted(kernels.items())))
    facts = {key: first[key] for key in ("memory_bytes", "devices", "backend")}
    return DeviceSpeeds(kind=first["kind"], name=first["name"], speeds=speeds, workers=workers, **facts)
