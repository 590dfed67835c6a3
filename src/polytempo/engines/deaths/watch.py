"""`DeathWatch`: a thread of each rank that sees peers end, and the ranks' agreement on the first failure.

rank 1   raises ──────▶ verdict: rank 1 raised …   ┐
rank 2   is killed                                 ├─ the store keeps the first verdict; all ranks write that one
rank 3   sees it end ─▶ verdict: rank 2 was killed ┘   as the last line of their standard error
rank 0   lost a peer ─▶ complaint ─▶ waits for a verdict, or judges by the ranks that are silent

A peer's end on this host wakes the thread (`pidfd_open`); it asks the store twice a second. A rank that hangs learns
so from the store: it writes its stacks, and ends. Cost: a thread that sleeps; 100 µs a second.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from polytempo.core.system.first_failure import FirstFailure, in_short, raised
from polytempo.core.system.notice import Preempted
from polytempo.engines.deaths.exit_cause import MemoryGroup, cause_of_exit, exit_code_by, exit_code_of_zombie, state_of
from polytempo.engines.deaths.rank_process import RankProcess
from polytempo.engines.deaths.verdict import Complaint, judged

LOOK_S = 0.5
"""Seconds between two looks into the store; more in a large world."""
_RANKS_A_LOOK = 256
"""So many ranks share a look of `LOOK_S`: the holder of the store answers at most 512 times a second."""
GRACE_S = 2.0
"""A rank that lost a peer waits for a verdict so long."""
_ASKED_S = 0.5
"""A rank that was asked to end (SIGTERM) is a first failure only if this process is still there afterwards."""
_ASKED_TO_END = (-15, -2, -1)  # SIGTERM, SIGINT, SIGHUP
_VERDICT = "verdict"
Answer = TypeVar("Answer")


class DeathWatch:
    """The watch of rank `rank` of `size`; `store` is the launcher's, for these ranks of this start alone.

    `machine` is equal for processes of one host. `say` writes a line; by default to the standard error. `holds`: the
    store ends with this process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        machine: str,
        *,
        holds: bool = False,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.rank, self.size, self._holds = rank, size, holds
        own = _of_its_own(store)
        self._store, self._clones = Notes(PrefixStore("deaths", own or store)), own is not None
        self._own = RankProcess.of_this(rank, machine)
        self._store.set(f"process/{rank}", self._own.as_json().decode())
        self._memory: dict[int, MemoryGroup | None] = {}
        """The control groups of this host's ranks."""
        self._processes: dict[int, RankProcess] = {rank: self._own}
        self._known: dict[int, str] = {}
        self._held: dict[int, int] = {}
        """Descriptors of ranks that a signal has stopped."""
        self._say = say or _to_standard_error
        self._lock = threading.Lock()
        self.verdict: FirstFailure | None = None
        """The first failure of all, once it is known."""
        self._reported = False
        self._spoken: FirstFailure | None = None
        self._on_death: list[Callable[[FirstFailure], object]] = []
        self._wake, self._waker = os.pipe()
        self._over = self._tolerant = False
        self._thread = threading.Thread(target=self._watch, name="polytempo-deaths", daemon=True)

    # ------------------------------------------------------------------ the loop's side

    def meet(self) -> None:
        """Learn the others' processes. All ranks have made their object before."""
        for rank in range(self.size):
            if rank != self.rank and self._store.has(f"process/{rank}"):
                self._processes[rank] = process = RankProcess.from_json(self._store.get(f"process/{rank}"))
                if process.machine == self._own.machine:
                    self._memory[rank] = MemoryGroup.of(process.pid)

    def begin(self) -> None:
        """Watch the others, as soon as they have met."""
        self.meet()
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            before(kind, error, traceback)
            self.report(error)

        sys.excepthook = hook
        atexit.register(self.end)
        self._thread.start()

    def on_death(self, take: Callable[[FirstFailure], object]) -> None:
        """Call `take` with the first failure, once, when this process reports it or sees it."""
        self._on_death.append(take)

    def tolerate(self) -> None:
        """Other ranks train on without a rank that ends, as with a parameter server: its end is not the run's."""
        self._tolerant = True

    def missing(self) -> str:
        """The ranks that have not come, in words; "" where all are there."""
        with suppress(RuntimeError):
            ranks = [rank for rank in range(self.size) if not self._store.has(f"process/{rank}")]
            if ranks:
                return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))} did not come"
        return ""

    def settle(self, error: BaseException) -> FirstFailure | None:
        """The first failure of the run that `error` ends on this rank. None where the process was asked to end.

        It waits at most `GRACE_S` for the verdict of a rank that knows more.
        """
        if isinstance(error, KeyboardInterrupt | Preempted):
            return None
        complaint = Complaint.of(self.rank, error)
        death = (
            self._judge(complaint) if complaint is not None else self._agree(self._own.died(self.size, raised(error)))
        )
        self._take(death)
        return death

    def report(self, error: BaseException) -> None:
        """Write the line of the first failure for this process, which `error` ends."""
        if self._reported or (death := self.settle(error)) is None:
            return
        self._reported = True
        self._say(str(death))
        _for_torchrun(death, error)
        self._end_stopped(death)
        self._linger()

    def end(self) -> None:
        """Stop watching."""
        if not self._over:
            self._over = True
            if self._clones and self.verdict is None:  # a wait for another kind of store could be long
                with suppress(RuntimeError):
                    self._store.set(f"left/{self.rank}", "")
            with suppress(OSError):
                os.write(self._waker, b".")
            self._thread.join(LOOK_S)

    # ------------------------------------------------------------------ agreement

    def _agree(self, death: FirstFailure) -> FirstFailure:
        """The first verdict, which is this one if there was none."""
        with self._lock:
            if self.verdict is None:
                try:
                    self.verdict = FirstFailure.from_json(self._store.first(_VERDICT, death.as_json().decode()))
                except (RuntimeError, ValueError):  # the store has ended with the process that held it
                    self.verdict = death
            return self.verdict

    def _look(self) -> FirstFailure | None:
        """The verdict in the store."""
        with self._lock:
            if self.verdict is None and self._store.has(_VERDICT):
                self.verdict = FirstFailure.from_json(self._store.get(_VERDICT))
            return self.verdict

    def _judge(self, own: Complaint) -> FirstFailure:
        """The verdict; where none comes in time, this rank's."""
        until_s = time.monotonic() + GRACE_S
        complaints = {self.rank: own}
        try:
            self._store.set(f"complaint/{self.rank}", own.as_json().decode())
            while (death := self._look()) is None:
                for rank in range(self.size):
                    key = f"complaint/{rank}"
                    if rank not in complaints and self._store.has(key):
                        complaints[rank] = Complaint.from_json(self._store.get(key))
                if len(complaints) == self.size or time.monotonic() >= until_s:
                    break
                time.sleep(LOOK_S / 10)
            else:
                return death
        except RuntimeError:  # the store is gone, with rank 0 or with the agent of torchrun
            if self.verdict is not None:
                return self.verdict
            if self._holder_may_be_gone:
                self._known.setdefault(0, cause_of_exit(None))
        ordered = [own, *(complaint for rank, complaint in complaints.items() if rank != self.rank)]
        known = self._known | self._states({rank for rank in self._processes if rank not in complaints})
        return self._agree(judged(self._processes, self.size, ordered, known))

    @property
    def _holder_may_be_gone(self) -> bool:
        """True if rank 0 may hold the store."""
        return self.rank != 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _states(self, ranks: set[int]) -> dict[int, str]:
        """Causes of this host's silent ranks, by the states of their processes."""
        causes = {}
        for rank in ranks - set(self._known):
            process = self._processes[rank]
            if process.machine != self._own.machine:
                continue
            state = state_of(process.pid)
            if not state or state in "ZX":
                causes[rank] = cause_of_exit(exit_code_of_zombie(process.pid), self._memory.get(rank))
            elif state in "Tt":
                with suppress(OSError, AttributeError):
                    self._held[rank] = os.pidfd_open(process.pid)
                causes[rank] = f"is stopped by a signal (SIGSTOP): process {process.pid}"
        return causes

    def _end_stopped(self, death: FirstFailure) -> None:
        """End a rank of this host that a signal holds: it would be there for ever, or until its launcher's patience."""
        process = None if death.rank is None else self._processes.get(death.rank)
        if process is not None and process.rank in self._held and process.machine == self._own.machine:
            with suppress(OSError, AttributeError):
                signal.pidfd_send_signal(self._held[process.rank], signal.SIGKILL)

    def _linger(self) -> None:
        """Let the others read the verdict, if the store ends with this process."""
        if self._holds:
            time.sleep(2 * self._look_s)

    # ------------------------------------------------------------------ the thread

    @property
    def _look_s(self) -> float:
        return LOOK_S * max(1, self.size // _RANKS_A_LOOK)

    def _watch(self) -> None:
        peers = {rank: each for rank, each in self._processes.items() if each.machine == self._own.machine}
        del peers[self.rank]
        poll, ends = select.poll(), _descriptors(peers)
        for descriptor in [*ends, self._wake]:
            poll.register(descriptor, select.POLLIN)
        try:
            while not self._over and self.verdict is None:
                for descriptor, _ in poll.poll(self._look_s * 1e3):
                    if descriptor in ends:
                        poll.unregister(descriptor)
                        self._sees_end(peers[ends[descriptor]], descriptor)
                with suppress(RuntimeError, ValueError):
                    self._look()
            if not self._over and not self._tolerant and self.verdict is not None:
                self._heed(self.verdict)
        finally:
            for descriptor in ends:
                os.close(descriptor)

    def _sees_end(self, process: RankProcess, descriptor: int) -> None:
        code = exit_code_of_zombie(process.pid)
        code = exit_code_by(descriptor) if code is None else code
        if code in _ASKED_TO_END:
            time.sleep(_ASKED_S)
        cause = cause_of_exit(code, self._memory.get(process.rank))
        self._known[process.rank] = cause
        if process.rank == 0 and self._holder_may_be_gone:
            self._store.forget()
        if code == 0 or self._over or self._tolerant:
            return
        death = process.died(self.size, cause)
        if code is not None and code < 0 and code not in (*_ASKED_TO_END, -signal.SIGABRT) and self.verdict is None:
            self._speak(death)  # before the store is asked, which may be gone: a launcher ends this process in moments
        try:
            spoken = self._store.has(f"complaint/{process.rank}") or self._look() is not None
            left = code is None and self._store.has(f"left/{process.rank}")
        except RuntimeError:  # the store ended with rank 0: maybe in order, or this rank's loop will complain
            spoken, left = False, code is None
        if not spoken and not left:
            self._agree(death)

    def _heed(self, death: FirstFailure) -> None:
        """The first failure is known, and this process goes on: its loop will fail, or hangs."""
        self._speak(death)
        self._take(death)
        if death.rank == self.rank and not self._reported and death.cause.startswith("hangs"):
            with suppress(Exception):
                self._say(f"rank {self.rank} hangs here:")
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                self._say(str(death))
            os._exit(1)

    def _speak(self, death: FirstFailure) -> None:
        """One rank of each host speaks for the ranks that a launcher ends before they can."""
        here = [rank for rank, each in self._processes.items() if each.machine == self._own.machine]
        if not self._reported and self._spoken != death and self.rank == min(set(here) - set(self._known)):
            self._spoken = death
            self._say(str(death))

    def _take(self, death: FirstFailure) -> None:
        takes, self._on_death = self._on_death, []
        for take in takes:
            with suppress(Exception):  # a full disk must not hide the failure
                take(death)


class Notes:
    """The ranks' notes in the store. After its first failure the store is gone, and is not asked again: torch writes a
    page to the standard error each time."""

    def __init__(self, store: Store) -> None:
        self._store, self._gone = store, False

    def forget(self) -> None:
        """The process that holds the store has ended."""
        self._gone = True

    def _ask(self, call: Callable[..., Answer], *given: Any) -> Answer:
        if self._gone:
            raise RuntimeError("the store has ended with the process that held it")
        try:
            return call(*given)
        except RuntimeError:
            self._gone = True
            raise

    def set(self, key: str, value: str) -> None:
        """Write a note."""
        self._ask(self._store.set, key, value)

    def has(self, key: str) -> bool:
        """True if there is this note."""
        return self._ask(self._store.check, [key])

    def get(self, key: str) -> bytes:
        """Read a note that is there."""
        return self._ask(self._store.get, key)

    def first(self, key: str, value: str) -> bytes:
        """The first note of all ranks by this name: `value`, if there was none."""
        return self._ask(self._store.compare_set, key, "", value)


def _of_its_own(store: Store) -> Store | None:
    """A connection of its own, where a store has one: a wait in another thread holds up no look."""
    try:
        clone: Store = store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        return clone
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return None


def _descriptors(peers: Mapping[int, RankProcess]) -> dict[int, int]:
    """A descriptor for each process, which can be read once that has ended -> its rank."""
    found = {}
    for rank, process in peers.items():
        with suppress(OSError, AttributeError):  # it is gone already, or this is not Linux
            found[os.pidfd_open(process.pid)] = rank
    return found


def _to_standard_error(line: str) -> None:
    """Write in one piece, also where other threads of this process have stopped."""
    with suppress(OSError):
        os.write(2, f"polytempo: {line}\n".encode(errors="backslashreplace"))


def _for_torchrun(death: FirstFailure, error: BaseException) -> None:
    """Put the line into the file that torchrun's agent quotes in its table of failures."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra: dict[str, Any] = {"py_callstack": in_short(error), "timestamp": str(int(time.time()))}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": str(death), "extraInfo": extra}}, file)
