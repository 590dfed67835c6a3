"""`NamedGroup`: the attributes that torch.distributed expects of a process group in Python."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store


class DeviceBackend(Backend):
    """The object that torch finds behind a group's device. It has a name and no collectives: those are the group's
    own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def getBackendName(self) -> str:  # noqa: N802
        """The group's name in torch."""
        return "polytempo"


for _name, _found in vars(Backend).items():  # torch answers them through the subclass, which asks torch: without an end
    if "supports_" in _name and isinstance(_found, property):
        setattr(DeviceBackend, _name, property(lambda _: False))


def _device_backend(rank: int, size: int) -> DeviceBackend | None:
    """Torch 2.15 asks the backend of every device of a group for its hooks. Older versions ask nothing of it, and there
    no backend can be made in Python.
    """
    try:
        return DeviceBackend(rank, size)
    except TypeError:
        return None


class NamedGroup(dist.ProcessGroup):
    """A process group's name, description and deadline. `timeout` limits each wait."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.store = store
        self.set_timeout(timeout)
        self._name = self._description = "undefined"
        custom = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(custom)
        self._behind = _device_backend(rank, size)  # kept: torch holds only its C++ half
        self._register_backend(torch.device("cpu"), custom, self._behind)

    def getBackendName(self) -> str:  # noqa: N802
        """The group's name in torch."""
        return "polytempo"

    def name(self) -> str:
        """The group's name in torch."""
        return "polytempo"

    @property
    def group_name(self) -> str:
        """The name that torch gave it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch gave it."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch."""
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description that torch gives."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of each wait from now on."""
        self.timeout, self._timeout_s = timeout, timeout.total_seconds()
