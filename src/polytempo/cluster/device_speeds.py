"""`DeviceSpeeds`: the device that a host's workers compute on, as `polytempo calibrate --device` measured it.

    gradients ──"to host"──▶ pinned memory ──▶ sum or message of the host ──▶ pinned memory ──"from host"──▶ device

Kernels have the names of the host's, and four more for copies: "to host", "from host" (pinned memory), "to host
pageable", "from host pageable".
"""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.cluster.collective_link import CollectiveLink
from polytempo.cluster.computing_time import Speeds

TO_HOST, FROM_HOST = "to host", "from host"
"""Kernels of copies through pinned memory."""
PAGEABLE = " pageable"
"""Behind these names: copies through the host's other memory."""


@dataclass(frozen=True)
class DeviceSpeeds:
    """The devices of a host, all alike."""

    kind: str
    """Torch's name of the kind, such as cuda."""
    name: str
    """The device's own name."""
    speeds: Speeds
    """Kernels, while `workers` processes computed, and paces of jobs on the device."""
    memory_bytes: int
    """Memory of one device; 0: not known."""
    devices: int
    """Devices of a host."""
    workers: int
    """Processes of a host that measured together, and shared its devices round robin."""
    backend: str = ""
    """Torch's group between devices, as nccl; "": none."""
    collectives: tuple[tuple[str, CollectiveLink], ...] = ()
    """Rates of `backend`'s collectives, by place and kind as `Cluster.collectives`, where each process had a device of
    its own. Kinds that are not named take the host's."""

    def __post_init__(self) -> None:
        """Raise ValueError without a device, or without a process that measured."""
        if self.devices < 1 or self.workers < 1 or self.memory_bytes < 0:
            raise ValueError(
                f"a host has devices >= 1 of memory_bytes >= 0, measured by workers >= 1, got {self.devices}, "
                f"{self.memory_bytes} and {self.workers}"
            )

    def ranks_of_each(self, workers: int) -> int:
        """The most workers of a host that share one device, of so many on the host."""
        return -(-workers // self.devices)

    def staged(self, workers: int) -> bool:
        """True if tensors go to other workers through the host's memory, with so many workers on a host."""
        return not self.backend or self.ranks_of_each(workers) > 1

    def memory_of_each(self, workers: int) -> float | None:
        """Bytes of each of so many workers of a host, if they share the devices' memory equally; None: not known."""
        return self.memory_bytes / self.ranks_of_each(workers) if self.memory_bytes else None
