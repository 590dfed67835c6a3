"""Engines for several hosts: agents start, watch and end a run's processes. Here each agent is a child of the test."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.engines.engine import EngineProcess, Launch, Role
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.remote.command_agents import ChildAgents
from polytempo.engines.remote.remote_engine import RemoteEngine
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.engines.ssh_engine import Ssh
from polytempo.runs.served import run_served
from polytempo.runs.served.run_served import Launcher
from polytempo.server.message import Ask, Message, Outbox
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.wire.keys import make_keys

pytestmark = [pytest.mark.process, pytest.mark.timeout(600), pytest.mark.usefixtures("none_left_by_agents")]

DIGITS = pt.jobs.find("digits")
LONG_S = 120.0
OWN = """
import os, threading
from polytempo.jobs.digits import job as digits
from dataclasses import replace

def read(given):
    if os.environ["POLYTEMPO_RANK"] == "0":
        raise OSError("no such data")
    print("rank", os.environ["POLYTEMPO_RANK"], "waits", flush=True)
    threading.Event().wait()

job = replace(digits, name="own", data=read)
"""
LAUNCHER = """
import contextlib, sys
import polytempo as pt

class Telling:
    @contextlib.contextmanager
    def open(self, launch):
        agents = pt.engines.ssh(["a"], sys.executable, ("env", "HOST={host}"), "127.0.0.1")
        with agents.open(launch) as engine:
            print("open", flush=True)
            yield engine

pt.run(pt.jobs.find("digits"), pt.strategies.sync_sgd(), 1, epochs=10_000, engine=Telling())
"""


def agents(*names: str) -> Ssh:
    """An engine with one agent a name, each behind a command that is not ssh."""
    return Ssh(names, python=sys.executable, command=("env", "HOST={host}"), address="127.0.0.1")


def awaited(engine: RemoteEngine) -> EngineProcess:
    gone = engine.poll(LONG_S)
    assert gone, "no process has ended"
    return gone[0]


def test_the_four_calls(tmp_path: Path) -> None:
    """One process fails and says why; one is ended alone; the last one ends with its agent."""
    (tmp_path / "own.py").write_text(OWN)
    job = pt.jobs.find(f"{tmp_path}/own.py:job")
    spec = RunSpec.of(job, pt.strategies.sync_sgd(), 3, RunOptions(steps=2))
    meeting = Rendezvous.held("127.0.0.1")
    launch = Launch(lambda role: None, spec, lambda: {"rendezvous": meeting.url}, 3, 3, 1, tmp_path / "logs")
    with agents("a").open(launch) as engine:
        assert (engine.address.host, engine.address.num_hosts) == ("127.0.0.1", 1)
        failing, first, second = (engine.start(Role("rank", rank, rank)) for rank in range(3))
        assert not any(secret in words for words in command_lines() for secret in secrets_of(engine, meeting))
        assert awaited(engine) is failing
        assert (failing.exit_code, failing.result) == (1, None)
        assert failing.failure is not None, failing.log.read_text()
        assert "no such data" in failing.failure.message + failing.log.read_text()
        failure, failing.exit_code, failing.collected = failing.failure, None, False
        (agent,) = engine._agents
        agent.processes[failing.role.life] = failing  # as if a broken connection had lost its end
        assert awaited(engine) is failing
        assert (failing.exit_code, failing.failure) == (1, failure)
        engine.stop(first)
        assert awaited(engine) is first
        assert first.exit_code == -signal.SIGKILL
        assert second.exit_code is None
        engine.stop()
        assert engine.poll() == [second]
        assert second.failed
    meeting.close()


def command_lines() -> list[bytes]:
    """The command lines of all processes that this one has started; every user of the host can read them."""
    found = []
    for child in children_of(os.getpid()):
        with suppress(OSError):  # it may just have ended
            found.append(Path(f"/proc/{child}/cmdline").read_bytes())
    assert any(b"polytempo.agent" in words for words in found)
    return found


def secrets_of(engine: RemoteEngine, meeting: Rendezvous) -> list[bytes]:
    """The keys of the agents' channel, and the token of the ranks' store."""
    keys = engine._ticket.keys
    return [keys.server_secret, keys.client_secret, meeting.url.partition("#")[2].encode()]


class KillsAnAgent(Launcher):
    """Kills the agent of worker 1 when that calls for work for the third time, and looks who listens before."""

    calls = 0
    before: Collection[str] = ()
    listening: set[str]

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Receive messages as the launcher."""
        if isinstance(message, Ask) and message.worker == 1:
            KillsAnAgent.calls += 1
            if KillsAnAgent.calls == 3:
                KillsAnAgent.listening = listening_addresses(
                    [os.getpid(), *children_of(os.getpid())], KillsAnAgent.before
                )
                process: Any = self._supervisor.process_on(1)
                number = process.agent.number
                os.kill(agent_pids(os.getpid())[number], signal.SIGKILL)
        return super().receive(now_s, source, message)


def test_a_run_goes_on_without_a_lost_agent_and_listens_at_its_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_served, "Launcher", KillsAnAgent)
    monkeypatch.setattr(KillsAnAgent, "before", listening([os.getpid()]))
    strategy = pt.strategies.async_sgd(shards=2, replicas=1)
    result = pt.run(DIGITS, strategy, workers=2, epochs=3, threads=1, engine=agents("a", "b"))
    assert result.samples == 3 * 1437
    assert result.server is not None
    assert "worker-1" in {event["who"] for event in result.server["events"]}
    assert KillsAnAgent.listening == {"127.0.0.1"}


class Looking:
    """Agents with a launcher that notes listening addresses, whenever it looks after its processes."""

    def __init__(self) -> None:
        self.head, self.others = set[str](), set[str]()
        self._before = listening([os.getpid()])  # of other tests in this process
        self._children_before = children_of(os.getpid())

    @contextmanager
    def open(self, launch: Launch) -> Iterator[RemoteEngine]:
        """See `EngineSetup`. The head is at an address of its own."""
        setup = Ssh(("a", "b"), python=sys.executable, command=("env", "HOST={host}"), address="127.0.0.2")
        with setup.open(launch) as engine:
            poll = engine.poll

            def looking(wait_s: float = 0.0) -> list[EngineProcess]:
                self.head |= listening_addresses([os.getpid()], self._before)
                mine = set(children_of(os.getpid())).difference(self._children_before)
                self.others |= listening_addresses([*mine])
                return poll(wait_s)

            engine.poll = looking  # type: ignore[method-assign]
            yield engine


@pytest.mark.parametrize("strategy", ["sync_sgd", "async_sgd(shards=2, replicas=1)"])
def test_each_host_listens_at_its_own_address_alone(strategy: str) -> None:
    looking = Looking()
    pt.run(DIGITS, pt.parse_strategy(strategy), workers=2, epochs=2, threads=1, engine=looking)
    assert looking.head == {"127.0.0.2"}
    assert looking.others <= {"127.0.0.1"}  # the agents' address on the way to the head
    assert looking.others or strategy == "sync_sgd"


def test_a_killed_launcher_takes_its_agents_along(tmp_path: Path, private: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHER)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"open\n"
        [agent] = agent_pids(launcher.pid).values()
        watched = os.pidfd_open(agent)
        launcher.kill()
    assert select.select([watched], [], [], LONG_S)[0], f"agent {agent} lives on"
    os.close(watched)
    while list(private.glob("polytempo-*")):  # its janitor removes them
        os.sched_yield()


def test_an_agent_that_cannot_start_is_named(tmp_path: Path) -> None:
    engine = Ssh(("a",), python="/no/python", command=("env", "HOST={host}"), address="127.0.0.1")
    with pytest.raises(pt.errors.PolytempoError, match=r"0 of 1 agents have joined the run: host a ended .*/no/python"):
        pt.run(DIGITS, pt.strategies.sync_sgd(), 2, steps=1, engine=engine)
    starter = ChildAgents([("host a", ["/no/ssh"])])
    with pytest.raises(ValueError, match=r"host a: cannot start /no/ssh"):
        starter.start([0], AgentTicket("tcp://127.0.0.1:1", make_keys()))


FAKE_SSH = """#!/bin/sh
while [ "$1" != a ]; do shift; done
shift
sh -c "$*"  # as sshd does
"""
FAKE_PYTHON = """#!/bin/sh
IFS= read -r ticket
env -0 > "$0.env"
echo "$ticket" > "$0.ticket"
mv "$0.ticket" "$0.read"
cat > /dev/null
"""


@pytest.mark.parametrize("shell", ["ssh", "ssh behind another command", "none"])
def test_the_environment_reaches_the_agent_and_is_on_no_command_line(tmp_path: Path, shell: str) -> None:
    for name, text in (("ssh", FAKE_SSH), ("python", FAKE_PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    wanted = {"SECRET": "a-secret", "ODD": 'it\'s "$HOME" `id` \\n !\n\n second\tline\n', "EMPTY": "", "settings": "é"}
    command = {"ssh": [f"{tmp_path}/ssh", "-T", "{host}"], "none": ["env", "HOST={host}"]}.get(
        shell, ["env", f"{tmp_path}/ssh", "-T", "{host}"]
    )
    starter = Ssh(["a"], f"{tmp_path}/python", command, environment=wanted).starter()
    ticket = AgentTicket("tcp://127.0.0.1:1", make_keys())
    [agent] = starter.start([0], ticket)
    try:
        while not (tmp_path / "python.read").exists():
            for child in children_of(os.getpid()):
                with suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
                    assert b"a-secret" not in Path(f"/proc/{child}/cmdline").read_bytes()
            starter.poll()
            assert agent.ended is None, agent.ended
    finally:
        starter.stop()
    assert AgentTicket.from_json((tmp_path / "python.read").read_text()) == ticket.numbered(0)
    found = dict(each.split("=", 1) for each in (tmp_path / "python.env").read_text().split("\0") if each)
    assert {name: found.get(name) for name in wanted} == wanted
    assert "polytempo_line" not in found


@pytest.mark.parametrize("environment", [{"A B": "x"}, {"1": "x"}, {"A": "\0"}, {"A": "x" * 50_000}])
def test_an_environment_that_no_shell_can_set_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="environment"):
        Ssh(["a"], environment=environment)


def test_an_agent_without_a_ticket_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polytempo.agent"], input=b"\n", capture_output=True, check=False, timeout=LONG_S
    )
    assert done.returncode == 1
    assert b"expects a ticket of a run" in done.stderr


def entries(folder: str) -> list[str]:
    """The paths in a folder of /proc; none of a process that has just ended."""
    with suppress(OSError):
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    return []


def children_of(process: int) -> list[int]:
    """All descendants of a process."""
    direct = list[int]()
    for task in entries(f"/proc/{process}/task"):
        with suppress(OSError):  # it may just have ended
            direct += map(int, Path(task, "children").read_text().split())
    return [*direct, *(each for child in direct for each in children_of(child))]


def agent_pids(launcher: int) -> dict[int, int]:
    """Agents by number: they were started in that order."""
    found = list[int]()
    for child in children_of(launcher):
        with suppress(OSError):  # it may just have ended
            is_agent = b"polytempo.agent" in Path(f"/proc/{child}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2].split()[1])
            found += [child] * (is_agent and parent == launcher)
    return dict(enumerate(sorted(found)))


def listening_addresses(processes: Sequence[int], known: Collection[str] = ()) -> set[str]:
    """The TCP addresses of listening processes, except for the sockets `known`."""
    return {address for number, address in listening(processes).items() if number not in known}


def listening(processes: Sequence[int]) -> dict[str, str]:
    """The address of each listening TCP socket of some processes, by the socket's number."""
    sockets = set[str]()
    for process in processes:
        for descriptor in entries(f"/proc/{process}/fd"):
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found = dict[str, str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                raw = bytes.fromhex(local.partition(":")[0])
                found[inode] = ".".join(map(str, raw[::-1])) if table == "tcp" else raw.hex()
    return found
