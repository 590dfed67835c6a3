"""One clock of a worker that helps and is helped: the loop around `Peer`, the same in both worlds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from polytempo.core import Port
from polytempo.core.op import Parcel
from polytempo.flexrr.protocol import Do, Peer
from polytempo.flexrr.slices import Slice
from polytempo.server.message import Message, Outbox, Ticket


class CoveredWork(NamedTuple):
    """A worker's operations on slices, and the source of its peers' messages.

    `accumulate` computes a slice of its own and adds its gradient to what `push` will send. `push` sends that, for
    the slices named, each under its ticket; it is called with at least one, seldom twice in a clock. `alone` computes
    one slice and pushes it by itself, under its ticket, for the slice's clock. Neither push may wait for an answer
    that comes after the step only (start it, and await it before the pull): a worker that waits there cannot help.
    """

    accumulate: Callable[[Do], Awaitable[None]]
    push: Callable[[list[Slice]], Awaitable[None]]
    alone: Callable[[Do], Awaitable[None]]
    take: Callable[[float], Awaitable[tuple[int, Parcel] | None]] | None = None
    """The next letter that comes within this many seconds; None: the mailbox is the peers' alone. Called between any
    two slices, so it may also `regroup` the peer."""


async def covered_step(
    port: Port, peer: Peer, clock: int, samples: int, work: CoveredWork, ticket: Ticket | None = None
) -> None:
    """Do this worker's `samples` of `clock` with the help of others, and help workers that are behind.

    Ends when all of the share is with the shards and no helpee needs this worker in its clock; pull after that. It
    looks at its mail between slices, so a message waits for a slice at most. Messages that are not of peers are
    ignored.
    """
    await _post(port, peer.start(await port.now(), clock, samples, ticket))
    await cover(port, peer, work)


async def cover(port: Port, peer: Peer, work: CoveredWork) -> None:
    """`covered_step` from where the peer stands: again, when `peer.lost` has reopened slices of this clock."""
    own: list[Slice] = []
    while True:
        await _read_mail(port, peer, work)
        now_s = await port.now()
        await _post(port, peer.tick(now_s))
        do, outbox = peer.next(now_s)
        await _post(port, outbox)
        if do is not None:
            await (work.alone(do) if do.alone else work.accumulate(do))
            own += [] if do.alone else [do.slice]
            await _post(port, peer.finished(await port.now(), do.slice))
        elif own and not peer.expects_back:
            await work.push(own)
            own = []
        elif peer.may_go_on(now_s):
            return
        else:
            await _read_mail(port, peer, work, peer.wait_s(now_s))


async def _read_mail(port: Port, peer: Peer, work: CoveredWork, wait_s: float = 0.0) -> None:
    """Read all messages; if there is none, wait once for the next."""
    take = work.take or port.take
    while (letter := await take(wait_s)) is not None:
        source, message = letter
        if isinstance(message, Message):
            await _post(port, peer.receive(await port.now(), source, message))
        wait_s = 0.0


async def _post(port: Port, outbox: Outbox) -> None:
    for node, message in outbox:
        await port.post(message, node)
