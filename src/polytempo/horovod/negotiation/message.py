"""Messages between ranks and the coordinator of a negotiation, as plain data.

rank ──Submission──▶ coordinator      its requests: bits for cached ones, whole messages for others
     ──Farewell────▶                  it shuts down
     ◀─Verdicts────                   to all ranks the same, numbered from 1: the operations and their order
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal[
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add_set", "remove_set"
]

WHOLE = 0
"""The process set of all ranks."""


class TensorRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request of one rank under a name. A grouped operation is one request with several tensors."""

    name: str
    kind: Kind
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    """Of a reduction: "sum", "average", "min", "max", "product" or "adasum"."""
    root: int = -1
    """The root's rank in the world, for a broadcast."""
    process_set: int = WHOLE
    prescale: float = 1.0
    postscale: float = 1.0
    numbers: tuple[int, ...] = ()
    """This rank's splits of an "alltoall"; the ranks of "add_set"; the process set of "remove_set"."""
    codec: str = ""
    """The codec of an all-reduce's tensors; "": none."""
    lasting: bool = True
    """True if the name will come again, so that it deserves a place in the cache."""
    device: str = "cpu"
    """Where the tensors are: "cpu", or the kind of an accelerator."""

    @property
    def key(self) -> tuple[int, str]:
        """The key that matches requests."""
        return self.process_set, self.name


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """A request that all ranks of its process set have made: all that a rank needs to take part in it."""

    request: TensorRequest
    """The request of the lowest rank, without its `numbers`."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """The first dimensions of an "allgather", or the splits of an "alltoall", by rank of the set. Of "join" the last
    rank, of "add_set" the new set's number."""
    slot: int = -1
    """The place in every rank's cache from now on; -1: none."""


class Perform(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Perform these in one operation. A number is a slot of the cache."""

    entries: tuple[int | Agreement, ...]


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The ranks of the set have made different or impossible requests: an error on each of them."""

    process_set: int
    name: str
    reason: str


class Evict(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Slots of the cache that are free now."""

    slots: tuple[int, ...]


class Conclude(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The negotiation is over: all that is asked for is an error."""

    reason: str


class Tune(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """New settings for all ranks: they gather names for so long, and so many bytes become one."""

    fusion_bytes: int
    cycle_s: float


Verdict = Perform | Refuse | Evict | Conclude | Tune


class Verdicts(msgspec.Struct, frozen=True, array_like=True):
    """Verdicts in their order, and how many such messages there have been with this one."""

    number: int
    verdicts: tuple[Verdict, ...]


class Submission(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The requests of a rank."""

    seen: int
    """The last number of `Verdicts` that the rank has seen."""
    bits: bytes = b""
    """Slots of the cached requests that the rank makes again, as a little-endian bit vector."""
    requests: tuple[TensorRequest, ...] = ()


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The rank shuts down."""

    reason: str


Word = Submission | Farewell
"""A message of a rank."""
