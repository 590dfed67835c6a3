"""The first failure is named from complaints, exit codes and the store's order: literal tables."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore

from polytempo.core.errors import JobFailed, NotFinite, PeerLost, PolytempoError, TimedOut
from polytempo.core.system.first_failure import FirstFailure
from polytempo.core.system.notice import Preempted
from polytempo.engines.deaths.exit_cause import (
    MemoryGroup,
    cause_of_exit,
    exit_code_by,
    exit_code_of_zombie,
    signal_name,
    state_of,
)
from polytempo.engines.deaths.rank_process import RankProcess
from polytempo.engines.deaths.verdict import Complaint, judged
from polytempo.engines.deaths.watch import DeathWatch
from polytempo.engines.engine import EngineProcess, Failure, Role
from polytempo.engines.processes.failures import blame, died

HOSTS = "a a b b"
LOST, LATE = "lost", "late"


def processes(hosts: str) -> dict[int, RankProcess]:
    return {rank: RankProcess(rank, host, host, 100 + rank, f"{rank}.log") for rank, host in enumerate(hosts.split())}


def complaint(rank: int, kind: str, peer: int = -1) -> Complaint:
    return Complaint(rank, f"rank {rank}: {kind}", kind == LATE, peer)


@pytest.mark.parametrize(
    ("complaints", "known", "line"),
    [
        # one silent rank is the culprit; deadlines mean that it hangs, lost connections that it ended
        ([(0, LATE), (1, LATE), (2, LATE)], {}, "rank 3 of 4 on b hangs: rank 0: late; read 3.log"),
        ([(0, LOST), (1, LOST), (3, LOST)], {}, "rank 2 of 4 on b ended without a word: rank 0: lost; read 2.log"),
        # a complaint that names a rank counts only if that one is silent
        (
            [(0, LOST, 1), (1, LOST, 2), (3, LOST)],
            {},
            "rank 2 of 4 on b ended without a word: rank 0: lost; read 2.log",
        ),
        ([(0, LOST, 2), (1, LOST)], {2: "was killed by SIGKILL"}, "rank 2 of 4 on b was killed by SIGKILL; read 2.log"),
        # the kernel knows more than a complaint
        ([(0, LATE)], {1: "is stopped by a signal"}, "rank 1 of 4 on a is stopped by a signal; read 1.log"),
        # all ranks of a host are silent, all others are there
        (
            [(0, LOST), (1, LOST)],
            {},
            "rank 2 of 4 on b was lost with all 2 ranks of its host: rank 0: lost; read 2.log",
        ),
        # each blames another one
        (
            [(0, LOST, 1), (1, LOST, 0), (2, LOST), (3, LOST)],
            {},
            "rank 1 of 4 on a is blamed by rank 0 (rank 0: lost); read 1.log",
        ),
    ],
)
def test_the_culprit_is_among_those_that_complain_of_nothing(
    complaints: list[tuple[Any, ...]], known: dict[int, str], line: str
) -> None:
    said = [complaint(*each) for each in complaints]
    assert str(judged(processes(HOSTS), 4, said, known)) == f"first failure: {line}"


def test_a_rank_that_has_never_come_is_named_without_host_and_log() -> None:
    death = judged({}, 2, [complaint(0, LATE)], {})
    assert str(death) == "first failure: rank 1 of 2 hangs: rank 0: late"


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "late", "peer"),
    [
        (PeerLost(0, 3, "recv", 2), False, 2),
        (PeerLost(0, 3, "all_reduce", None), False, -1),
        (TimedOut(0, 3, "barrier", 5.0, "rank 1 did not come"), True, 1),
        (TimedOut(0, 3, "recv", 5.0), True, -1),
        (RuntimeError("[../gloo/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1234"), False, -1),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True, -1),
        (caused(JobFailed("the job"), PeerLost(0, 3, "recv", 2)), False, 2),
    ],
)
def test_an_error_of_a_peer_is_a_complaint(error: BaseException, late: bool, peer: int) -> None:
    found = Complaint.of(0, error)
    assert found is not None
    assert (found.late, found.peer) == (late, peer)
    assert Complaint.from_json(found.as_json()) == found


@pytest.mark.parametrize(
    "error",
    [ValueError("timed out"), RuntimeError("shape 4x5"), NotFinite("", 0, 1.0), PolytempoError("x"), MemoryError()],
    ids=["value", "shape", "NaN", "ours", "memory"],
)
def test_an_error_of_its_own_is_none(error: BaseException) -> None:
    assert Complaint.of(0, error) is None


def test_a_circle_of_causes_ends() -> None:
    first, second = JobFailed("a"), JobFailed("b")
    first.__cause__, second.__cause__ = second, first
    assert Complaint.of(0, first) is None


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (3, "ended its program with exit code 3 while others trained on"),
        (None, "ended without a word (SIGKILL, a crash, or an exit of its program)"),
    ],
)
def test_an_exit_code_has_its_cause(code: int | None, cause: str) -> None:
    assert cause_of_exit(code) == cause


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_for_memory_is_counted_by_the_control_group(version: int, tmp_path: Path) -> None:
    events, limit = tmp_path / "events", tmp_path / "limit"
    text = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n" if version == 1 else "low 0\noom 4\noom_kill {}\n"
    events.write_text(text.format(2))
    limit.write_text(f"{64 << 20}\n")
    group = MemoryGroup(events, limit, 2)
    assert cause_of_exit(-9, group) == "was killed by SIGKILL"
    events.write_text(text.format(3))
    assert cause_of_exit(-9, group).startswith("was killed for memory: its control group, which allows 64 MiB,")
    assert cause_of_exit(-11, group) == "was killed by SIGSEGV"
    limit.write_text("max\n")
    assert cause_of_exit(None, group).startswith("was killed for memory: its control group, had none left")


def test_a_zombie_tells_its_exit_code() -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    descriptor = os.pidfd_open(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (exit_code_of_zombie(pid), state_of(pid)) == (-9, "Z")
    os.waitpid(pid, 0)
    assert (exit_code_of_zombie(pid), state_of(pid)) == (None, "")
    assert exit_code_by(descriptor) in (-9, None)  # None: before Linux 6.15
    os.close(descriptor)
    assert (exit_code_of_zombie(os.getpid()), state_of(os.getpid())) == (None, "R")
    assert (signal_name(9), signal_name(99)) == ("SIGKILL", "signal 99")


def test_a_line_has_no_controls_of_a_terminal() -> None:
    assert str(FirstFailure("rank 0", "raised ValueError: \x1b[31mred\nline")) == (
        "first failure: rank 0 raised ValueError:  [31mred line"
    )
    with pytest.raises(ValueError, match="not a death"):
        FirstFailure.from_json(b'{"who": "rank 0"}')


# ---------------------------------------------------------------- agreement in the store


class Watches:
    """The watches of `size` ranks in one process, without their threads."""

    def __init__(self, size: int, folder: Path) -> None:
        self.lines: list[list[str]] = [[] for _ in range(size)]
        self.all = [
            DeathWatch(FileStore(str(folder / "store"), size), rank, size, "m", say=self.lines[rank].append)
            for rank in range(size)
        ]
        for watch in self.all:
            watch.meet()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytempo.engines.deaths.watch.GRACE_S", 0.0)


def test_the_first_verdict_of_the_store_is_everyones(tmp_path: Path) -> None:
    watches = Watches(3, tmp_path)
    watches.all[1].report(ValueError("first"))
    watches.all[0].report(KeyError("later"))
    watches.all[2].report(PeerLost(2, 5, "all_reduce", 0))
    assert len({tuple(lines) for lines in watches.lines}) == 1
    assert "rank 1 of 3" in watches.lines[0][0]
    assert "raised ValueError: first; read " in watches.lines[0][0]


@pytest.mark.usefixtures("patience")
def test_without_a_verdict_the_silent_rank_is_named(tmp_path: Path) -> None:
    watches = Watches(3, tmp_path)
    watches.all[0].report(TimedOut(0, 5, "all_reduce", 1.0, "rank 2 did not come"))
    watches.all[1].report(TimedOut(1, 5, "all_reduce", 1.0))
    assert watches.lines[0] == watches.lines[1] != []
    assert "rank 2 of 3" in watches.lines[0][0]
    assert " hangs: rank 0, step 5: timed out" in watches.lines[0][0]


def test_a_request_to_end_is_no_failure(tmp_path: Path) -> None:
    watches = Watches(2, tmp_path)
    watches.all[0].report(KeyboardInterrupt())
    watches.all[0].report(Preempted(3))
    assert watches.lines == [[], []]
    assert watches.all[1].verdict is None


def test_takers_get_the_first_failure_once(tmp_path: Path) -> None:
    watches, taken = Watches(2, tmp_path), list[FirstFailure]()
    watches.all[0].on_death(taken.append)
    error = ValueError("x")
    assert watches.all[0].settle(error) == watches.all[0].settle(error)
    watches.all[0].report(error)
    assert [death.rank for death in taken] == [0]


def test_torchruns_table_quotes_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    watches = Watches(2, tmp_path)
    watches.all[0].report(ValueError("x"))
    assert watches.lines[0][0] in (tmp_path / "error.json").read_text()


def test_ranks_that_have_not_come_are_named(tmp_path: Path) -> None:
    watch = DeathWatch(FileStore(str(tmp_path / "store"), 4), 0, 4, "m")
    assert watch.missing() == "ranks 1, 2, 3 did not come"
    DeathWatch(FileStore(str(tmp_path / "store"), 4), 2, 4, "m")
    assert watch.missing() == "ranks 1, 3 did not come"


# ---------------------------------------------------------------- our own launcher


def process(rank: int, code: int, failure: Failure | None = None, **more: Any) -> EngineProcess:
    role = Role("rank", rank, rank)
    return EngineProcess(role, Path(f"/runs/a/logs/{role}.log"), exit_code=code, failure=failure, **more)


WAITED = Failure("TimedOut", True, "rank 0, step 3: timed out")


def test_our_launchers_error_ends_with_the_line() -> None:
    error = died([process(0, 1, WAITED), process(1, -9, host="n2", ended=1)], 2)
    assert error.__notes__ == [
        "first failure: rank 1 of 2 on n2 was killed by SIGKILL; read /runs/a/logs/rank-1.log",
    ]
    assert error.death is not None
    assert error.death.rank == 1
    assert blame(error, FirstFailure("another", "x")).death is error.death


def test_a_rank_that_waited_is_not_the_culprit() -> None:
    error = died([process(0, 1, WAITED)], 2, holding=(process(1, 0, host="n2"), "hangs"))
    assert str(error.death) == (
        "first failure: rank 1 of 2 on n2 hangs: rank 0 raised TimedOut: rank 0, step 3: timed out (exit code 1); "
        "read /runs/a/logs/rank-1.log"
    )


def test_a_lost_host_is_the_cause_rather_than_the_signal() -> None:
    error = died([process(1, -9, host="n2", why="ended with its agent on n2, which was silent for 10 s")], 2)
    assert str(error.death).startswith("first failure: rank 1 of 2 on n2 ended with its agent on n2, which was silent")
