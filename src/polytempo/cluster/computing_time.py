"""`Speeds`: how long each kernel takes on a processor, as it was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # this is read before torch is loaded
    from polytempo.core.arithmetic.kernel_use import KernelUse

GENERAL = "elementwise"
"""The kernel that stands for kernels without a measurement: it reads and writes memory, element by element."""
EXCHANGE = "exchange"
"""The kernel of an exchange's cost beside its parts: gradients or parameters."""
SERVER_STEP, SERVER_EXCHANGE = "server step", "server exchange"
"""The kernels of a parameter server's cost for a worker in each step, and in each push and pull, beside their parts."""
MESSAGE = "message"
"""The kernel of a rank's processor's work for a message that it receives, beside the link."""
COLLECTIVE = "collective {kind}"
"""The kernel of a collective's own threads on a rank's processor: for each round, and each byte sent."""
_ARGUMENTS = re.compile(r"\([^()]*\)")


class KernelSpeed(NamedTuple):
    """Seconds for each call, byte and operation of one kernel."""

    call_s: float = 0.0
    byte_s: float = 0.0
    flop_s: float = 0.0
    error: float = 0.0
    """The median distance of the measurements from this speed, relative to the measurements."""

    def seconds(self, use: KernelUse) -> float:
        """calls · call_s + num_bytes · byte_s + flops · flop_s."""
        return use.calls * self.call_s + use.num_bytes * self.byte_s + use.flops * self.flop_s


class JobPace(NamedTuple):
    """Measured time of a job's steps, exchanges left out, in multiples of its kernels' time."""

    job: str
    """The job's name."""
    parameters: int
    """Numbers in its model: another model under the same name has none."""
    pace: float
    workers: int = 0
    """Number of workers in the measurement; they may have shared cores."""


@dataclass(frozen=True)
class Speeds:
    """The kernels that were measured, by name, `elementwise` one of them; and the jobs that were."""

    kernels: tuple[tuple[str, KernelSpeed], ...]
    jobs: tuple[JobPace, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError without the kernel that stands for all others."""
        if GENERAL not in self._by_name:
            raise ValueError(f"the speeds of kernels must name {GENERAL!r}, which stands for missing ones")

    def of(self, kernel: str) -> KernelSpeed:
        """The speed of `kernel`; else of the same kernel with other arguments, if measured; else of `elementwise`.

        `encode top_k(ratio=0.1)` takes the speed of `encode top_k(ratio=0.01)` where only that was measured.
        """
        found = self._by_name.get(kernel)
        if found is None:
            found = self._by_name[kernel] = self._families.get(_family(kernel), self._by_name[GENERAL])
        return found

    def with_kernel(self, kernel: str, speed: KernelSpeed) -> Speeds:
        """Replace the speed of `kernel`."""
        return replace(self, kernels=tuple(sorted((dict(self.kernels) | {kernel: speed}).items())))

    def measured(self, kernel: str) -> bool:
        """True if it, or the same kernel with other arguments, was measured."""
        return _family(kernel) in self._families

    def pace(self, job: str, parameters: int, workers: int = 0) -> float:
        """The pace of a job with a model of so many parameters, by as many workers, or the next larger measured number,
        or the largest; 1 without a measurement."""
        found = {each.workers: each.pace for each in self.jobs if each[:2] == (job, parameters)}
        if not found:
            return 1.0
        return found[min((count for count in found if count >= workers), default=max(found))]

    def seconds(self, uses: Iterable[KernelUse]) -> float:
        """One use after the other."""
        return sum(self.of(use.kernel).seconds(use) for use in uses)

    @cached_property
    def _by_name(self) -> dict[str, KernelSpeed]:
        return dict(self.kernels)

    @cached_property
    def _families(self) -> dict[str, KernelSpeed]:
        return {_family(name): speed for name, speed in reversed(self.kernels)}


def _family(kernel: str) -> str:
    """The name without its innermost arguments.

    >>> _family("encode feedback(top_k(ratio=0.01))")
    'encode feedback(top_k)'
    """
    return _ARGUMENTS.sub("", kernel)
