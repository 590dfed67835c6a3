"""Every message of the parameter server, as data. Tensors are fields; `wire.frames` sends them as raw frames.

    worker ──Push, Pull──▶ shard (its first copy) ──Replicate──▶ the next copy
           ◀─Pushed, Pulled─                      ◀─Replicated─
    coordinator ──Members, Save, Inquire──▶ every shard           ──View──▶ every node     ◀─Beat─ every node
                ◀─Noted, Statistics─                              ◀─Ask─ worker ──Deal──▶
    evaluator ──Show──▶ every copy        ──Scored──▶ coordinator
              ◀─Shown─                    ◀─Heard─

Nodes are numbers, each with a mailbox: workers from 0, then copies of shards, the coordinator, the evaluator.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import msgspec
from torch import Tensor

from polytempo.server.layout import Spans
from polytempo.server.step_rates import StepRates, UnusedParameters

COORDINATOR = -1
"""The `worker` of a request that the coordinator makes."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, eq=False):
    """A message from one mailbox to another."""

    HEADER_BYTES: ClassVar[int] = 64
    num_kinds: ClassVar[int] = 0
    """The number of subclasses so far, in all modules."""

    def __init_subclass__(cls) -> None:
        """Count the class, so that `wire.frames` knows when its decoder lacks one."""
        Message.num_kinds += 1

    @property
    def num_bytes(self) -> int:
        """The bytes that it costs a link: its tensors and a small header."""
        return self.HEADER_BYTES + sum([_num_bytes(getattr(self, name)) for name in _sized_fields(type(self))])


@cache
def _sized_fields(kind: Any) -> tuple[str, ...]:
    hints = get_type_hints(kind)
    return tuple(name for name in kind.__struct_fields__ if _has_size(hints[name]))


def _has_size(hint: Any) -> bool:
    alone = isinstance(hint, type) and issubclass(hint, Tensor | bytes | Rows | Message)
    return alone or any(map(_has_size, get_args(hint)))  # arguments of a Literal are names


def _num_bytes(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, tuple):
        return sum([_num_bytes(part) for part in value]) if value else 0
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Message | Rows):
        return value.num_bytes - (Message.HEADER_BYTES if isinstance(value, Message) else 0)
    return len(value) if isinstance(value, bytes) else 0


class Rows(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Some rows of one table: `rows` (n,) int64, ascending and without repeats, `values` (n, width)."""

    piece: int
    """The number of a piece in the shard's layout."""
    rows: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes that they cost a link."""
        return _num_bytes(self.rows) + _num_bytes(self.values)


# ------------------------------------------------------------------------------ requests: the entries of a shard's log


class Request(Message, frozen=True, eq=False):
    """A request of a worker (or the coordinator) to a shard. It is applied once, however often it is sent.

    A worker's requests to one shard are numbered 1, 2, 3, … and are applied in that order. `incarnation` counts the
    worker's lives; a request from an earlier life is refused.
    """

    worker: int
    incarnation: int
    sequence: int


class PushPart(Request, frozen=True, eq=False):
    """A worker's own request within the push of its host: its gradient is in the sum. See `Push` for the fields."""

    clock: int
    basis: int
    samples: int
    tickets: tuple[int, ...]
    running: Tensor | None = None


class Push(Request, frozen=True, eq=False):
    """A gradient for this shard's part of the parameters, or the sum of several from one host."""

    clock: int
    basis: int
    samples: int
    lrs: tuple[float, ...]
    """The worker's learning rate of each parameter group."""
    tickets: tuple[int, ...]
    """The batches that it is of; a shard that has applied them all drops it."""
    gradient: Tensor
    """Flat: the shard's dense pieces one after the other."""
    rows: tuple[Rows, ...] = ()
    running: Tensor | None = None
    """The running statistics of the worker's norm layers, float64; None where its model has none."""
    parts: tuple[PushPart, ...] = ()
    """The requests of the other workers with gradients in the sum; all are taken, or none is (`PushAlone`)."""
    unused: tuple[str, ...] = ()
    """The parameters without a gradient; there `gradient` is 0."""


class Pull(Request, frozen=True, eq=False):
    """Asks for the weights, and of tables for the rows that changed after version `basis` (-1: all).

    With a `delta` codec the worker holds the weights of `basis`.
    """

    clock: int
    basis: int
    resulting: bool = False
    """True for the run's resulting weights, which are not a region's where the rule has regions."""
    last: bool = False
    """The worker has no more work."""


class Members(Request, frozen=True, eq=False):
    """Coordinator to shard: set the members, (number, incarnation) each.

    `resting`: the members that have no work for now. Rules take them for workers that have left.
    """

    members: tuple[tuple[int, int], ...]
    resting: tuple[int, ...] = ()


class Save(Request, frozen=True, eq=False):
    """Coordinator to shard: write snapshot `number`, as soon as `at` batches are decided."""

    number: int
    at: int = 0


class Inquire(Request, frozen=True, eq=False):
    """Coordinator to shard: send your `Statistics`."""


class Lend(Request, frozen=True, eq=False):
    """Coordinator to shard: lend the elements of `spans` to another shard, which takes them over. The answer is
    `Lent`."""

    spans: Spans


class Reshape(Request, frozen=True, eq=False):
    """Coordinator to shard, while no request is under way: hold `spans` from now on.

    `pieces` have the elements that the shard does not hold yet.
    """

    spans: Spans
    pieces: tuple[Lent, ...] = ()


class Elapsed(Message, frozen=True, eq=False):
    """A shard's own entry: the window of its rule is over. It opened at version `version` of the weights."""

    version: int


AskedEntry = Push | Pull | Members | Save | Inquire | Lend | Reshape
"""An entry of a shard's log that a worker or the coordinator asks for."""
Entry = AskedEntry | Elapsed
"""An entry of a shard's log."""


# ---------------------------------------------------------------------------------------------------------- answers


class Reply(Message, frozen=True, eq=False):
    """Answers the request `sequence` of (worker, incarnation) to shard `shard`."""

    shard: int
    worker: int
    incarnation: int
    sequence: int


class Pushed(Reply, frozen=True, eq=False):
    """The outcome of a push. "applied": in the weights or the sum. "dropped": not used (late, or applied before)."""

    version: int
    """The shard's version afterwards."""
    staleness: int
    verdict: Literal["applied", "dropped", "refused"]
    reason: str = ""
    difference: Tensor | None = None
    """Elastic averaging's d, flat."""


class Pulled(Reply, frozen=True, eq=False):
    """The weights of version `version`, flat (dense pieces), rows of tables, running statistics of norm layers."""

    version: int
    values: Tensor
    rows: tuple[Rows, ...] = ()
    running: Tensor | None = None


class Noted(Reply, frozen=True, eq=False):
    """The request (`Members`, `Save`, `Reshape`) is done. `what`: "reshaped" for a `Reshape`."""

    what: str = ""


class Statistics(Reply, frozen=True, eq=False):
    """A shard's version, the length of its log, the staleness of its gradients, and the tickets that it has applied."""

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
    """A part of a shard's state: the shard leaves it unchanged until its own `Reshape` comes."""

    spans: Spans
    likeness: bytes
    """The state that a new shard has in common with this one (`server.snapshots.transfer.Likeness`), as bytes."""
    version: int
    steps: int
    """The number of the optimizer's steps."""
    rates: StepRates
    """The rates of the gradients in `total`."""
    weights: Tensor
    """Flat: the elements of `spans`, one after the other; so are the others."""
    first: Tensor | None = None
    second: Tensor | None = None
    total: Tensor | None = None
    aside: dict[int, Tensor] = {}
    """Batch -> the sum of its parts so far."""
    running: Tensor | None = None
    unused: UnusedParameters = msgspec.field(default_factory=UnusedParameters)


class PushAlone(Reply, frozen=True, eq=False):
    """Refusal of a part of a host's push, because the shard refused another part. The worker pushes it alone."""


class Stranger(Reply, frozen=True, eq=False):
    """Refusal: the incarnation is over, or its worker is not a member. The worker must end, or join in a new life."""

    reason: str


# ------------------------------------------------------------------------------------------------------ replication


class Replicate(Message, frozen=True, eq=False):
    """Entry `index` of the shard's log, from a copy to the next one in its chain."""

    shard: int
    epoch: int
    index: int
    entry: Entry


class Replicated(Message, frozen=True, eq=False):
    """Every entry up to `index` is in the state of the sending copy and of all behind it."""

    shard: int
    epoch: int
    index: int


class Install(Message, frozen=True, eq=False):
    """A copy's whole state after entry `index`, for a copy that is new in the chain."""

    shard: int
    epoch: int
    index: int
    state: bytes
    tensors: tuple[Tensor, ...]


class Fenced(Message, frozen=True, eq=False):
    """Refused: the sender's view is old. The present epoch is at least `epoch`."""

    shard: int
    epoch: int


# -------------------------------------------------------------------------------------------------------- the run


class View(Message, frozen=True, eq=False):
    """Chains, members and ranges of shards since `epoch`, as the coordinator decided them."""

    epoch: int
    chains: tuple[tuple[int, ...], ...]
    """The nodes with a copy of each shard; requests go to the first."""
    members: tuple[tuple[int, int], ...]
    """The workers (number, incarnation)."""
    finished: bool = False
    layout: int = 0
    """The number of changes of the shards' ranges."""
    spans: tuple[Spans, ...] = ()
    """The ranges of each shard, () for a drained one; () as a whole where ranges cannot change."""


class Beat(Message, frozen=True, eq=False):
    """`node` lives, and the newest view that it knows is of `epoch`. A node's first message is a beat, too.

    `incarnation`: a worker's life; of a copy 1, and 0 as long as it waits for its state.
    """

    node: int
    incarnation: int
    epoch: int


class Show(Message, frozen=True, eq=False):
    """Evaluator to each copy of a shard: the head shows snapshot `number`, or the next kept one, as soon as there is
    one. The evaluator has read those before it."""

    number: int


class Shown(Message, frozen=True, eq=False):
    """A shard's elements when `number` batches were decided at it. Lent until a `Show` of a higher number."""

    shard: int
    number: int
    seconds: float
    """The time of that, on the clock of the world."""
    spans: Spans
    """The elements in `values`, of all parameters, tables included."""
    values: Tensor
    running: Tensor | None = None
    """The running statistics of the model's norm layers."""


class Scored(Message, frozen=True, eq=False):
    """Evaluator to coordinator: the score of snapshot `number`. Sent until `Heard` confirms it."""

    number: int
    row: bytes
    """A row of metrics, as JSON."""


class Heard(Message, frozen=True, eq=False):
    """Coordinator to evaluator: the scores up to snapshot `number` have come."""

    number: int


class Ask(Message, frozen=True, eq=False):
    """A worker's call for work: number `sequence`; `done` are tickets that every shard has acknowledged."""

    worker: int
    incarnation: int
    sequence: int
    done: tuple[int, ...]
    rows: tuple[bytes, ...] = ()
    """Rows of metrics, as JSON."""


Order = Literal["train", "wait", "finish", "pause", "stop"]
"""An order to a worker; see `server.coordinator.batch_scheduler`."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The right and the duty to train on one batch: number `number` of the run.

    `again`: its first owner was lost; its gradient must be pushed alone.
    """

    number: int
    epoch: int
    batch: int
    """The number of the batch in its epoch."""
    again: bool = False


class Deal(Message, frozen=True, eq=False):
    """The answer to `Ask`: the worker's next order. "wait": push all gradients, then ask again. "pause": its epoch
    is done, and its next call is for the one after it. "stop": "finish" in a loop with such epochs that was stopped."""

    worker: int
    incarnation: int
    sequence: int
    order: Order
    tickets: tuple[Ticket, ...] = ()
    layout: int = 0
    """A worker must know this layout (`View.layout`) before it acts on the answer."""


class RunFailed(Message, frozen=True, eq=False):
    """Last message of the coordinator's process to the workers: the reason for the run's end."""

    reason: str


Outbox = list[tuple[int, Message]]
"""Messages to send: (node, message) of each."""
