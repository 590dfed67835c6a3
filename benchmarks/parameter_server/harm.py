"""Runs with a parameter server and processes killed and stopped on purpose, with the outcome of each.

The job's gradients count: ticket t is one sample, with a gradient of 1 at place t. With plain SGD the final weight t
says how often the ticket was used, to the bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.data.ledger import Ledger
from polytempo.engines.processes.fork import fork
from polytempo.engines.processes.worker_processes import Child
from polytempo.runs.served import run_served, served_program
from polytempo.runs.served.process_account import ProcessSupervisor
from polytempo.runs.served.run_served import Launcher
from polytempo.runs.served.served_run import ServedRun
from polytempo.server.message import Ask, Beat, Deal, Message, Outbox
from polytempo.server.timing import Timing
from polytempo.spec.result import parameters_sha256

WORKERS, SHARDS, COPIES = 4, 2, 2
GIVE_UP_S = 20.0
_MOST_DELAY_S = 0.02
"""A fault comes up to so long after its ticket was dealt: a worker makes several steps in this time."""
_LAST_TICKETS = 100
"""So many tickets wait for the last fault: with their help a run recovers from later ones."""

# ----------------------------------------------------------------------------------------------------------- the job


class Counts(nn.Module):
    """A weight for each ticket, twice: each of two shards holds one half."""

    def __init__(self, tickets: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(tickets)), nn.Parameter(torch.zeros(tickets))

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, tickets) -> (batch,)"""
        return inputs @ self.first + inputs @ self.second


def counting(tickets: int, loss: Callable[[Tensor, Tensor], Tensor] | None = None, *, tested: bool = False) -> pt.Job:
    """A job of so many tickets an epoch, with weights that count them down."""
    samples = TensorDataset(torch.eye(tickets), torch.zeros(tickets))
    return pt.Job(
        model=partial(Counts, tickets),
        data=lambda folder: pt.Data(samples, samples if tested else None),
        loss=loss or (lambda output, target: output.mean()),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=1.0),
        batch_size=1,
        name="counting",
    )


def counted(tickets: int, epochs: int = 1) -> str:
    """The hash of the final weights after each shard used each ticket once."""
    model = Counts(tickets)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-epochs)
    return parameters_sha256(model.parameters())


# -------------------------------------------------------------------------------------------------------------- harm


class Fault(NamedTuple):
    """When `dealt` tickets were dealt, the process that is `what` ("worker", "head", "tail") `which` gets `signal`."""

    dealt: int
    what: str
    which: int
    signal: signal.Signals = signal.SIGKILL


class Recovery:
    """The outcome of a fault. Seconds from it; None: it did not come to that before the run's end."""

    def __init__(self, fault: Fault, node: int, asks: int, process: int, life: int, dealt: set[int]) -> None:
        """`asks`: the worker that calls for work for this one, which holds a stage; itself, where it holds all."""
        self.fault, self.node, self.process, self.life, self.asks = fault, node, process, life, asks
        self._dealt_before = frozenset(dealt)
        self._since_s = time.monotonic()
        self.needed_s: float | None = None
        """Until a push was acknowledged that needed the process: of a worker its own next, of a shard any."""
        self.whole_s: float | None = None
        """The time until all processes were there again, and each copy had its state."""

    def hear(self, ask: Ask) -> None:
        """A worker says which tickets were acknowledged."""
        mine = ask.worker == self.asks and ask.incarnation > self.life
        new = ask.done if self.fault.what == "worker" else set(ask.done) - self._dealt_before
        if self.needed_s is None and new and (mine or self.fault.what != "worker"):
            self.needed_s = time.monotonic() - self._since_s

    def close(self) -> None:
        """All is as it was."""
        self.whole_s = time.monotonic() - self._since_s


class Watching(Launcher):
    """A launcher that does harm: one fault after the other, each when the run has recovered from the one before.

    One further copy of each shard promises that: the loss of any one process. The last tickets wait for the last fault,
    so that no run ends before it, however long recoveries take on a busy machine.
    """

    def __init__(self, run: ServedRun, supervisor: ProcessSupervisor, faults: Sequence[Fault], seed: int) -> None:
        super().__init__(run, supervisor)
        self.run, self.supervisor = run, supervisor
        self.recoveries: list[Recovery] = []
        self.dealt: set[int] = set()
        self.acknowledged: set[int] = set()
        self.ledger = Ledger(range(run.program.batches.num_samples + 1), len(run.plan.topology.chains))
        self.processes: set[int] = set()
        self._faults = sorted(faults)
        self._random = random.Random(seed)
        self._due_s: float | None = None
        self._tickets = run.program.batches.num_samples
        self._waiting: dict[int, Ask] = {}
        """Calls for work that wait for the next fault, by who called."""
        self._lives = dict.fromkeys(run.plan.topology.workers, 0)
        self._full = {node for chain in run.plan.topology.chains for node in chain}

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Receive as the launcher does, and take notes."""
        if isinstance(message, Beat) and message.incarnation:
            self._full.add(source)
        if isinstance(message, Ask):
            self.acknowledged.update(message.done)
            self._lives[message.worker] = message.incarnation
            for recovery in self.recoveries:
                recovery.hear(message)
            if self._must_wait(message):
                self._waiting[source] = message
                return []
        return self._noted(super().receive(now_s, source, message))

    def _must_wait(self, ask: Ask) -> bool:
        """True if a call is for one of the last tickets, a fault is to come, and no recovery needs the call."""
        if not self._faults or len(self.dealt) < self._tickets - _LAST_TICKETS or not self._is_member(ask):
            return False
        last = self.recoveries[-1] if self.recoveries else None
        if last is None or last.needed_s is not None:
            return True
        return last.fault.what == "worker" and ask.worker != last.asks

    def _is_member(self, ask: Ask) -> bool:
        return bool(self.run.coordinator.members.get(ask.worker) == ask.incarnation)

    def tick(self, now_s: float) -> Outbox:
        """Tick as the launcher does, and do the next harm at its time."""
        out = self._noted(super().tick(now_s))
        for source, ask in list(self._waiting.items()):
            if not self._must_wait(ask):
                del self._waiting[source]
                out += self.receive(now_s, source, ask) if self._is_member(ask) else []  # a dead worker's
        self.processes.update(process for role in self.supervisor.running if (process := self.process(role.node)))
        if self.is_whole and self.recoveries and self.recoveries[-1].whole_s is None:
            self.recoveries[-1].close()
        if self._due_s is not None and now_s >= self._due_s:
            self._due_s = None
            self.strike(self._faults.pop(0))
        elif self._due_s is None and self._faults and len(self.dealt) >= self._faults[0].dealt and self._goes_on:
            self._due_s = now_s + self._random.random() * _MOST_DELAY_S
        return out

    def wait_s(self, now_s: float) -> float:
        """The launcher's wait, or the time until the next harm."""
        wait_s = super().wait_s(now_s)
        return wait_s if self._due_s is None else max(0.0, min(wait_s, self._due_s - now_s))

    @property
    def is_whole(self) -> bool:
        """True if the last victim is gone, all workers take part, and each chain has its copies with their states."""
        coordinator = self.run.coordinator
        copies = all(len(chain) == COPIES and self._full.issuperset(chain) for chain in coordinator.chains)
        there = copies and len(coordinator.members) == len(self.run.plan.topology.firsts)
        return there and all(self.process(recovery.node) != recovery.process for recovery in self.recoveries[-1:])

    @property
    def _goes_on(self) -> bool:
        """True if the run has recovered from the last fault in every respect."""
        return self.is_whole and all(recovery.needed_s is not None for recovery in self.recoveries[-1:])

    def process(self, node: int) -> int | None:
        """The process on `node`."""
        process = self.supervisor.process_on(node)
        return process.pid if isinstance(process, Child) else None

    def strike(self, fault: Fault) -> None:
        """Do the harm."""
        node = fault.which
        if fault.what != "worker":
            node = self.run.coordinator.chains[fault.which][0 if fault.what == "head" else -1]
        process = self.process(node)
        assert process is not None, f"{fault}: it does not run"
        asks = self.run.plan.topology.replica_of(node)[0] if fault.what == "worker" else node
        self.recoveries.append(Recovery(fault, node, asks, process, self._lives.get(asks, 0), self.dealt))
        os.kill(process, fault.signal)

    def _noted(self, out: Outbox) -> Outbox:
        for _, message in out:
            for ticket in message.tickets if isinstance(message, Deal) else ():
                self.dealt.add(ticket.number)
                self.ledger.dealt(ticket.number)
        return out


Launch = Callable[[ServedRun, ProcessSupervisor], Watching]


class Story(NamedTuple):
    """A run, and all that is known of it. `wrong`: the errors."""

    result: pt.Result
    launcher: Watching
    wrong: list[str]


def told(launch: Launch, job: pt.Job, **more: Any) -> Story:
    """Perform a run that comes to its end, and judge it."""
    launchers: list[Watching] = []

    def launched(run: ServedRun, supervisor: ProcessSupervisor) -> Watching:
        launchers.append(launch(run, supervisor))
        return launchers[-1]

    with private_folder() as folder:
        result = performed(launched, job, **more)
        left = left_behind(folder, launchers[0].processes)
    return Story(result, launchers[0], wrong_with(result, launchers[0]) + left)


def performed(
    launch: Launch,
    job: pt.Job,
    *,
    timing: dict[str, float] | None = None,
    hierarchical: bool = False,
    **options: Any,
) -> pt.Result:
    """Run `job` with two shards, each with one further copy, under a launcher that does harm."""
    strategy = pt.strategies.async_sgd(shards=SHARDS, replicas=COPIES - 1, rate=1.0, hierarchical=hierarchical)
    with (
        patch.object(run_served, "Launcher", launch),
        patch.object(served_program, "Timing", partial(Timing, **(timing or {}))),
    ):
        return pt.run(job, strategy, **{"workers": WORKERS, "epochs": 1, **options})


def wrong_with(result: pt.Result, launcher: Watching) -> list[str]:
    """Tickets that each shard did not use exactly once, and contradictions."""
    run, ledger, wrong = launcher.run, launcher.ledger, list[str]()
    tickets, epochs = run.program.batches.num_samples, round(result.epochs)
    for shard, said in sorted(run.coordinator.statistics.items()):
        used = {ticket for first, last in said.tickets for ticket in range(first, last + 1)}
        for ticket in sorted(used):
            ledger.applied(shard, ticket)
        if launcher.acknowledged - used:
            wrong.append(f"shard {shard} lost acknowledged tickets {sorted(launcher.acknowledged - used)}")
        if sum(said.staleness.values()) != len(used):
            wrong.append(f"shard {shard} used {sum(said.staleness.values())} gradients of {len(used)} tickets")
    wrong += [str(ledger.verdict(epoch)) for epoch in range(epochs) if not ledger.verdict(epoch).exact]
    if result.parameters_sha256 != counted(tickets, epochs):
        wrong.append("the weights do not count each ticket once")
    return wrong


# ----------------------------------------------------------------------------------------------- remains


@contextmanager
def private_folder() -> Iterator[Path]:
    """The place of private folders meanwhile."""
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        yield Path(folder)


def left_behind(folder: Path, processes: set[int]) -> list[str]:
    """Processes that run, files in `folder`, and shared memory that is named after one of the processes."""
    left = [f"process {process} runs" for process in sorted(processes) if os.path.exists(f"/proc/{process}")]
    left += [f"{path} is there" for path in folder.glob("polytempo-*")]
    return left + [f"/dev/shm/{n} is there" for n in os.listdir("/dev/shm") if any(f"_{p}" in n for p in processes)]


def orphaned(number: signal.Signals, dealt: int, tickets: int) -> tuple[float, list[str]]:
    """Send signal `number` to a launcher when `dealt` tickets were dealt: seconds until all is gone, and the
    remains."""
    listening, speaking = os.pipe()

    class Speaking(Watching):
        def tick(self, now_s: float) -> Outbox:
            out = super().tick(now_s)
            if len(self.dealt) >= dealt:
                os.write(speaking, json.dumps(sorted(self.processes)).encode() + b"\n")
                signal.pause()
            return out

    with private_folder() as folder:
        launcher = fork(lambda: _run_alone(Speaking, tickets))
        os.close(speaking)
        with os.fdopen(listening, "rb") as lines:
            processes = set(json.loads(lines.readline()))
        children = {int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()}
        watched = [os.pidfd_open(process) for process in processes | children]
        since_s = time.monotonic()
        os.kill(launcher, number)
        os.waitpid(launcher, 0)
        for descriptor in watched:
            wait([descriptor], GIVE_UP_S)
            os.close(descriptor)
        seconds = time.monotonic() - since_s
        return seconds, left_behind(folder, running(processes | children))


def running(processes: set[int]) -> set[int]:
    """The processes that have not ended: an uncollected orphan has."""
    return {p for p in processes if os.path.exists(f"/proc/{p}") and " Z " not in Path(f"/proc/{p}/stat").read_text()}


def _run_alone(launch: Callable[..., Watching], tickets: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    performed(lambda run, supervisor: launch(run, supervisor, [], 0), counting(tickets))
