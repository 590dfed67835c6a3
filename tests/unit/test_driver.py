"""The driver of coroutines: every answer and every error reaches the `await` that asked for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import polytempo
from polytempo.cluster import Cluster, Link
from polytempo.core import WAITING, Op, Port, Task, interpreted, world_port
from polytempo.core.op import Compute, Now
from polytempo.worlds import VirtualWorld

PORT = world_port(0, [0])


async def two_ops() -> list[Any]:
    """The outcomes of two operations."""
    said: list[Any] = []
    for op in (PORT.now(), PORT.compute(lambda: None, 1.0)):
        try:
            said.append(await op)
        except ValueError as error:
            said.append(str(error))
    return said


def test_an_operation_is_answered_at_once_or_when_it_is_done() -> None:
    asked: list[type] = []

    def begin(op: Op[Any]) -> Any:
        asked.append(type(op))
        return 1.5 if isinstance(op, Now) else WAITING

    task = Task(two_ops())
    assert task.resume(begin) is False
    assert asked == [Now, Compute]
    assert not task.done
    assert task.resume(begin, 7) is True
    assert task.result() == [1.5, 7]


def test_what_begin_raises_is_raised_at_the_await() -> None:
    def begin(op: Op[Any]) -> Any:
        raise ValueError(type(op).__name__)

    task = Task(two_ops())
    assert task.resume(begin) is True
    assert task.result() == ["Now", "Compute"]


def test_an_error_may_come_instead_of_an_answer_and_what_is_not_caught_is_the_result() -> None:
    task = Task(two_ops())
    task.resume(lambda op: WAITING)
    task.resume(lambda op: WAITING, error=ValueError("late"))
    assert task.resume(lambda op: WAITING, error=KeyError("unexpected")) is True
    with pytest.raises(KeyError, match="unexpected"):
        task.result()


def test_a_finished_task_is_not_resumed() -> None:
    task = Task(two_ops())
    task.resume(lambda op: 0)
    assert task.resume(lambda op: pytest.fail("asked again"), 3) is True
    assert task.result() == [0, 0]


def test_a_program_inside_another_one_has_its_operations_performed_by_it() -> None:
    async def perform(op: Op[Any]) -> Any:
        if isinstance(op, Now):
            raise ValueError("no clock here")
        return [await op]

    async def outer(port: Port) -> Any:
        return await interpreted(two_ops(), perform)

    assert VirtualWorld(Cluster(Link(0.0, 1.0)), 1).run(outer).results == [["no clock here", [None]]]


def test_what_is_no_exception_ends_the_inner_program_which_cannot_catch_it() -> None:
    class Over(BaseException):
        pass

    closed: list[str] = []

    async def inner() -> None:
        try:
            await PORT.now()
        except Exception:
            closed.append("caught")
        finally:
            closed.append("closed")

    async def perform(op: Op[Any]) -> Any:
        raise Over

    async def outer(port: Port) -> str:
        try:
            await interpreted(inner(), perform)
        except Over:
            return "over"
        return "went on"

    assert VirtualWorld(Cluster(Link(0.0, 1.0)), 1).run(outer).results == ["over"]
    assert closed == ["closed"]


def test_no_other_file_resumes_coroutines() -> None:
    source = Path(polytempo.__file__).parent
    resumes = re.compile(r"\.throw\(|(coroutine|program)\.send\(")
    found = {str(p.relative_to(source)) for p in source.rglob("*.py") if resumes.search(p.read_text(encoding="utf-8"))}
    assert found == {"core/driver.py"}
