"""Operations: requests as plain data. An `Op` performs nothing; a world performs it.

A strategy is a coroutine. `await port.recv(...)` suspends it with an `Op` in hand; the world that
drives the coroutine performs the request and resumes it with the answer:

    strategy  ── yields Op ──▶  world (virtual clock, or processes)
              ◀── answer ────
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from torch import Tensor

from polytempo.core.arithmetic.kernel_use import Uses

T = TypeVar("T")

Program = Coroutine["Op[Any]", Any, T]
"""A coroutine that suspends with operations: every world can drive it."""


class Op(msgspec.Struct, Generic[T], frozen=True, eq=False, kw_only=True):
    """A request with an answer of type `T`. Ranks in its fields are world ranks."""

    timeout_s: float | None = None
    """Seconds until `TimedOut` is raised at the `await`; None means the world's own deadline."""

    def __await__(self) -> Generator[Op[Any], Any, T]:
        answer: T = yield self
        return answer

    def __str__(self) -> str:
        return type(self).__name__.lower()


class Send(Op[None], frozen=True, eq=False):
    """Hand `buffer` to rank `to`. It must stay unchanged until the operation is finished."""

    buffer: Tensor
    to: int
    tag: int = 0
    channel: int = 0

    def __str__(self) -> str:
        return f"send to rank {self.to} (tag {self.tag})"


class Recv(Op[Tensor], frozen=True, eq=False):
    """A tensor of the shape and dtype of `like` from rank `source`."""

    like: Tensor
    source: int
    tag: int = 0
    channel: int = 0

    def __str__(self) -> str:
        return f"recv from rank {self.source} (tag {self.tag})"


class LentSend(Send, frozen=True, eq=False):
    """A `Send` to a `LentRecv`: where both ranks see the same memory, the receiver uses the sender's tensor."""


class LentRecv(Recv, frozen=True, eq=False):
    """A `Recv` from a `LentSend`. Its answer may be in memory of the sender, which has it back with the last use."""


class SendReceive(Op[Tensor], frozen=True, eq=False):
    """Hand `buffer` to rank `to`, and answer with a tensor of the shape and dtype of `like` from rank `source`.

    Both are under way at the same time, the receive first. `buffer` must stay unchanged until the operation is
    finished.
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
        """The two messages, in a world's order of beginning."""
        recv = Recv(self.like, self.source, self.tag, self.channel, timeout_s=self.timeout_s)
        return recv, Send(self.buffer, self.to, self.tag, self.channel, timeout_s=self.timeout_s)


class Parcel(Protocol):
    """A message between mailboxes, which knows its size."""

    @property
    def num_bytes(self) -> int:
        """The bytes that a link carries."""


class Post(Op[None], frozen=True, eq=False):
    """Put `message` into the mailbox of node `to`. Finished when it has left; whether it arrives is not known."""

    message: Parcel
    to: int

    def __str__(self) -> str:
        return f"post {type(self.message).__name__.lower()} to node {self.to}"


class Dispatch(Op[None], frozen=True, eq=False):
    """Put each of `messages`, (node, message), into its node's mailbox, and wait for none of them to leave."""

    messages: Sequence[tuple[int, Parcel]]


class Take(Op["tuple[int, Parcel] | None"], frozen=True, eq=False):
    """The next (sender, message) of this node's mailbox; None if none is there within `wait_s` (None: however long)."""

    wait_s: float | None = None


class Push(Op["Tensor | None"], frozen=True, eq=False):
    """Send `gradient` (flat, all parameters) to the parameter server. Finished when every shard has acknowledged it.

    The answer is None, or, where the server averages elastically, the difference to subtract (then `gradient` holds
    the worker's parameters).

    `clock` counts the steps of all pushes so far, this one's included; `samples` is the gradient's number of samples.
    The buffer must stay unchanged until the operation is finished. Performed by the worker's client
    (`server.worker.server_calls`), not by a world.
    """

    gradient: Tensor
    clock: int
    samples: int = 0


class Pull(Op[Tensor], frozen=True, eq=False):
    """The parameter server's parameters, flat; they may be of different versions from shard to shard.

    The answer is lent: read it before the next push or pull. Performed by the worker's client, not by a world.
    """

    clock: int


class Collective(Op[T], frozen=True, eq=False, kw_only=True):
    """An operation that every one of `members` (world ranks, in order) takes part in."""

    members: tuple[int, ...]
    channel: int = 0

    def __str__(self) -> str:
        return f"{self.kind} among {len(self.members)} ranks"

    @property
    def kind(self) -> str:
        """The operation's name as traces show it."""
        return _KINDS[type(self)]


class AllReduce(Collective[Tensor], frozen=True, eq=False):
    """The sum of `buffer` over the members. `buffer` is given away: the answer may live in it."""

    buffer: Tensor


class AllGather(Collective[list[Tensor]], frozen=True, eq=False):
    """Every member's `buffer` (equal shapes), in the members' order."""

    buffer: Tensor
    read_only: bool = False
    """True if no member writes to the answer: a world with several members may give all of them the same tensors."""


class ReduceScatter(Collective[Tensor], frozen=True, eq=False):
    """This member's equal slice of the sum of `buffer` (numel a multiple of the members)."""

    buffer: Tensor


class AllToAll(Collective[list[Tensor]], frozen=True, eq=False):
    """`pieces[i]` goes to member i; the answer has each member i's piece for this one, flat and like `likes[i]`.

    All flat and of one dtype; lengths may differ, but both sides must know them.
    """

    pieces: tuple[Tensor, ...]
    likes: tuple[Tensor, ...]


class Broadcast(Collective[Tensor], frozen=True, eq=False):
    """`buffer` of the world rank `source`. `buffer` is given away: the answer may live in it."""

    buffer: Tensor
    source: int


class Barrier(Collective[None], frozen=True, eq=False):
    """Wait until every member is here."""


COLLECTIVES = (AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast, Barrier)
"""The collectives that every world performs."""


class WholeSum(Collective[bool], frozen=True, eq=False):
    """A question: has the world let the time of all messages of `route` over `buffer` pass? Then do not send them.

    Routes with a buffer without values ask it. Virtual worlds may answer True (`worlds.virtual.whole_sums`).
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


class Compute(Op[T], frozen=True, eq=False):
    """Run `work()`. A virtual world charges `flops` at the rank's speed; a real one takes the time it takes.

    On a cluster with measured kernels it charges `uses` instead, where there are some.
    """

    work: Callable[[], T]
    flops: float
    name: str = "compute"
    """As traces show it."""
    uses: Uses = ()
    source: Tensor | None = None
    """A tensor of a `read_only` answer: all that have it compute the same tensor, so a virtual world computes once."""


class Alone(Compute[T], frozen=True, eq=False):
    """Run `work()` while no other rank of this host is in one of these; they are let in one after the other."""


class Now(Op[float], frozen=True, eq=False):
    """The world's clock, in seconds since the run began."""

    clock: Callable[[], float] | None = None
    """Reads it immediately, so that nothing need be suspended; None: the world answers."""

    def __await__(self) -> Generator[Op[Any], Any, float]:
        answer: float = (yield self) if self.clock is None else self.clock()
        return answer


class Mark(Op[None], frozen=True, eq=False):
    """This rank begins step `step`, the key of traces, errors and injected faults."""

    step: int


class Start(Op["Work[T]"], Generic[T], frozen=True, eq=False):
    """Begin `what` (an operation, or a whole coroutine) without waiting for it."""

    what: Op[T] | Program[T]


class Work(Op[T], frozen=True, eq=False):
    """Something begun. `await work` waits for its answer; it may be awaited more than once."""

    handle: Any

    def __str__(self) -> str:
        return f"unfinished {self.handle}"
