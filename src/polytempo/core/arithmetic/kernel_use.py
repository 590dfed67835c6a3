"""`KernelUse`: a computation's load on a processor, as a vector: launches, bytes through memory, operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class KernelUse(NamedTuple):
    """Calls of one kernel.

        seconds = calls · call_s + num_bytes · byte_s + flops · flop_s

    The three speeds are the kernel's on a cluster that was measured (`cluster.Speeds`). A cluster that is declared has
    one speed for everything, and does not look at this.
    """

    kernel: str
    """`product`, `elementwise`, `encode one_bit()`, `update SGD`."""
    calls: float = 1.0
    num_bytes: float = 0.0
    """Codecs: bytes of the tensor that is encoded; updates: bytes of the parameters; other kernels: read and
    written."""
    flops: float = 0.0

    def times(self, factor: float) -> KernelUse:
        """`factor` of these calls."""
        return KernelUse(self.kernel, self.calls * factor, self.num_bytes * factor, self.flops * factor)


Uses = tuple[KernelUse, ...]
"""The kernels of one computation."""


def together(uses: Iterable[KernelUse]) -> Uses:
    """One use for each kernel, in the order of first occurrence.

    >>> [tuple(use) for use in together([KernelUse("copy", 1, 8), KernelUse("add", 1, 4), KernelUse("copy", 2, 8)])]
    [('copy', 3, 16, 0.0), ('add', 1, 4, 0.0)]
    """
    found: dict[str, KernelUse] = {}
    for use in uses:
        before = found.get(use.kernel)
        found[use.kernel] = (
            use if before is None else KernelUse(use.kernel, *(a + b for a, b in zip(before[1:], use[1:], strict=True)))
        )
    return tuple(found.values())
