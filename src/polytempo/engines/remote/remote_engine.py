"""`RemoteEngine`: processes on several hosts, started by an agent on each of them. See `agent` for its other half."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from polytempo.core.errors import PolytempoError
from polytempo.engines.engine import EngineAddress, EngineProcess, Failure, Launch, Role
from polytempo.engines.processes import janitor
from polytempo.engines.remote.messages import (
    SAVE_S,
    Agent,
    AgentBeat,
    AskWhere,
    Bye,
    Close,
    Ended,
    FromAgent,
    Hello,
    LogLines,
    PreemptAll,
    RemoteProcess,
    StartProcess,
    StopProcess,
    ToAgent,
    TravellingRun,
)
from polytempo.engines.remote.ticket import AgentStarter, AgentTicket, StartedAgent
from polytempo.spec.placement import on_hosts
from polytempo.wire.channel import ChannelServer
from polytempo.wire.keys import Keys, make_keys

_SILENT_S = 1.0
"""An agent's processes count as stopped after so long without a beat."""
_LOST_S = 10.0
"""They count as ended after so long."""
_MOST_FAILED = 3
"""Processes stop waiting for another agent after so many agents in a row that ended without a word."""
_LOOK_S = 0.1
_CLOSE_S = 8.0
_LINGER_S = 1.0

Channel = ChannelServer[FromAgent, ToAgent]


class RemoteEngine:
    """See `Engine`. Make it by `opened_remote`."""

    def __init__(
        self,
        launch: Launch,
        starter: AgentStarter,
        channel: Channel,
        ticket: AgentTicket,
        logs: Path,
        slots: int | None,
        run: TravellingRun,
    ) -> None:
        self._launch, self._starter, self._channel, self._ticket = launch, starter, channel, ticket
        self._logs, self._slots, self._run, self._topology = logs, slots, run, run.topology
        self._started: dict[int, StartedAgent] = {}
        self._agents: list[Agent] = []
        self._hosts: list[str] = []
        self._waiting: list[tuple[Role, int, RemoteProcess]] = []
        """Processes that wait for an agent that is to come."""
        self._failed_before = 0
        """The number of agents that had ended without a word when the last one came."""
        self._all: list[RemoteProcess] = []
        self._looks, self._look_at_s, self._closed = 0, 0.0, False
        self._threads = launch.threads or 1

    # ------------------------------------------------------------------ agents

    def gather(self, num_agents: int, wait_s: float) -> None:
        """Start so many agents and wait until all are there. PolytempoError where one is not after `wait_s`."""
        self._start_agents(range(num_agents))
        until_s = time.monotonic() + wait_s
        while len(self._agents) < num_agents:
            if (heard := self._channel.take(_LOOK_S)) is not None:
                self._hear(*heard)
            self._starter.poll()
            ended = [f"{agent.where} {agent.ended}" for agent in self._started.values() if agent.ended]
            if ended or time.monotonic() > until_s:
                there = {agent.number for agent in self._agents}
                silent = [agent.where for agent in self._started.values() if agent.number not in there]
                why = f"{'; '.join(ended)}" if ended else f"nothing was heard of {', '.join(silent)} for {wait_s:g} s"
                raise PolytempoError(
                    f"{len(self._agents)} of {num_agents} agents have joined the run: {why}. Each must have polytempo "
                    f"installed and reach {self._ticket.head}; give address= where that is not this host's address "
                    "for them"
                )
        self._hosts = list(dict.fromkeys(agent.hello.host for agent in sorted(self._agents, key=lambda a: a.number)))
        for agent in self._agents:
            agent.host = self._hosts.index(agent.hello.host)
        self._topology = on_hosts(self._topology, len(self._hosts))
        self._threads = self._launch.threads or self._fair_threads()
        for agent in self._agents:
            self._welcome(agent)

    def _fair_threads(self) -> int:
        """So many that no host has more threads than cores."""
        workers = [self._topology.host_of(worker) for worker in self._topology.workers]
        return max(1, min(agent.hello.cores // max(1, workers.count(agent.host)) for agent in self._agents))

    def _start_agents(self, numbers: Sequence[int]) -> None:
        for agent in self._starter.start(numbers, self._ticket):
            self._started[agent.number] = agent

    def _welcome(self, agent: Agent) -> None:
        agent.heard_s = time.monotonic()  # until it is welcome it says nothing more; others may load torch for long
        for message in self._run.messages(agent.number, self._launch.most, self._threads):
            self._channel.send(agent.peer, message)

    def _admit(self, peer: bytes, hello: Hello) -> None:
        taken = {agent.number for agent in self._agents}
        number = hello.number
        if number < 0 or number in taken:
            number = min(set(range(len(taken) + 1)) - taken)
        late = bool(self._hosts)
        if hello.host not in self._hosts and late:
            self._hosts.append(hello.host)
        host = self._hosts.index(hello.host) if late else 0
        agent = Agent(number, peer, hello, host, time.monotonic())
        self._agents.append(agent)
        if late:
            self._welcome(agent)
            self._failed_before = len(self._failed)
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if not self._assign(*each):
                    self._waiting.append(each)
            self._start_missing()

    @property
    def _absent(self) -> list[StartedAgent]:
        """Agents that were started and have not come."""
        there = {agent.number for agent in self._agents}
        return [agent for agent in self._started.values() if agent.number not in there]

    @property
    def _failed(self) -> list[StartedAgent]:
        """Agents that ended without a word."""
        return [agent for agent in self._absent if agent.ended is not None]

    def _start_missing(self) -> None:
        """Start as many agents as the waiting processes need, less the agents that are still to come."""
        needed = -(-len(self._waiting) // self._slots) if self._slots else min(1, len(self._waiting))
        missing = needed - (len(self._absent) - len(self._failed))
        if missing <= 0:
            return
        first = max(self._started, default=-1) + 1
        try:
            self._start_agents(range(first, first + missing))
        except ValueError as error:
            self._give_up_waiting(str(error))

    def _give_up_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, []
        for _, _, process in waiting:
            self._end(process, f"was never started, for no agent came to start it: {why}")

    # ------------------------------------------------------------------ Engine

    @property
    def address(self) -> EngineAddress:
        """See `Engine`."""
        host = self._ticket.head.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        return EngineAddress(host, self._threads, grace_s=SAVE_S, num_hosts=len(self._hosts), shares_files=False)

    def start(self, role: Role, host: int = 0) -> EngineProcess:
        """See `Engine`. On another host where none is left on `host`, or where that holds a copy of the same shard."""
        process = RemoteProcess(role, self._logs / f"{role}.log")
        process.log.unlink(missing_ok=True)  # it may be a link
        process.log.touch()
        self._all.append(process)
        if not self._assign(role, host, process):
            if self._starter.replaces and not self._closed:
                self._waiting.append((role, host, process))
                self._start_missing()
            else:
                self._end(process, "was not started, for no agent is left that could do it")
        return process

    def _assign(self, role: Role, host: int, process: RemoteProcess) -> bool:
        """Let an agent start the process. False where none has room."""
        agent = self._agent_for(role, host)
        if agent is None:
            return False
        workers = [worker for worker in self._topology.workers if self._topology.host_of(worker) == agent.host]
        mine = role.node in workers
        order = StartProcess(
            role=role._asdict(),
            setting=json.dumps(dict(self._launch.setting())),
            local_rank=workers.index(role.node) if mine else 0,
            local_size=len(workers) if mine else 1,
            host=agent.host,
        )
        process.agent, process.host, process.order = agent, agent.hello.name, order
        agent.processes[role.life] = process
        if not self._channel.send(agent.peer, order):
            self._lose(agent, "does not read any more")
        return True

    def _agent_for(self, role: Role, host: int) -> Agent | None:
        """The best living agent with room: one on `host`, without a copy of the same shard, with few processes."""
        now_s = time.monotonic()
        free = [
            agent
            for agent in self._agents
            if agent.lost is None and (self._slots is None or len(agent.processes) < self._slots)
        ]

        def twin_in(agents: Sequence[Agent]) -> bool:
            others = [process.role for agent in agents for process in agent.processes.values()]
            return role.kind == "copy" and any((one.kind, one.shard) == ("copy", role.shard) for one in others)

        def cost(agent: Agent) -> tuple[bool, bool, bool, bool, int, int]:
            on_host = twin_in([each for each in self._agents if each.host == agent.host])
            unsure = agent.leaving or now_s - agent.heard_s > _SILENT_S
            return unsure, on_host, twin_in([agent]), agent.host != host, len(agent.processes), agent.number

        return min(free, key=cost, default=None)

    def poll(self, wait_s: float = 0.0) -> list[EngineProcess]:
        """See `Engine`."""
        until_s = time.monotonic() + wait_s
        self._looks += 1
        while True:
            self._drain()
            self._look()
            gone = [process for process in self._all if process.exit_code is not None and not process.collected]
            left_s = until_s - time.monotonic()
            if gone or left_s <= 0:
                break
            if (heard := self._channel.take(min(left_s, _LOOK_S))) is not None:
                self._hear(*heard)
        for process in gone:
            process.collected = True
        return list[EngineProcess](gone)

    def stop(self, process: EngineProcess | None = None) -> None:
        """See `Engine`. A process of a silent agent ends here immediately, and there as soon as the agent hears."""
        if process is None:
            self._close()
        elif isinstance(process, RemoteProcess) and process.exit_code is None and process.agent is not None:
            process.ending = True
            self._channel.send(process.agent.peer, StopProcess(process.role.life))
            if process.stopped and time.monotonic() - process.agent.heard_s > _SILENT_S:
                self._end(process, f"was given up, for its agent on {process.agent.hello.name} is silent")
        elif isinstance(process, RemoteProcess) and process.exit_code is None:
            self._waiting = [each for each in self._waiting if each[2] is not process]
            self._end(process, "was ended before an agent came to start it")

    def preempt(self) -> None:
        """See `Preempting`."""
        for agent in self._agents:
            self._channel.send(agent.peer, PreemptAll())

    def ask_where(self, processes: Sequence[EngineProcess]) -> None:
        """Let processes write where they are into their logs."""
        for process in processes:
            if isinstance(process, RemoteProcess) and process.agent is not None:
                self._channel.send(process.agent.peer, AskWhere(process.role.life))

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for agent in self._agents:
            self._channel.send(agent.peer, Close())
        until_s = time.monotonic() + _CLOSE_S
        while any(agent.lost is None and not agent.left for agent in self._agents) and time.monotonic() < until_s:
            if (heard := self._channel.take(_LOOK_S)) is not None:
                self._hear(*heard)
            self._look()
        self._starter.stop()
        self._drain()
        for agent in self._agents:
            self._lose(agent, "had to be ended")

    # ------------------------------------------------------------------ messages of agents

    def _drain(self) -> None:
        while (heard := self._channel.take()) is not None:
            self._hear(*heard)

    def _hear(self, peer: bytes, message: FromAgent) -> None:
        if isinstance(message, Hello):
            return self._admit(peer, message)
        agent = next((agent for agent in self._agents if agent.peer == peer), None)
        if agent is None:
            return
        agent.heard_s = time.monotonic()
        if agent.lost and isinstance(message, AgentBeat):
            self._channel.send(peer, Close())  # it has not heard the first
        match message:
            case AgentBeat():
                for order in agent.heard(message):
                    self._channel.send(peer, order)
            case LogLines(life, text) if life in agent.processes:
                with agent.processes[life].log.open("ab") as log:
                    log.write(text)
            case Ended(life) if life in agent.processes:
                process = agent.processes.pop(life)
                process.exit_code, process.result, process.ended = message.exit_code, message.result, self._looks
                process.why = message.why
                process.failure = None if message.failure is None else Failure(*message.failure)
            case Bye():
                agent.left = True
                self._lose(agent, "has left")
            case _:
                pass

    def _look(self) -> None:
        """Note silent agents, and agents that have ended."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_S
        self._starter.poll()
        if self._waiting and len(self._failed) - self._failed_before >= _MOST_FAILED:
            last = self._failed[-1]
            self._give_up_waiting(f"{last.where} {last.ended}")
        elif self._waiting:
            self._start_missing()
        for agent in self._agents:
            started, silent_s = self._started.get(agent.number), now_s - agent.heard_s
            if agent.lost is None and started is not None and started.ended is not None:
                self._lose(agent, started.ended)
            elif agent.lost is None and silent_s > _LOST_S:
                self._lose(agent, f"was silent for {silent_s:.0f} s")
            elif silent_s > _SILENT_S:
                for process in agent.processes.values():
                    process.stopped = True

    def _lose(self, agent: Agent, why: str) -> None:
        agent.lost = agent.lost or why
        for process in list(agent.processes.values()):
            self._end(process, f"ended with its agent on {agent.hello.name}, which {why}")
        if not self._closed:
            self._channel.send(agent.peer, Close())  # if it still lives, it ends its processes

    def _end(self, process: RemoteProcess, why: str) -> None:
        """Take a process for ended that can no longer be asked."""
        if process.agent is not None:
            process.agent.processes.pop(process.role.life, None)
        process.exit_code, process.ended, process.why = -signal.SIGKILL, self._looks, why
        with process.log.open("ab") as log:
            log.write(f"\n{process.role} {why}\n".encode())


@contextmanager
def opened_remote(
    launch: Launch,
    starter: AgentStarter,
    num_agents: int,
    *,
    address: str,
    slots: int | None = None,
    wait_s: float = 120.0,
    run: TravellingRun | None = None,
    keys: Keys | None = None,
) -> Iterator[RemoteEngine]:
    """The engine of a run, over agents that `starter` starts; it is closed, and they are ended, at the end.

    `address` is this host's for agents; nothing listens on any other. `slots`: how many processes an agent takes; None:
    as many as there are. `run`: the description for agents, if it is not `launch.spec`; `keys`: the channel's, if
    agents have them already. Errors: ValueError for a run that cannot travel as JSON, or an address that is not this
    host's; PolytempoError where agents are not there within `wait_s`.
    """
    run = run or TravellingRun.of(launch)
    with janitor.engine_home(launch.logs) as (_, _, logs):
        keys = keys or make_keys()
        where = f"[{address}]" if ":" in address else address
        channel: Channel = ChannelServer(f"tcp://{where}:*", keys, FromAgent)  # type: ignore[arg-type] # a union of types
        try:
            engine = RemoteEngine(launch, starter, channel, AgentTicket(channel.address, keys), logs, slots, run)
            try:
                engine.gather(num_agents, wait_s)
                yield engine
            finally:
                engine.stop()
                starter.stop()
        finally:
            channel.close(_LINGER_S)
