"""Every message of the parameter server, as data. Tensors are fields; `wire.frames` sends them as raw frames.

    worker ──Push, Pull──▶ shard (its first copy) ──Replicate──▶ the next copy
           ◀─Pushed, Pulled─                      ◀─Replicated─
    coordinator ──Members, Save, Inquire──▶ every shard           ──View──▶ everybody      ◀─Beat─ everybody
                ◀─Noted, Statistics─                              ◀─Ask─ worker ──Deal──▶
    evaluator ──Show──▶ every copy        ──Scored──▶ coordinator
              ◀─Shown─                    ◀─Heard─

Nodes (who has a mailbox) are numbers: workers from 0, then copies of shards, then the coordinator, then the evaluator.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from torch import Tensor

from polytempo.server.layout import Spans
from polytempo.server.step_rates import StepRates

COORDINATOR = -1
"""Stands where a request names its worker, if the coordinator makes it."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, eq=False):
    """What goes from mailbox to mailbox."""

    HEADER_BYTES: ClassVar[int] = 64

    @property
    def num_bytes(self) -> int:
        """What it costs a link: its tensors and a small header."""
        return self.HEADER_BYTES + sum(_tensor_bytes(getattr(self, name)) for name in self.__struct_fields__)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Rows):
        return value.num_bytes
    if isinstance(value, Message):
        return value.num_bytes - Message.HEADER_BYTES
    if isinstance(value, tuple):
        return sum(_tensor_bytes(part) for part in value)
    return len(value) if isinstance(value, bytes) else 0


class Rows(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Some rows of one table: `rows` (n,) int64, ascending and without repeats, `values` (n, width)."""

    piece: int
    """Which piece of the shard's layout."""
    rows: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """What it costs a link."""
        return _tensor_bytes(self.rows) + _tensor_bytes(self.values)


# ---------------------------------------------------------------------------------- requests: what a shard's log holds


class Request(Message, frozen=True, eq=False):
    """Asked by a worker (or the coordinator) and answered exactly once, however often it is sent.

    A worker's requests to one shard are numbered 1, 2, 3, … and are taken in that order. `incarnation` counts the
    worker's lives; a request from an earlier life is refused.
    """

    worker: int
    incarnation: int
    sequence: int


class Push(Request, frozen=True, eq=False):
    """A gradient for this shard's part of the parameters."""

    clock: int
    basis: int
    samples: int
    lrs: tuple[float, ...]
    """The worker's learning rate of each parameter group."""
    tickets: tuple[int, ...]
    """The batches that it is of; a shard that has them all already drops it."""
    gradient: Tensor
    """Flat: the shard's dense pieces one after the other."""
    rows: tuple[Rows, ...] = ()
    running: Tensor | None = None
    """The running statistics of the worker's norms, float64; None where its model has none."""


class Pull(Request, frozen=True, eq=False):
    """The weights, please. Of tables with rows only what changed after version `basis` (-1: all)."""

    clock: int
    basis: int


class Members(Request, frozen=True, eq=False):
    """From the coordinator: these are the workers (number, incarnation) from now on.

    `resting`: those among them that have no work for now. Rules take them for workers that have left.
    """

    members: tuple[tuple[int, int], ...]
    resting: tuple[int, ...] = ()


class Save(Request, frozen=True, eq=False):
    """From the coordinator: write snapshot `number`, as soon as `at` batches are decided."""

    number: int
    at: int = 0


class Inquire(Request, frozen=True, eq=False):
    """From the coordinator: how are you? Answered with `Statistics`."""


class Lend(Request, frozen=True, eq=False):
    """From the coordinator: show what you hold of `spans`, for another shard takes it over. Answered with `Lent`."""

    spans: Spans


class Reshape(Request, frozen=True, eq=False):
    """From the coordinator, while nobody has anything under way: hold `spans` from now on.

    `pieces` have what you do not hold yet; the rest you have.
    """

    spans: Spans
    pieces: tuple[Lent, ...] = ()


Entry = Push | Pull | Members | Save | Inquire | Lend | Reshape
"""What a shard's log is made of."""


# ---------------------------------------------------------------------------------------------------------- answers


class Reply(Message, frozen=True, eq=False):
    """Answers the request `sequence` of (worker, incarnation) to shard `shard`."""

    shard: int
    worker: int
    incarnation: int
    sequence: int


class Pushed(Reply, frozen=True, eq=False):
    """What became of a push. "applied": in the weights or in the sum. "dropped": not used (late, or had already)."""

    version: int
    """The shard's version afterwards."""
    staleness: int
    verdict: Literal["applied", "dropped", "refused"]
    reason: str = ""
    difference: Tensor | None = None
    """Elastic averaging's d, flat."""


class Pulled(Reply, frozen=True, eq=False):
    """The weights of version `version`, flat (dense pieces), rows of tables, and running statistics of norms."""

    version: int
    values: Tensor
    rows: tuple[Rows, ...] = ()
    running: Tensor | None = None


class Noted(Reply, frozen=True, eq=False):
    """Done as asked (`Members`, `Save`); `what` says more where there is more."""

    what: str = ""


class Statistics(Reply, frozen=True, eq=False):
    """How a shard is: its version, its log's length, how stale gradients were, and which tickets it has applied."""

    version: int
    index: int
    staleness: dict[int, int]
    """τ -> how many gradients."""
    dropped: int
    refused: int
    repeated: int
    tickets: tuple[tuple[int, int], ...]
    """Applied tickets as ranges [first, last]."""


class Lent(Reply, frozen=True, eq=False):
    """A part of a shard's state, lent: the shard keeps it as it is until its own `Reshape` comes."""

    spans: Spans
    likeness: bytes
    """What a new shard has in common with this one (`server.shard.transfer.Likeness`)."""
    version: int
    steps: int
    """The optimizer's."""
    rates: StepRates
    """Of what is in `total`."""
    weights: Tensor
    """Flat: the elements of `spans`, one after the other; so are the others."""
    first: Tensor | None = None
    second: Tensor | None = None
    total: Tensor | None = None
    aside: dict[int, Tensor] = {}
    """Batch -> the sum of its parts that are there."""
    running: Tensor | None = None


class Stranger(Reply, frozen=True, eq=False):
    """Refused: the incarnation is over, or its worker is no member. The worker must end or come back anew."""

    reason: str


# ------------------------------------------------------------------------------------------------------ replication


class Replicate(Message, frozen=True, eq=False):
    """Entry `index` of the shard's log, from a copy to the next one in its chain."""

    shard: int
    epoch: int
    index: int
    entry: Entry


class Replicated(Message, frozen=True, eq=False):
    """Every entry up to `index` is in the state of the copy that says so and of all behind it."""

    shard: int
    epoch: int
    index: int


class Install(Message, frozen=True, eq=False):
    """A copy's whole state after entry `index`, for a copy that has just joined the chain."""

    shard: int
    epoch: int
    index: int
    state: bytes
    tensors: tuple[Tensor, ...]


class Fenced(Message, frozen=True, eq=False):
    """Refused: you act by an old view. The present epoch is at least `epoch`."""

    shard: int
    epoch: int


# -------------------------------------------------------------------------------------------------------- the run


class View(Message, frozen=True, eq=False):
    """Who is who since `epoch`, as the coordinator decided it."""

    epoch: int
    chains: tuple[tuple[int, ...], ...]
    """For each shard the nodes that hold a copy, the first one being asked."""
    members: tuple[tuple[int, int], ...]
    """The workers (number, incarnation)."""
    finished: bool = False
    layout: int = 0
    """How often the shards' ranges have changed."""
    spans: tuple[Spans, ...] = ()
    """For each shard its ranges, () for one that was drained; nothing where the ranges cannot change."""


class Beat(Message, frozen=True, eq=False):
    """I live, and this is the newest view that I know. Also how a node introduces itself.

    `incarnation`: a worker's life; of a copy 1, and 0 as long as it waits for its state.
    """

    node: int
    incarnation: int
    epoch: int


class Show(Message, frozen=True, eq=False):
    """From the evaluator to each copy of a shard: the first copy is to show snapshot `number`, or the next one after it
    that is kept, as soon as there is one. Those before it have been read."""

    number: int


class Shown(Message, frozen=True, eq=False):
    """What a shard held when `number` batches were decided at it. Lent until a higher number is asked for."""

    shard: int
    number: int
    seconds: float
    """When that was, on the clock of the world."""
    spans: Spans
    """What elements of the parameters, tables included, `values` are."""
    values: Tensor
    running: Tensor | None = None
    """The running statistics of the model's norms."""


class Scored(Message, frozen=True, eq=False):
    """From the evaluator to the coordinator: snapshot `number` has been scored. Sent until it is `Heard`."""

    number: int
    row: bytes
    """A row of metrics, as JSON."""


class Heard(Message, frozen=True, eq=False):
    """From the coordinator to the evaluator: the scores up to snapshot `number` have come."""

    number: int


class Ask(Message, frozen=True, eq=False):
    """A worker's call for work: number `sequence`; `done` are tickets that every shard has acknowledged."""

    worker: int
    incarnation: int
    sequence: int
    done: tuple[int, ...]
    rows: tuple[bytes, ...] = ()
    """Rows of metrics, as JSON."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The right and the duty to train on one batch: number `number` of the run.

    `again`: its first owner was lost; it must be pushed in a push of its own.
    """

    number: int
    epoch: int
    batch: int
    """Which batch of its epoch."""
    again: bool = False


class Deal(Message, frozen=True, eq=False):
    """The answer to `Ask`: what to do next. "wait": push what you hold, then ask again."""

    worker: int
    incarnation: int
    sequence: int
    order: Literal["train", "wait", "finish"]
    tickets: tuple[Ticket, ...] = ()
    layout: int = 0
    """Whoever acts on this must know that layout: `View.layout`."""


Outbox = list[tuple[int, Message]]
"""Messages to send: (node, message)."""
