"""Tensors on devices in a group of host processes.

A group with one device for each rank hands them to torch's backend between devices, as NCCL. Otherwise (several ranks
on one device, or a kind without such a backend) they travel through the host:

device        computing stream    … backward │ given              ┌─ waits for nothing: the work is over
              copying stream                 └─▶ copy ─┐       ┌─ copy back ─┘
pinned memory                                          ▼       │
host          the group's lane, or a waiting caller    └─ sum ─┘

The copies run beside the computing stream, and the group's thread waits for them, so backward goes on. Cost for K
bytes: K to the host, the host's collective, K back, and pinned memory of K bytes until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from polytempo.device import HostCopy, copied_back, is_host, pinned_like
from polytempo.interop.backend.work import Lane, Waited


class Operands:
    """The host's tensors for the tensors of one collective: themselves."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """The host's tensor for `tensor`."""
        return tensor

    def arrive(self) -> None:
        """Wait until the host may read them."""

    def leave(self) -> None:
        """Give the results back."""


class StagedOperands(Operands):
    """Copies in pinned memory of the tensors that a collective reads, and memory for its results."""

    def __init__(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self._reads, self._writes = reads, writes
        dense = [tensor for tensor in reads if tensor.layout is torch.strided]
        self._copy = HostCopy(dense, (*reads, *writes)[0].device)
        self._host = {id(tensor): copy for tensor, copy in zip(dense, self._copy.tensors, strict=True)}
        for tensor in (*reads, *writes):
            if id(tensor) not in self._host:
                strided = tensor.layout is torch.strided
                self._host[id(tensor)] = pinned_like(tensor) if strided else tensor.cpu()

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor's copy, or the memory for it."""
        return self._host[id(tensor)]

    def arrive(self) -> None:
        """Wait for the copies."""
        self._copy.wait()

    def leave(self) -> None:
        """Copy the results to the device, and wait for that."""
        if self._writes:
            copied_back([self(tensor) for tensor in self._writes], self._writes).synchronize()


_HOST = Operands()


def placed(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Operands:
    """The place of a collective that reads and writes these tensors, all on one device or on the host."""
    every = (*reads, *writes)
    return _HOST if not every or is_host(every[0]) else StagedOperands(reads, writes)


class StagedSend(Waited):
    """A message from a device. `begin` sends its copy; `departures` keeps the messages in the order of their sends."""

    def __init__(self, departures: Lane, tensor: Tensor, begin: Callable[[Tensor], Work]) -> None:
        super().__init__()
        self._copy, self._begin = HostCopy([tensor]), begin
        self._work: Any = None
        self._departed: Any = departures.issue(self._depart, [tensor], blocking=False)

    def _depart(self) -> None:
        (copy,) = self._copy.wait()
        self._work = self._begin(copy)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is sent."""
        self._departed.wait()
        return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def is_completed(self) -> bool:
        """True once it is done."""
        if not self._departed.is_completed():
            return False
        return self._work is None or bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        """The error, if it failed."""
        found: BaseException | None = self._departed.exception()
        return found if self._work is None else self._work.exception()


class StagedReceive(Waited):
    """A message for a device: `begin` receives it into pinned memory."""

    def __init__(self, tensor: Tensor, begin: Callable[[Tensor], Work]) -> None:
        super().__init__()
        self._tensor, self._here = tensor, pinned_like(tensor)
        self._work: Any = begin(self._here)
        self._is_over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is here, and on its way to the device in the order of this thread's work."""
        if not self._is_over:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
            self._tensor.copy_(self._here, non_blocking=True)
            self._is_over = True
        return True

    def is_completed(self) -> bool:
        """True once it is done, and once it is here: the rest does not wait."""
        return self._is_over or bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        """The error, if it failed."""
        found: BaseException | None = self._work.exception()
        return found

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


def sent(departures: Lane, tensor: Tensor, begin: Callable[..., Work], to: int, tag: int) -> Work:
    """Send a tensor, from a device as soon as its copy is there."""
    if is_host(tensor):
        return begin(tensor.contiguous(), to, tag)
    return StagedSend(departures, tensor, partial(begin, to=to, tag=tag))


def received(tensor: Tensor, begin: Callable[..., Work], source: int, tag: int) -> Work:
    """Receive into a tensor of the host or of a device."""
    if is_host(tensor):
        return begin(tensor, source, tag)
    return StagedReceive(tensor, partial(begin, source=source, tag=tag))
