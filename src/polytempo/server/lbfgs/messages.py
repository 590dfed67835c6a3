"""The messages of a Sandblaster run.

    coordinator ──Operate, Open──▶ every shard        ◀─Answered─
                ──PortionTask──▶ replica                  ◀─PortionDone─
    replica     ──Fetch──▶ every shard                ◀─Fetched─
                ──Contribute──▶ every shard           ◀─Contributed─

A *point* is the number of an evaluation of loss and gradient; a *portion* is a part of its samples.
"""

from __future__ import annotations

from torch import Tensor

from polytempo.server.message import Message

FINAL = -1
"""As a point: the present parameters, which the launcher fetches at the end."""


class Operate(Message, frozen=True, eq=False):
    """An operation on vectors: see `operations.VectorOperation`. Only a dot product is answered."""

    kind: str
    out: str
    a: str
    b: str
    factor: float


class Open(Message, frozen=True, eq=False):
    """The vector `at` is point `point`; gradients there are added up in the vector `into`, which begins at 0."""

    point: int
    at: str
    into: str


class Answered(Message, frozen=True, eq=False):
    """A shard's part of a dot product; 0 after `Open`."""

    value: float


class PortionTask(Message, frozen=True, eq=False):
    """Message to a replica: compute loss and gradient of the samples from `begin` to `end`."""

    point: int
    portion: int
    begin: int
    end: int


class PortionDone(Message, frozen=True, eq=False):
    """Every shard has the portion's gradient; its loss is a part of the whole loss."""

    point: int
    portion: int
    loss: float


class Fetch(Message, frozen=True, eq=False):
    """Asks for the shard's part of a point."""

    point: int


class Fetched(Message, frozen=True, eq=False):
    """The shard's part of a point, float64."""

    point: int
    values: Tensor


class Contribute(Message, frozen=True, eq=False):
    """A portion's gradient, as far as it is the shard's."""

    point: int
    portion: int
    gradient: Tensor


class Contributed(Message, frozen=True, eq=False):
    """The shard has it, from this replica or another one."""

    point: int
    portion: int


class RunOver(Message, frozen=True, eq=False):
    """The run is over."""
