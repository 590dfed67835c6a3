"""The mail world: a waiting program serves all, messages go to takers in the order of asking, and nothing spins."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from polytempo.core import Deadlock, Program, TimedOut
from polytempo.core.op import Op, Pull, Push, Work
from polytempo.server.message import Beat
from polytempo.worlds.process.lock import HostLock
from polytempo.worlds.process.mail import MailWorld


class Letters:
    """A mailbox that holds `letters` already, and nothing else will ever come. Records its calls."""

    def __init__(self, *letters: Any) -> None:
        self.letters = deque((1, letter) for letter in letters)
        self.sent: list[Any] = []
        self.waits_s: list[float | None] = []

    def post(self, to: int, message: Any) -> bool:
        self.sent.append((to, message))
        return True

    def take(self, wait_s: float | None = None) -> tuple[int, Any] | None:
        self.waits_s.append(wait_s)
        if not self.letters:
            assert wait_s is not None, "waits for ever"
            return None
        return self.letters.popleft()


def world(*letters: Any, **more: Any) -> tuple[MailWorld, Letters]:
    letter_box = Letters(*letters)
    return MailWorld(0, letter_box, (0, 0, 1), **more), letter_box


def test_messages_go_out_and_come_in() -> None:
    own, mail = world("a")

    async def program() -> Any:
        await own.port.mark(7)
        await own.port.post(Beat(0, 0, 0), 2)
        return await own.port.take(3), await own.port.compute(lambda: 5, 0.0), await own.port.now() >= 0

    assert own.drive(program()) == ((1, "a"), 5, True)
    assert [to for to, _ in mail.sent] == [2]
    assert [(event.op, event.step, event.bytes, event.peer) for event in own.trace.events] == [
        ("post", 7, 64, 2),
        ("take", 7, 0, 1),
        ("compute", 7, 0, -1),
    ]


def test_taking_waits_once_for_as_long_as_asked() -> None:
    own, mail = world()

    async def program() -> Any:
        return await own.port.take(2.5), await own.port.take(0)

    assert own.drive(program()) == (None, None)
    first_s, second_s = mail.waits_s
    assert first_s is not None
    assert 2 < first_s <= 2.5
    assert second_s == 0


def test_whoever_waits_serves_those_that_have_asked_before() -> None:
    own, mail = world("first", "second", "third")
    seen: list[Any] = []

    async def beside() -> str:
        seen.append(("beside", await own.port.take()))
        seen.append(("beside", await own.port.take()))
        return "done"

    async def program() -> Any:
        work = await own.port.start(beside())
        assert mail.waits_s == []  # before any wait
        seen.append(("main", await own.port.take()))
        return await work, await work

    assert own.drive(program()) == ("done", "done")
    assert seen == [("beside", (1, "first")), ("main", (1, "second")), ("beside", (1, "third"))]


def test_the_earliest_deadline_ends_the_wait_and_nobody_else_s() -> None:
    own, mail = world()

    async def beside() -> Any:
        return await own.port.take(9)

    async def program() -> Any:
        work = await own.port.start(beside())
        assert await own.port.take(1) is None
        assert own.launch(beside()).done is False
        return await work

    assert own.drive(program()) is None
    assert [round(wait_s or 0) for wait_s in mail.waits_s] == [1, 9]


def test_coroutines_may_wait_for_each_other_and_for_single_operations() -> None:
    own, mail = world("letter")

    async def reader() -> Any:
        return await own.port.take()

    async def follower(work: Work[Any]) -> Any:
        return "after", await work

    async def program() -> Any:
        reading = await own.port.start(reader())
        following = [await own.port.start(follower(reading)) for _ in range(2)]
        posting = await own.port.start(own.port.post(Beat(0, 0, 0), 1))
        await posting
        return [await work for work in following]

    assert own.drive(program()) == [("after", (1, "letter"))] * 2
    assert len(mail.sent) == 1


def test_what_is_dispatched_is_posted_in_its_order() -> None:
    own, mail = world()
    beats = [(1, Beat(0, 0, 0)), (2, Beat(0, 0, 1))]

    async def program() -> None:
        await own.port.dispatch(beats)

    own.drive(program())
    assert mail.sent == beats
    assert [(event.op, event.peer) for event in own.trace.events] == [("post", 1), ("post", 2)]


def test_errors_are_raised_where_they_are_awaited() -> None:
    own, _ = world("x")

    async def fails() -> None:
        await own.port.take()
        raise KeyError("inside")

    async def program() -> list[str]:
        work = await own.port.start(fails())
        caught = []
        for _ in range(2):
            try:
                await work
            except KeyError as error:
                caught.append(str(error))
        try:
            await own.port.compute(lambda: 1 // 0, 0.0)
        except ZeroDivisionError:
            caught.append("division")
        return caught

    assert own.drive(program()) == ["'inside'", "'inside'", "division"]
    with pytest.raises(KeyError):
        own.drive(fails_at_once())


class Full(Letters):
    """A mailbox that refuses to send."""

    def post(self, to: int, message: Any) -> bool:
        raise ValueError("the protocol lacks that dtype")


@pytest.mark.parametrize("takes", [True, False], ids=["before it waits", "at its end"])
def test_an_error_that_nobody_awaits_is_raised(takes: bool) -> None:
    own = MailWorld(0, Full("never taken"), (0, 0))

    async def program() -> None:
        await own.port.start(own.port.post(Beat(0, 0, 0), 1))
        if takes:
            await own.port.take()
            raise AssertionError("went on")

    with pytest.raises(ValueError, match="lacks that dtype"):
        own.drive(program())
    assert own.unseen == {}


async def fails_at_once() -> None:
    raise KeyError


@pytest.mark.parametrize(
    ("op", "name"),
    [(Push(torch.zeros(1), 0), "Push"), (Pull(0), "Pull"), (Work("somebody's"), "Work"), (Op[None](), "Op")],
    ids=["push", "pull", "another's work", "op"],
)
def test_other_operations_are_refused_by_name(op: Op[Any], name: str) -> None:
    own, _ = world()

    async def program() -> Any:
        return await op

    with pytest.raises(TypeError, match=rf"node 0 awaited {name}\(.*which the mail world cannot perform"):
        own.drive(program())


def test_collectives_are_refused() -> None:
    own, _ = world()

    async def program() -> Any:
        return await own.port.barrier()

    with pytest.raises(TypeError, match="Barrier"):
        own.drive(program())


def test_coroutines_that_wait_for_each_other_are_found_out() -> None:
    own, _ = world()
    works: dict[str, Work[Any]] = {}

    async def one(other: str) -> Any:
        await own.port.take(0)
        return await works[other]

    async def program() -> Any:
        works["a"] = await own.port.start(one("b"))
        works["b"] = await own.port.start(one("a"))
        return await works["a"]

    with pytest.raises(Deadlock, match="node 0, step 0"):
        own.drive(program())


class Turnstile(HostLock):
    """A lock that lets in as often as `times`."""

    def __init__(self, times: int) -> None:
        self.times, self.log = times, list[str]()

    def acquire(self, timeout_s: float) -> bool:
        self.times -= 1
        self.log.append(f"acquire {timeout_s:g}")
        return self.times >= 0

    def release(self) -> None:
        self.log.append("release")


def test_alone_holds_the_lock_of_the_host() -> None:
    lock = Turnstile(2)
    own, _ = world(lock=lock)

    async def program(port: Any) -> Any:
        return await port.alone(lambda: len(lock.log), 0.0)

    assert own.drive(program(own.port)) == 1
    with pytest.raises(ZeroDivisionError):
        own.drive(failing(own.port))
    with pytest.raises(TimedOut, match="alone"):
        own.drive(program(own.port.within(4)))
    assert lock.log == ["acquire 300", "release", "acquire 300", "release", "acquire 4"]


async def failing(port: Any) -> Program[None]:
    return await port.alone(lambda: 1 // 0, 0.0)  # type: ignore[no-any-return]
