"""An agent as the child of a Ray actor or a dask worker: it is started, watched and ended, and nothing is raised."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from polytempo.engines.remote import held_agent
from polytempo.engines.remote.held_agent import AgentHolder

pytestmark = pytest.mark.process

STUB = "agent_stub"
LONG_S = 60.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def held(holder: AgentHolder, note: Path, do: str, look_s: float | None = None) -> tuple[threading.Thread, list[str]]:
    """A thread that holds an agent which has read its ticket, and the value of `hold`."""
    said: list[str] = []
    ticket = json.dumps({"do": do, "note": str(note)})
    thread = threading.Thread(target=lambda: said.append(holder.hold(ticket, look_s)))
    thread.start()
    until_s = time.monotonic() + LONG_S
    while not note.exists() or not note.read_text():
        assert time.monotonic() < until_s
        thread.join(0.01)
    return thread, said


@pytest.mark.parametrize(
    ("code", "say", "how"),
    [
        (0, "", "ended with exit code 0"),
        (3, "first\nno way to the head\n\n", "ended with exit code 3 and said: no way to the head"),
    ],
)
def test_it_says_how_an_agent_has_ended(code: int, say: str, how: str) -> None:
    assert AgentHolder(STUB).hold(json.dumps({"do": "end", "code": code, "say": say})) == how


def test_another_thread_ends_it(tmp_path: Path) -> None:
    holder = AgentHolder(STUB)
    thread, said = held(holder, tmp_path / "note", "wait")
    holder.end()
    holder.end()
    thread.join(LONG_S)
    assert said == ["was killed by signal 15 and said: waiting"]


def test_one_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_agent, "_END_S", 0.1)
    holder = AgentHolder(STUB)
    thread, said = held(holder, tmp_path / "note", "stubborn")
    holder.end()
    thread.join(LONG_S)
    assert said[0].startswith("was killed by signal 9")


def test_one_that_was_ended_before_it_began_does_not_begin() -> None:
    holder = AgentHolder(STUB)
    holder.end()
    assert holder.hold("{}") == "was ended before it began"


def test_one_that_is_unwanted_ends(tmp_path: Path) -> None:
    class Cancelled(AgentHolder):
        def unwanted(self) -> bool:
            return (tmp_path / "cancelled").exists()

    thread, said = held(Cancelled(STUB), tmp_path / "note", "wait", look_s=0.01)
    (tmp_path / "cancelled").touch()
    thread.join(LONG_S)
    assert said[0].startswith("was killed by signal 15")


def test_what_cannot_be_started_raises_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Raised errors are logged with their arguments, and the ticket is one."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert AgentHolder(STUB).hold("{}").startswith("could not be started: ")
