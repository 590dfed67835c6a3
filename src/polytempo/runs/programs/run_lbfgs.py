"""`lbfgs`: a job's whole training loss minimised by Sandblaster L-BFGS, on processes of this host.

replica ──gradients of portions──▶ shards     each has a part of all vectors, and computes with it
launcher: the coordinator, which sees numbers alone; it fetches the parameters once, at the end
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polytempo.core import TimedOut
from polytempo.engines.engine import Engine, Launch, Role
from polytempo.engines.local_engine import Local
from polytempo.engines.processes.capacity import check_processes
from polytempo.engines.processes.failures import died
from polytempo.runs.frame.live_run import ShownRun
from polytempo.runs.frame.run_frame import framed_program
from polytempo.runs.process.mailbox_directory import MailboxDirectory
from polytempo.server.lbfgs.coordinator import LbfgsCoordinator
from polytempo.server.lbfgs.messages import FINAL, Fetch, Fetched, RunOver
from polytempo.server.lbfgs.operations import Iteration
from polytempo.server.lbfgs.operations import lbfgs as asking
from polytempo.server.lbfgs.replica import LbfgsReplica
from polytempo.server.lbfgs.vector_shard import VectorShard
from polytempo.server.loop import Machine, serve
from polytempo.server.message import Message, Outbox
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of, model_of
from polytempo.spec.topology import Topology
from polytempo.training.job.training_loss import PortionLoss
from polytempo.worlds.process.mail import Mail, MailWorld

_PORTIONS = 8
"""The default number of portions for each replica."""
_LOOK_S = 0.05
_LINGER_S = 1.0


class Minimised(NamedTuple):
    """The end of a run of L-BFGS; `model` has the final parameters."""

    model: nn.Module
    iterations: list[Iteration]
    lost: list[int]
    """The replicas that were lost."""
    copies: int
    """Second copies of portions that replicas without work have begun."""


def lbfgs(
    job: Job,
    workers: int = 2,
    shards: int = 1,
    iterations: int = 50,
    *,
    history: int = 10,
    tolerance: float = 1e-5,
    searches: int = 20,
    portions: int | None = None,
    seed: int = 0,
    data: Path | None = None,
    threads: int | None = None,
    timeout_s: float = 300.0,
    out: Path | None = None,
    on_iteration: Callable[[Iteration], None] = lambda iteration: None,
) -> Minimised:
    """Minimise the job's mean loss over all its training data by L-BFGS, with `workers` replicas and `shards`.

        found = pt.lbfgs(job, workers=4, shards=2, iterations=30)

    The shards hold the parameters, the last `history` steps and changes of the gradient, in parts of one size. The
    coordinator asks them for dot products, scalings and additions of their parts, and has no parameter itself. Replicas
    compute the gradient in `portions` (8 for each replica): a fast replica computes more of them, and idle replicas
    compute unfinished portions again. A replica that is killed costs the time of its portion. The job's optimizer,
    rate, batch size and schedule have no meaning here.

    Each iteration is a step along the L-BFGS direction to a point that has the weak Wolfe conditions, found in at most
    `searches` evaluations. It ends after so many iterations, where ‖g‖ ≤ tolerance, or where no lower point is found.

    Memory: on each shard 8 (2 m + 7) n / S bytes for n parameters. Cost of an evaluation: each replica fetches the
    parameters once, and sends a gradient for each portion. Without an expected message: TimedOut after `timeout_s`.
    `out` is a folder for `metrics.jsonl` with a row of each iteration, `live.json` (`polytempo top`) and `logs/`.

    Errors: ValueError for batch norms, more shards than parameters, or a first loss that is not finite; `WorkerDied`
    where a shard or the last replica is lost, or a replica fails with an error. Source: J. Dean et al., "Large scale
    distributed deep networks", 2012, section 4.2. Deviations: the line search, because the paper does not describe one;
    replicas send each portion's gradient immediately.
    """
    numbers = {"workers": workers, "shards": shards, "iterations": iterations, "history": history, "searches": searches}
    for name, number in {**numbers, "portions": _PORTIONS * workers if portions is None else portions}.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    check_processes(workers + shards + 1, workers)
    run = _Run(job, Topology.served(workers, shards, 0), data, seed)
    portions = min(run.loss.samples, portions or _PORTIONS * workers)
    bounds = [run.loss.samples * k // portions for k in range(portions + 1)]
    done: list[Iteration] = []

    shown = ShownRun(job.name, f"lbfgs(history={history})", workers, iterations)
    with framed_program(shown, out) as frame:

        def noted(iteration: Iteration) -> None:
            done.append(iteration)
            frame.record({"kind": "train", "step": iteration.number, **iteration._asdict()})
            on_iteration(iteration)

        machine = LbfgsCoordinator(
            asking(iterations, history, tolerance, searches), run.shards, run.topology.workers, bounds, noted
        )
        engine = frame.opened(Local(), Launch(run.act, None, dict, workers, workers + shards, threads))
        lost = run.conduct(engine, machine, timeout_s)
    return Minimised(run.model, done, lost, machine.copies)


class _Run:
    """The common part of all processes of a run, made before they are forked."""

    def __init__(self, job: Job, topology: Topology, data: Path | None, seed: int) -> None:
        self.topology, self.shards = topology, [chain[0] for chain in topology.chains]
        torch.manual_seed(seed)
        self.model = model_of(job)
        self.loss = PortionLoss(job, self.model, data_of(job, data), seed)
        self._x = self.loss.here()
        if self._x.numel() < len(self.shards):
            raise ValueError(f"{len(self.shards)} shards cannot share {self._x.numel()} parameters; use fewer shards")
        self._parts = self._x.tensor_split(len(self.shards))
        self._mail: MailboxDirectory | None = None

    def act(self, role: Role) -> None:
        """Be one process: a shard, or a replica."""
        coordinator = self.topology.coordinator
        if role.kind == "copy":
            machine: Machine = VectorShard(coordinator, self._parts[role.shard])
        else:
            sizes = [part.numel() for part in self._parts]
            machine = LbfgsReplica(coordinator, self.shards, sizes, self.loss.at)
        assert self._mail is not None
        line = self._mail.mailbox(role.node, own_process=True)
        try:
            world = MailWorld(role.node, line, [0] * (coordinator + 1))
            world.drive(serve(world.port, machine))
        finally:
            line.close(_LINGER_S)

    def conduct(self, engine: Engine, machine: LbfgsCoordinator, timeout_s: float) -> list[int]:
        """Be the coordinator. Returns the replicas that were lost; the model has the parameters of the end."""
        address = engine.address
        assert address.home is not None
        self._mail = MailboxDirectory(address.home, "shared", None, 8 * self._x.numel())
        self._mail.open()
        for shard, node in enumerate(self.shards):
            engine.start(Role("copy", node, node, shard=shard))
        for node in self.topology.workers:
            engine.start(Role("worker", node, node))
        line = self._mail.mailbox(self.topology.coordinator)  # its threads would not survive a fork
        try:
            conducted = _Conducted(engine, machine, line, timeout_s, self.topology.coordinator + 1)
            conducted.run()
            self.loss.place(torch.cat(conducted.fetched(self.shards)))
            for node in (*self.shards, *machine.replicas):
                line.post(node, RunOver())
        finally:
            line.close(_LINGER_S)
        return conducted.lost


class _Conducted:
    """The coordinator's machine, its mail, and the processes that it depends on."""

    def __init__(self, engine: Engine, machine: LbfgsCoordinator, line: Mail, timeout_s: float, size: int) -> None:
        self._engine, self._machine, self._line, self._size = engine, machine, line, size
        self._timeout_s = timeout_s
        self.lost: list[int] = []

    def run(self) -> None:
        """Until the machine has finished."""
        self._post(self._machine.tick(0.0))
        while not self._machine.finished:
            source, message = self._taken()
            self._post(self._machine.receive(0.0, source, message))

    def fetched(self, shards: list[int]) -> list[Tensor]:
        """All shards' parts of the parameters."""
        self._post([(shard, Fetch(FINAL)) for shard in shards])
        found: dict[int, Tensor] = {}
        while len(found) < len(shards):
            source, message = self._taken()
            if isinstance(message, Fetched):
                found[source] = message.values
        return [found[shard] for shard in shards]

    def _taken(self) -> tuple[int, Message]:
        """The next message. Errors: TimedOut; WorkerDied."""
        until_s = time.monotonic() + self._timeout_s
        while time.monotonic() < until_s:
            taken = self._line.take(_LOOK_S)
            self._look()
            if taken is not None:
                return taken
        raise TimedOut(self._size - 1, None, "an operation of a shard or a portion of a replica", self._timeout_s)

    def _look(self) -> None:
        for process in self._engine.poll(0.0):
            node = process.role.node
            was_killed = process.exit_code is not None and process.exit_code < 0
            if process.role.kind != "worker" or not was_killed or self._machine.replicas == [node]:
                raise died([process], self._size, str(process.role))
            print(f"note: replica {node} was killed; the others go on", file=sys.stderr)
            self.lost.append(node)
            self._post(self._machine.lost(node))

    def _post(self, out: Outbox) -> None:
        for to, message in out:
            self._line.post(to, message)
