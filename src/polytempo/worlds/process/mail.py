"""The mail world: one process that talks to others through its mailbox alone, as a parameter server's nodes do.

A coroutine advances when it is launched, or while one waits. A coroutine that waits serves all: messages go to the
taking coroutines in the order of their asking.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from polytempo.core import WAITING, Deadlock, Port, Program, Task, world_port
from polytempo.core.op import Alone, Compute, Dispatch, Mark, Now, Op, Parcel, Post, Start, Take, Work
from polytempo.worlds.process.lock import HostLock
from polytempo.worlds.trace import Event, Trace

T = TypeVar("T")

_ALONE_S = 300.0


class Mail(Protocol):
    """The mailbox of a world; `wire.zeromq.Mailbox` is one."""

    def post(self, to: int, message: Any) -> bool:
        """Send without waiting. False where the message was dropped."""

    def take(self, wait_s: float | None = None) -> tuple[int, Any] | None:
        """The next (source, message), or None if none comes within `wait_s`."""


class _Strand:
    """A coroutine under way, or finished, and the coroutines that wait for it."""

    __slots__ = ("followers", "task", "world")

    def __init__(self, world: MailWorld, coroutine: Program[Any]) -> None:
        self.world, self.task = world, Task(coroutine)
        self.followers: list[_Strand] = []

    @property
    def done(self) -> bool:
        return self.task.done

    def wait(self) -> Any:
        """The value of the coroutine, once it is over."""
        while not self.done:
            self.world.serve()
        if self.task.error is not None:
            self.world.unseen.pop(self, None)
            raise self.task.error
        self.world.check_unseen()
        return self.task.value

    def resume(self, value: Any = None, error: Exception | None = None) -> None:
        """Answer its operation, and run it until it has to wait again, or is finished."""
        if not self.task.resume(self._begin, value, error):
            return
        value, error = self.task.value, self.task.error
        if error is not None and not self.followers:
            self.world.unseen[self] = error
        for follower in self.followers:
            follower.resume(value, error)

    def _begin(self, op: Op[Any]) -> Any:
        match op:
            case Take(wait_s):
                self.world.awaits_mail(self, wait_s)
                return WAITING
            case Work(_Strand() as other) if not other.task.done:
                other.followers.append(self)
                return WAITING
            case Work(_Strand() as other):
                self.world.unseen.pop(other, None)
                return other.task.result()
            case _:
                return self.world.perform(op)


class _Taker(NamedTuple):
    until_s: float
    since_s: float
    strand: _Strand


class MailWorld:
    """Node `node` of those on `hosts`. `lock` keeps the nodes of a host apart in `Alone`; None: nothing does.

    `zero_s` is where the clock begins, in seconds of `time.monotonic`; processes of one host may agree on it.
    """

    def __init__(
        self,
        node: int,
        mailbox: Mail,
        hosts: Sequence[int],
        *,
        lock: HostLock | None = None,
        zero_s: float | None = None,
        max_events: int = 20_000,
    ) -> None:
        self.rank = node
        self.size = len(hosts)
        self.port: Port = world_port(node, hosts)
        self.trace = Trace(timed=False, max_events=max_events)
        self.step = 0
        self.waited_s = 0.0
        """Seconds spent waiting for mail."""
        self.unseen: dict[_Strand, Exception] = {}
        """Coroutines that failed and that were not awaited since; see `check_unseen`."""
        self._mailbox = mailbox
        self._lock = lock
        self._zero_s = time.monotonic() if zero_s is None else zero_s
        self._takers: list[_Taker] = []

    def now_s(self) -> float:
        """Seconds since the world's zero."""
        return time.monotonic() - self._zero_s

    # ------------------------------------------------------------------ coroutines

    def drive(self, coroutine: Program[T]) -> T:
        """Run a coroutine to its end."""
        value: T = self.launch(coroutine).wait()
        return value

    def launch(self, coroutine: Program[Any]) -> _Strand:
        """Run a coroutine until it has to wait; `wait()` on the returned strand finishes it."""
        strand = _Strand(self, coroutine)
        strand.resume()
        return strand

    def awaits_mail(self, strand: _Strand, wait_s: float | None) -> None:
        """Put a coroutine at the end of the takers' line."""
        now_s = self.now_s()
        self._takers.append(_Taker(math.inf if wait_s is None else now_s + max(0.0, wait_s), now_s, strand))

    def serve(self) -> None:
        """Wait until one coroutine that takes has its answer, and let it go on."""
        self.check_unseen()
        if not self._takers:
            raise Deadlock(f"node {self.rank}, step {self.step}: waits for coroutines that wait for each other")
        first = min(self._takers, key=lambda taker: taker.until_s)
        since_s = self.now_s()
        mail = self._mailbox.take(None if first.until_s == math.inf else max(0.0, first.until_s - since_s))
        self.waited_s += self.now_s() - since_s
        taker = self._takers[0] if mail is not None else first
        self._takers.remove(taker)
        if mail is not None:
            self._record("take", taker.since_s, 0, mail[0])
        taker.strand.resume(mail)

    def check_unseen(self) -> None:
        """Raise the first error of a coroutine that was not awaited, before this node waits or ends."""
        for strand, error in self.unseen.items():
            del self.unseen[strand]
            raise error

    # ------------------------------------------------------------------ operations

    def perform(self, op: Op[Any]) -> Any:
        """The answer to an operation that waits for no mail. TypeError for an operation that this world lacks."""
        match op:
            case Post(message, to):
                return self._post(message, to)
            case Dispatch(messages):
                for to, message in messages:
                    self._post(message, to)
                return None
            case Alone(work, _):
                return self._alone(work, op.timeout_s or _ALONE_S)
            case Compute(work, _):
                return self._compute(work)
            case Now():
                return self.now_s()
            case Mark(step):
                self.step = step
                return None
            case Start(what):
                return Work(self.launch(_only(what) if isinstance(what, Op) else what))
        raise TypeError(f"node {self.rank} awaited {op!r}, which the mail world cannot perform")

    def _post(self, message: Parcel, to: int) -> None:
        start_s = self.now_s()
        self._mailbox.post(to, message)
        self._record("post", start_s, message.num_bytes, to)

    def _compute(self, work: Callable[[], T]) -> T:
        start_s = self.now_s()
        try:
            return work()
        finally:
            self._record("compute", start_s, 0, -1)

    def _alone(self, work: Callable[[], T], limit_s: float) -> T:
        if self._lock is None:
            return self._compute(work)
        with self._lock.held(self, limit_s):
            return self._compute(work)

    def _record(self, kind: str, start_s: float, num_bytes: int, peer: int) -> None:
        self.trace.add(Event(self.rank, self.step, kind, num_bytes, start_s, self.now_s(), peer))


async def _only(op: Op[T]) -> T:
    return await op
