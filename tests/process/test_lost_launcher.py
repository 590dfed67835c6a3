"""A launcher that is lost: the shards save acknowledged entries, leave, and the run goes on from there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.core import Strategy
from polytempo.core.arithmetic.ranges import Ranges
from polytempo.engines.engine import EngineProcess, Launch, Role
from polytempo.engines.local_engine import Local, LocalEngine
from polytempo.runs.served.lost_launcher import SAVE_AND_LEAVE, number_after
from polytempo.runs.served.run_snapshot import _with_parts, read_run_snapshot, resumed
from polytempo.runs.served.served_run import ServedRun
from polytempo.server.snapshots.snapshot import complete
from process.test_served_resume import EPOCHS, SHARDS, TICKETS, WORKERS, counted, counting, strategy

pytestmark = pytest.mark.process

LONG_S = 30.0


class Lost(Exception):
    """The launcher is gone."""


class Losing:
    """The local engine, with a launcher that is deaf once `enough()`: agents then order copies to save, and end the
    rest."""

    def __init__(self, enough: Callable[[], bool], spare: Callable[[Role], bool] = lambda role: True) -> None:
        self._enough, self._spare = enough, spare

    @contextmanager
    def open(self, launch: Launch) -> Iterator[LocalEngine]:
        """See `EngineSetup`."""
        with Local().open(launch) as inner:
            yield _Engine(inner, self._enough, self._spare)


class _Engine:
    def __init__(self, inner: LocalEngine, enough: Callable[[], bool], spare: Callable[[Role], bool]) -> None:
        self._inner, self._enough, self._spare = inner, enough, spare
        self.address = inner.address._replace(grace_s=LONG_S)
        self.stop = inner.stop
        self._started: list[Any] = []

    def start(self, role: Role, host: int = 0) -> EngineProcess:
        """See `Engine`."""
        self._started.append(self._inner.start(role, host))
        return self._started[-1]

    def poll(self, wait_s: float = 0.0) -> list[EngineProcess]:
        """See `Engine`; agents act like this when they hear nothing of the launcher any more."""
        if not self._enough():
            return self._inner.poll(wait_s)
        copies = [each for each in self._started if each.role.kind == "copy"]
        for copy in copies:
            if self._spare(copy.role):
                os.kill(copy.pid, SAVE_AND_LEAVE)
            else:
                self._inner.stop(copy)
        until_s = time.monotonic() + LONG_S
        while any(copy.exit_code is None for copy in copies) and time.monotonic() < until_s:
            self._inner.poll(0.1)
        raise Lost([copy.exit_code for copy in copies])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[ServedRun]:
    """The runs that have begun."""
    made: list[ServedRun] = []
    begin = ServedRun.__init__

    def noting(self: ServedRun, *given: Any) -> None:
        begin(self, *given)
        made.append(self)

    monkeypatch.setattr(ServedRun, "__init__", noting)
    return made


def lost(out: Path, how: Strategy, run: list[ServedRun], batches: int, **more: Any) -> list[int]:
    """A run with a launcher that is lost after so many batches; the exit codes of its copies."""

    def enough() -> bool:
        return sum(last - first + 1 for first, last in run[-1].scheduler.done) >= batches

    engine = Losing(enough, **{"spare": more.pop("spare")} if "spare" in more else {})
    with pytest.raises(Lost) as seen:
        pt.run(counting(), how, WORKERS, epochs=EPOCHS, threads=1, out=out, engine=engine, **more)  # type: ignore[arg-type]
    codes: list[int] = seen.value.args[0]
    return codes


@pytest.mark.parametrize(
    "how",
    [strategy(replicas=1), pt.strategies.backup_workers(backups=0, shards=SHARDS)],
    ids=["two copies", "synchronous"],
)
def test_what_was_acknowledged_is_saved_and_each_ticket_counts_once(
    how: Strategy, tmp_path: Path, run: list[ServedRun]
) -> None:
    codes = lost(tmp_path, how, run, 50, checkpoint_every=20)
    assert set(codes) == {0}
    number, checkpoint = number_after(0), tmp_path / "checkpoint"
    assert complete(checkpoint, number, SHARDS)
    saved = _with_parts(
        checkpoint, SHARDS, read_run_snapshot(checkpoint, number), run[-1].program.plan.service.numbers_per_batch
    )
    for applied in saved.applied:
        for first, last in run[-1].scheduler.done:
            assert Ranges(applied).covers(first, last), "workers had heard that these were applied"
    assert saved.is_one_step, "nothing new was dealt, so the shards came to rest together"
    result = pt.run(counting(), how, WORKERS, epochs=EPOCHS, resume=True, threads=1, out=tmp_path)
    assert result.samples == TICKETS * EPOCHS
    if "async" in str(how):
        assert result.parameters_sha256 == counted(EPOCHS)
    assert run[-1].run_snapshot is not None
    assert run[-1].run_snapshot.number == number


def test_a_launcher_may_be_lost_again_and_a_run_that_ends_leaves_no_part_of_a_snapshot(
    tmp_path: Path, run: list[ServedRun]
) -> None:
    lost(tmp_path, strategy(), run, 30, checkpoint_every=500)
    lost(tmp_path, strategy(), run, 130, checkpoint_every=500, resume=True)
    assert run[-1].run_snapshot is not None
    assert run[-1].run_snapshot.number == number_after(0), "before any snapshot was ordered"
    result = pt.run(
        *(counting(), strategy(), WORKERS),
        epochs=EPOCHS,
        resume=True,
        threads=1,
        out=tmp_path,
        engine=Losing(lambda: False),  # type: ignore[arg-type]
    )
    assert result.parameters_sha256 == counted(EPOCHS)
    second = number_after(number_after(0))
    assert resumed(tmp_path / "checkpoint", SHARDS, {}).run_snapshot.number > second
    assert not list((tmp_path / "checkpoint").glob(f"*{number_after(second)}*"))


def test_the_copy_behind_saves_where_the_first_is_lost_as_well(tmp_path: Path, run: list[ServedRun]) -> None:
    first = {WORKERS + 2 * shard for shard in range(SHARDS)}
    how = strategy(replicas=1)
    codes = lost(tmp_path, how, run, 50, checkpoint_every=20, spare=lambda role: role.node not in first)
    assert sorted(codes) == [-9, -9, 0, 0]
    result = pt.run(counting(), how, WORKERS, epochs=EPOCHS, resume=True, threads=1, out=tmp_path)
    assert result.parameters_sha256 == counted(EPOCHS)
    assert run[-1].run_snapshot is not None
    assert run[-1].run_snapshot.number == number_after(0)
