"""`Engine`: who starts the processes of a run, and nothing else.

program ── start(role, host) ─▶ ┌ engine ┐ ─▶ processes     fork, a new interpreter, another host, a batch system
        ◀─ poll(wait_s) ──────  │        │ ◀─ their ends and results
        ── stop(process) ─────▶ └────────┘                  address: where processes find the program

Decisions (restarts, the end of a run) are made above it, by code that knows processes by their roles. It does not
assume that functions travel to them, that they share folders with it, or that they are on its host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from polytempo import engines
from polytempo.engines.engine_name import EngineName
from polytempo.spec.run_spec import RunSpec

Result = Mapping[str, Any] | Sequence[Any] | float | None
"""A value that a process hands back: plain data, as JSON."""


class Role(NamedTuple):
    """The part of a process in a run."""

    kind: str
    """ "rank" of a collective run, "member" of an elastic one; "worker", "copy" of a shard or "evaluator" where there
    is a parameter server."""
    node: int
    """The number in the run's topology: a worker keeps its node over its lives, a copy is a new node each time."""
    life: int
    """The number among all processes of the run."""
    incarnation: int = 1
    shard: int = -1
    blank: bool = False
    """True for a copy that begins without the shard's state, because another copy will send it."""

    def __str__(self) -> str:
        if self.kind == "copy":
            return f"shard-{self.shard}-node-{self.node}"
        name = f"{self.kind}-{self.node}" if self.kind in ("rank", "member", "worker") else self.kind
        return name if self.incarnation == 1 else f"{name}.{self.incarnation}"


class Failure(NamedTuple):
    """The error of a process: the exception's name, a mark if it only reports another process's end, and its
    message."""

    error: str
    symptom: bool
    message: str = ""
    """The exception's message, on one line and not too long."""
    facts: Mapping[str, Any] | None = None
    """The values that a `NotFinite` names."""


@dataclass(eq=False)
class EngineProcess:
    """A process that an engine has started, as the engine knows it since the last `poll`."""

    role: Role
    log: Path
    """The process's output, among this host's files."""
    exit_code: int | None = None
    """The code of `os.waitstatus_to_exitcode` (a signal is negative); None while it runs."""
    stopped: bool = False
    """True while a signal (SIGSTOP, SIGTSTP, …) holds it. A tracer that holds it is not seen."""
    ended: int = 0
    """The number of the look at the processes that found its end; processes with one number ended together."""
    result: bytes | None = None
    """The process's result as JSON, if it ended well."""
    failure: Failure | None = None
    """The reason for its failure, if it could report one."""
    host: str = ""
    """The name of its host; "" for this one."""
    why: str = ""
    """The cause of its end, a verb and its circumstances, where the exit code does not tell it: a lost host, a kill for
    memory."""

    @property
    def memory_bytes(self) -> int | None:
        """Resident memory now, shared pages included; None where that is not known."""
        return None

    @property
    def failed(self) -> bool:
        """True if it has ended without leaving a result."""
        return self.exit_code is not None and (self.exit_code != 0 or self.result is None)


class EngineAddress(NamedTuple):
    """The place where the processes of an engine meet each other and their program."""

    host: str
    """An address of this process that they reach."""
    threads: int
    """The threads of each process."""
    home: Path | None = None
    """A private folder (mode 0700) that ends with the run and that all processes have; None: they share no folder."""
    inherits: bool = False
    """True if they have this process's memory, as forked ones do: then shared memory (arenas) can be offered."""
    grace_s: float = 0.0
    """Copies of shards may save for so long after this process is lost (`lost_launcher.SAVE_AND_LEAVE`); 0: not at
    all."""
    num_hosts: int = 1
    """The number of hosts; `start` takes a host's number."""
    shares_files: bool = True
    """True if they certainly see this host's folders; others may reach the run's by `launcher_files`."""


class Engine(Protocol):
    """Starts processes, sees them end, and ends them."""

    @property
    def address(self) -> EngineAddress:
        """The meeting place of its processes."""

    def start(self, role: Role, host: int = 0) -> EngineProcess:
        """Start the process of `role` on the topology's host `host`; -1: on one with few processes."""

    def poll(self, wait_s: float = 0.0) -> list[EngineProcess]:
        """The processes that have ended since the last poll; waits for one at most for `wait_s`."""

    def stop(self, process: EngineProcess | None = None) -> None:
        """End one process for certain and immediately; `poll` will find it. None: all, politely first, and wait."""


@runtime_checkable
class Preempting(Protocol):
    """An engine that can also pass on that the run has to leave soon."""

    def preempt(self) -> None:
        """Ask all processes to save and leave, by SIGTERM; `poll` sees them end."""


@runtime_checkable
class AskingWhere(Protocol):
    """An engine that can also let processes write where they are."""

    def ask_where(self, processes: Sequence[EngineProcess]) -> None:
        """Let these processes write their stacks into their logs."""


class Launch(NamedTuple):
    """The request for which an engine is opened: one run, or one function."""

    work: Callable[[Role], Result]
    """The function of a process, for engines with processes that have this one's functions."""
    spec: RunSpec | None
    """The run, for engines with processes that find everything by name. None: a function, which has no name."""
    setting: Callable[[], Mapping[str, Any]]
    """Further facts for such a process, at this moment, as plain data."""
    workers: int
    """The number of processes that compute at the same time; they share the cores."""
    most: int
    """The most processes that there may be in all, replacements of others included."""
    threads: int | None = None
    """Threads of each; None: as the engine sees fit."""
    logs: Path | None = None
    """The folder of logs; None: they end with the run."""


@runtime_checkable
class EngineSetup(Protocol):
    """The type of `engine=`: it opens an engine for a run, and closes it after the run, however that ends."""

    def open(self, launch: Launch) -> AbstractContextManager[Engine]:
        """The engine. Errors: ValueError if it cannot do what `launch` asks for."""


def parse_engine(text: str | EngineName) -> EngineSetup:
    """The engine of `NAME[:address]`, as on the command line: "local", "ssh:n1,n2".

    Each engine's class has `from_address`, which reads the address; a class without it takes none. Errors: ValueError
    for an unknown name, an address that the engine does not take, and the engine's own refusals.
    """
    name, address = EngineName.of(text) if isinstance(text, str) else text
    setup = getattr(engines, name)
    if hasattr(setup, "from_address"):
        return checked_engine(setup.from_address(address or ""))
    if address is not None:
        raise ValueError(f"engine {name} has no address, and '{name}:{address}' gives one; write --engine {name}")
    return checked_engine(setup())


def checked_engine(engine: object) -> EngineSetup:
    """The engine that is given or named; `Local` for None. Errors: ValueError for a class, and for other objects."""
    if engine is None or isinstance(engine, str):
        return parse_engine(engine or "local")
    if isinstance(engine, type) or not isinstance(engine, EngineSetup):
        raise ValueError(f"an engine is an object such as pt.engines.subprocess(), got {engine!r}")
    return engine
