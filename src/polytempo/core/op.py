"""Operations: requests as plain data. An `Op` performs nothing; a world performs it.

A strategy is a coroutine. `await port.recv(...)` suspends it with an `Op` in hand; the world that
drives the coroutine performs the request and resumes it with the answer:

    strategy  ── yields Op ──▶  world (virtual clock, or processes)
              ◀── answer ────
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from polytempo.core.kernel_use import Uses

T = TypeVar("T")

Program = Coroutine["Op[Any]", Any, T]
"""A coroutine whose suspensions are operations: what every world can drive."""


@dataclass(frozen=True, eq=False)
class Op(Generic[T]):
    """A request with an answer of type `T`. Ranks in its fields are world ranks."""

    timeout_s: float | None = field(default=None, kw_only=True)
    """Seconds until `TimedOut` is raised at the `await`; None means the world's own deadline."""

    def __await__(self) -> Generator[Op[Any], Any, T]:
        answer: T = yield self
        return answer

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True, eq=False)
class Send(Op[None]):
    """Hand `buffer` to rank `to`. It must stay unchanged until the operation is finished."""

    buffer: Tensor
    to: int
    tag: int = 0
    channel: int = 0

    def __str__(self) -> str:
        return f"send to rank {self.to} (tag {self.tag})"


@dataclass(frozen=True, eq=False)
class Recv(Op[Tensor]):
    """A tensor of the shape and dtype of `like` from rank `source`."""

    like: Tensor
    source: int
    tag: int = 0
    channel: int = 0

    def __str__(self) -> str:
        return f"recv from rank {self.source} (tag {self.tag})"


@dataclass(frozen=True, eq=False)
class LentSend(Send):
    """A `Send` to a `LentRecv`: where both ranks see the same memory, the receiver uses the tensor where it lies."""


@dataclass(frozen=True, eq=False)
class LentRecv(Recv):
    """A `Recv` from a `LentSend`. Its answer may lie in memory of the sender, which has it back with the last use."""


@dataclass(frozen=True, eq=False)
class SendReceive(Op[Tensor]):
    """Hand `buffer` to rank `to`, and answer with a tensor of the shape and dtype of `like` from rank `source`.

    Both are under way at once, the receive first. `buffer` must stay unchanged until the operation is finished.
    """

    buffer: Tensor
    to: int
    like: Tensor
    source: int
    tag: int = 0
    channel: int = 0

    def __str__(self) -> str:
        return f"send to rank {self.to} and recv from rank {self.source} (tag {self.tag})"

    @property
    def halves(self) -> tuple[Recv, Send]:
        """Its two messages, in the order in which a world begins them."""
        recv = Recv(self.like, self.source, self.tag, self.channel, timeout_s=self.timeout_s)
        return recv, Send(self.buffer, self.to, self.tag, self.channel, timeout_s=self.timeout_s)


class Parcel(Protocol):
    """What travels between mailboxes: a message that knows its size."""

    @property
    def num_bytes(self) -> int:
        """What it costs a link."""


@dataclass(frozen=True, eq=False)
class Post(Op[None]):
    """Put `message` into the mailbox of node `to`. Finished when it has left; whether it arrives is not known."""

    message: Parcel
    to: int

    def __str__(self) -> str:
        return f"post {type(self.message).__name__.lower()} to node {self.to}"


@dataclass(frozen=True, eq=False)
class Take(Op["tuple[int, Parcel] | None"]):
    """The next (sender, message) of this node's mailbox; None if none is there within `wait_s` (None: however long)."""

    wait_s: float | None = None


@dataclass(frozen=True, eq=False)
class Push(Op["Tensor | None"]):
    """Send `gradient` (flat, all parameters) to the parameter server. Finished when every shard has acknowledged it.

    The answer is None, or, where the server averages elastically, the difference to subtract (then `gradient` holds
    the worker's parameters).

    `clock` counts the steps whose gradients have been pushed, this one's included; `samples` are those behind the
    gradient. The buffer must stay unchanged until the operation is finished. Performed by the worker's client
    (`server.worker.server_calls`), not by a world.
    """

    gradient: Tensor
    clock: int
    samples: int = 0


@dataclass(frozen=True, eq=False)
class Pull(Op[Tensor]):
    """The parameter server's parameters, flat; they may be of different versions from shard to shard.

    The answer is lent: read it before the next push or pull. Performed by the worker's client, not by a world.
    """

    clock: int


@dataclass(frozen=True, eq=False)
class Collective(Op[T]):
    """An operation that every one of `members` (world ranks, in order) takes part in."""

    members: tuple[int, ...] = field(kw_only=True)
    channel: int = field(default=0, kw_only=True)

    def __str__(self) -> str:
        return f"{self.kind} among {len(self.members)} ranks"

    @property
    def kind(self) -> str:
        """The operation's name as traces show it."""
        return _KINDS[type(self)]


@dataclass(frozen=True, eq=False)
class AllReduce(Collective[Tensor]):
    """The sum of `buffer` over the members. `buffer` is given away: the answer may live in it."""

    buffer: Tensor


@dataclass(frozen=True, eq=False)
class AllGather(Collective[list[Tensor]]):
    """Every member's `buffer` (equal shapes), in the members' order."""

    buffer: Tensor


@dataclass(frozen=True, eq=False)
class ReduceScatter(Collective[Tensor]):
    """This member's equal slice of the sum of `buffer` (numel a multiple of the members)."""

    buffer: Tensor


@dataclass(frozen=True, eq=False)
class AllToAll(Collective[list[Tensor]]):
    """`pieces[i]` goes to member i; the answer is what each member i had for this one, flat and like `likes[i]`.

    All flat and of one dtype; lengths may differ, but both sides must know them.
    """

    pieces: tuple[Tensor, ...]
    likes: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Broadcast(Collective[Tensor]):
    """`buffer` of the world rank `source`. `buffer` is given away: the answer may live in it."""

    buffer: Tensor
    source: int


@dataclass(frozen=True, eq=False)
class Barrier(Collective[None]):
    """Wait until every member is here."""


COLLECTIVES = (AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast, Barrier)
"""The collectives that every world performs."""


@dataclass(frozen=True, eq=False)
class WholeSum(Collective[bool]):
    """Whether the world has let the time of all messages of `route` over `buffer` pass, which then need not be sent.

    Asked by routes whose buffer has no values. Virtual worlds may answer True (`worlds.whole_sums`).
    """

    route: Callable[..., Any]
    buffer: Tensor


_KINDS: dict[type, str] = {
    AllReduce: "all_reduce",
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
    Broadcast: "broadcast",
    Barrier: "barrier",
    WholeSum: "whole_sum",
}


@dataclass(frozen=True, eq=False)
class Compute(Op[T]):
    """Run `work()`. A virtual world charges `flops` at the rank's speed; a real one takes the time it takes.

    On a cluster whose kernels were measured it charges `uses` instead, where there are some.
    """

    work: Callable[[], T]
    flops: float
    name: str = "compute"
    """As traces show it."""
    uses: Uses = ()


@dataclass(frozen=True, eq=False)
class Alone(Compute[T]):
    """Run `work()` while no other rank of this host is in one of these; they are let in one after the other."""


@dataclass(frozen=True, eq=False)
class Now(Op[float]):
    """The world's clock, in seconds since the run began."""

    clock: Callable[[], float] | None = None
    """Reads it at once, so that nothing need be suspended; None: the world answers."""

    def __await__(self) -> Generator[Op[Any], Any, float]:
        answer: float = (yield self) if self.clock is None else self.clock()
        return answer


@dataclass(frozen=True, eq=False)
class Mark(Op[None]):
    """This rank begins step `step`: what traces, errors and injected faults are keyed by."""

    step: int


@dataclass(frozen=True, eq=False)
class Start(Op["Work[T]"], Generic[T]):
    """Begin `what` (an operation, or a whole coroutine) without waiting for it."""

    what: Op[T] | Program[T]


@dataclass(frozen=True, eq=False)
class Work(Op[T]):
    """Something begun. `await work` waits for its answer; it may be awaited more than once."""

    handle: Any

    def __str__(self) -> str:
        return f"unfinished {self.handle}"
