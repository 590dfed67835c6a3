"""What workers of a host say to each other where their gradients are summed before they are pushed."""

from __future__ import annotations

from torch import Tensor

from polytempo.server.message import Message


class Offer(Message, frozen=True, eq=False):
    """From a worker to the one that leads its host: a gradient to be pushed within the host's sum.

    It is lent until the push is answered. `sequences`, `bases`: of the request to each shard.
    """

    worker: int
    incarnation: int
    layout: int
    sequences: tuple[int, ...]
    clock: int
    bases: tuple[int, ...]
    samples: int
    lrs: tuple[float, ...]
    tickets: tuple[int, ...]
    gradient: Tensor
    """Flat: of all shards."""
    running: Tensor | None = None


class Presence(Message, frozen=True, eq=False):
    """From a worker to the others of its host: whether it takes part in their pushes. An offer before it is void."""

    worker: int
    incarnation: int
    present: bool
