"""An agent: one process on a host, which starts the run's processes there, and reports about them to the run's head.

head ── Welcome, StartProcess, StopProcess, Close ──▶ agent ── fork ──▶ process of the run, process of the run, …
     ◀── Hello, AgentBeat, LogLines, Ended, Bye ──┘               it has torch loaded, so they start in milliseconds

It ends, with all its processes, on an order of the head, after `PATIENCE_S` without a connection to the head, soon
after the head's port is closed, or when the process that started it is gone. Without a head, copies of shards save
first (see `lost_launcher`). Its files end with it, also if it is killed (`janitor`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from polytempo import jobs
from polytempo.core.errors import PolytempoError
from polytempo.core.system.files import made
from polytempo.engines.engine import EngineAddress, EngineProcess, Result, Role
from polytempo.engines.join.init import host_identity
from polytempo.engines.local_engine import LocalEngine
from polytempo.engines.processes import janitor
from polytempo.engines.processes.capacity import limits
from polytempo.engines.processes.command_process import CommandRun, is_command, perform_command
from polytempo.engines.processes.fork import default_signals
from polytempo.engines.remote.messages import (
    ECHO,
    SAVE_S,
    AgentBeat,
    AskWhere,
    Bye,
    Close,
    Ended,
    FromAgent,
    Hello,
    LogLines,
    PreemptAll,
    RunData,
    StartProcess,
    StopProcess,
    ToAgent,
    Welcome,
)
from polytempo.engines.remote.network import address_towards, interface_of, refused
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.runs.own_loop.shard_copy import hold_shard_of, is_loop
from polytempo.runs.process.host_mail import HostMemory, host_memory
from polytempo.runs.process.program import perform
from polytempo.runs.served.lost_launcher import SAVE_AND_LEAVE
from polytempo.spec.run_spec import RunSpec
from polytempo.wire.channel import ChannelClient

PATIENCE_S = 15.0
"""An agent waits this long for the head to be reachable again."""
BEAT_S = 0.25
_STANDARD_ERROR = 2
_PROBE_S, _MOST_REFUSALS = 0.5, 3
"""The interval of probes of the head's port, and the number of refusals in a row that mean its end."""
_TICK_S = 0.05
_LOG_BYTES = 64 << 10
_MOST_LOG_BYTES = 16 << 20
"""No more bytes of one process's log travel: some jobs print without end."""
_FAREWELL_S = 2.0

Channel = ChannelClient[ToAgent, FromAgent]


def serve_head(ticket: AgentTicket, parent: int) -> None:
    """Be an agent until the run is over, or `parent` has ended.

    PolytempoError if the head cannot be reached, or `parent` has ended before.
    """
    home = Path(tempfile.gettempdir()).absolute() / f"polytempo-{secrets.token_hex(4)}"
    with janitor.swept(home, parent) as notes, _connected(ticket) as channel:
        channel.send(_hello(ticket))
        while (first := channel.take(_TICK_S)) is None:
            if channel.parted_s > PATIENCE_S or os.getppid() != parent:
                raise PolytempoError(
                    f"this agent could not join the run at {ticket.head} within {PATIENCE_S:g} s; see that this host "
                    "reaches that address and port, and that the run is still there"
                )
        if isinstance(first, Welcome):
            data = _pieces(channel, first.pieces, parent)
            _Agent(channel, first, data, home, notes, parent).run()


def _pieces(channel: Channel, number: int, parent: int) -> bytes:
    """The bytes that follow a `Welcome`. PolytempoError if they stop."""
    found: list[bytes] = []
    while len(found) < number:
        message = channel.take(_TICK_S)
        if isinstance(message, RunData):
            found.append(message.data)
        elif channel.parted_s > PATIENCE_S or os.getppid() != parent:
            raise PolytempoError(
                f"the head of the run at {channel.address} has gone after {len(found)} of {number} parts"
            )
    return b"".join(found)


@contextlib.contextmanager
def _connected(ticket: AgentTicket) -> Iterator[Channel]:
    channel: Channel = ChannelClient(ticket.head, ticket.keys, ToAgent)  # type: ignore[arg-type] # a union of types
    try:
        yield channel
    finally:
        channel.close(_FAREWELL_S)


def _hello(ticket: AgentTicket) -> Hello:
    return Hello(ticket.number, host_identity(), socket.gethostname(), address_towards(ticket.head), limits().cores)


class _Agent:
    def __init__(self, channel: Channel, welcome: Welcome, data: bytes, home: Path, notes: int, parent: int) -> None:
        self._channel, self._parent, self._spec, self._data = channel, parent, welcome.spec, data
        self._orders: dict[int, StartProcess] = {}
        self._logs: dict[int, _Log] = {}
        self._ended: dict[int, Ended] = {}
        """The sent messages about ended processes; they may have been lost."""
        self._processes: dict[int, EngineProcess] = {}
        self._address = address_towards(channel.address)
        made(home / "logs")
        where = EngineAddress(self._address, welcome.threads, home, inherits=True)
        self._engine = LocalEngine(self._perform, where, notes, home / "logs", welcome.most)
        self._leaves_until_s: float | None = None
        """The deadline of this host if it has to leave."""
        self._beat_at_s = self._probe_at_s = 0.0
        self._refusals = 0
        self._number, self._home = welcome.number, home
        self._memory: HostMemory | None = None

    def run(self) -> None:
        """Obey the head until the run is over, the head is gone, or this host has to leave."""
        _on_sigterm(lambda number, frame: self._leave())
        try:
            while not self._head_is_lost:
                message = self._channel.take(_TICK_S)
                if isinstance(message, Close) or self._has_left:
                    break
                if message is not None:
                    self._obey(message)
                self._tell()
            else:
                self._save()
        finally:
            _on_sigterm(end_politely)
            self._engine.stop()
            self._tell()
            self._channel.send(Bye())

    @property
    def _head_is_lost(self) -> bool:
        """True if the head is out of reach for long, or for a short time if its port is closed."""
        if os.getppid() != self._parent:
            return True
        parted_s, now_s = self._channel.parted_s, time.monotonic()
        if parted_s <= _PROBE_S:
            return False
        if now_s >= self._probe_at_s:
            self._probe_at_s = now_s + _PROBE_S
            self._refusals = self._refusals + 1 if refused(self._channel.address, _PROBE_S) else 0
        return parted_s > PATIENCE_S or self._refusals >= _MOST_REFUSALS

    def _save(self) -> None:
        """Let copies of shards save, because the run cannot go on without the head."""
        copies = [process for process in self._processes.values() if process.role.kind == "copy"]
        self._engine.signal(copies, SAVE_AND_LEAVE)
        until_s = time.monotonic() + SAVE_S
        while any(copy.exit_code is None for copy in copies) and time.monotonic() < until_s:
            self._engine.poll(_TICK_S)

    def _obey(self, message: ToAgent) -> None:
        match message:
            case StartProcess(role=role) if role["life"] in self._ended:
                self._channel.send(self._ended[role["life"]])
            case StartProcess(role=role) if role["life"] not in self._orders:
                self._start(message)
            case StopProcess(life) if life in self._processes:
                self._engine.stop(self._processes[life])
            case PreemptAll():
                self._engine.preempt()
            case AskWhere(life) if life in self._processes:
                self._engine.ask_where([self._processes[life]])
            case _:
                pass

    def _leave(self) -> None:
        """Handle SIGTERM of Kubernetes and spot machines: the processes of this host save and end, then the agent."""
        grace_s = float(json.loads(self._spec).get("options", {}).get("grace_s", 30.0))
        self._leaves_until_s = time.monotonic() + grace_s
        self._beat_at_s = 0.0  # the head should know soon
        _on_sigterm(end_politely)
        self._engine.preempt()

    @property
    def _has_left(self) -> bool:
        if self._leaves_until_s is None:
            return False
        return not self._processes or time.monotonic() > self._leaves_until_s

    def _start(self, order: StartProcess) -> None:
        role = Role(**order.role)
        if self._leaves_until_s is not None and role.kind == "member":  # it would take part for a moment at most
            self._channel.send(Ended(role.life, -signal.SIGTERM))
            return
        self._orders[role.life] = order
        if self._memory is None:  # before the first of them is forked
            self._memory = host_memory(json.loads(order.setting), self._number, self._home)
        process = self._engine.start(role)
        self._processes[role.life], self._logs[role.life] = process, _Log(process.log)

    def _perform(self, role: Role) -> Result:
        order = self._orders[role.life]
        setting: dict[str, Any] = json.loads(order.setting)
        os.environ.update(_environment(order, setting, self._address))
        text = json.loads(self._spec)
        if is_command(text):
            return perform_command(CommandRun.from_plain(text), setting["name"], setting["environment"])
        if is_loop(text):
            return hold_shard_of(text, self._data, role, setting, self._address)
        return perform(RunSpec.from_json(self._spec, jobs.find), role, setting, self._address, self._memory)

    def _tell(self) -> None:
        """Send new logs, ends of processes, and now and then a beat."""
        gone = self._engine.poll()
        for life, log in self._logs.items():
            for text in log.news():
                self._channel.send(LogLines(life, text))
                if os.environ.get(ECHO) == "1":
                    with contextlib.suppress(OSError):
                        os.write(_STANDARD_ERROR, text)
        for process in gone:
            life, failure = process.role.life, process.failure
            plain = None if failure is None else (*failure[:3], None if failure[3] is None else dict(failure[3]))
            assert process.exit_code is not None
            self._ended[life] = Ended(life, process.exit_code, process.result, plain, process.why)
            self._channel.send(self._ended[life])
            del self._processes[life], self._logs[life]
        now_s = time.monotonic()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + BEAT_S
            stopped = tuple(life for life, process in self._processes.items() if process.stopped)
            leaving = self._leaves_until_s is not None
            self._channel.send(AgentBeat(stopped, tuple(self._processes), leaving))


class _Log:
    """Reads the lines that a process has written since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0

    def news(self) -> Iterator[bytes]:
        """The new text, in parts; the last part of a log that is cut says so."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read_bytes)
            while self._read_bytes < _MOST_LOG_BYTES and (text := file.read(_LOG_BYTES)):
                self._read_bytes += len(text)
                yield text
                if self._read_bytes >= _MOST_LOG_BYTES:
                    yield b"\n(the rest of this log does not travel: it is too long)\n"


def _environment(order: StartProcess, setting: dict[str, Any], address: str) -> dict[str, str]:
    """The variables of a process of the run, for `environment.recognise`, gloo and NCCL."""
    interface = interface_of(address)
    named = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {
        **{name: os.environ.get(f"POLYTEMPO_{name}", value) for name, value in named.items()},
        **({"POLYTEMPO_RENDEZVOUS": setting["rendezvous"]} if "rendezvous" in setting else {}),
        "POLYTEMPO_LOCAL_RANK": str(order.local_rank),
        "POLYTEMPO_LOCAL_SIZE": str(order.local_size),
        "POLYTEMPO_HOST": str(order.host),
    }


def _on_sigterm(handler: Callable[[int, FrameType | None], object]) -> None:
    """Set the handler of SIGTERM, if this is a process of its own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def end_politely(number: int, frame: object) -> None:
    """Handle SIGTERM and SIGINT of an agent's process: it unwinds, and its processes end with it."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def be_agent(parent: int) -> int:
    """Be the agent of `python -m polytempo.agent` until the end of the run or of `parent`; returns the exit code."""
    default_signals()  # the launcher held some back while it started this process
    signal.signal(signal.SIGTERM, end_politely)
    signal.signal(signal.SIGINT, end_politely)
    try:
        ticket = AgentTicket.read(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
        _warm_up()
        serve_head(ticket, parent)
    except (PolytempoError, ValueError, OSError) as error:
        print(f"polytempo agent: {error}", file=sys.stderr)
        return 1
    return 0


def _warm_up() -> None:
    """Make an optimizer's first step here, because torch loads modules in it, and not in each process's training."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    optimizer.zero_grad()
    optimizer.step()
