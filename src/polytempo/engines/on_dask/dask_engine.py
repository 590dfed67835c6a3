"""The dask engine: agents as tasks of an existing `distributed` cluster, each pinned to one of its workers.

    client (head of the run) ── submit(hold_agent, ticket, workers=[address]) ──▶ scheduler ──▶ dask worker
                                                      agent, its child process ──▶ processes of the run

A task secedes from its worker's pool of threads, so it takes none of the places for other tasks.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from polytempo.engines.engine import Engine, Launch
from polytempo.engines.extras import required
from polytempo.engines.on_dask.task import end_agent, hold_agent
from polytempo.engines.remote.network import address_to
from polytempo.engines.remote.remote_engine import opened_remote
from polytempo.engines.remote.ticket import AgentTicket, StartedAgent

_LOOK_S = 0.5
"""The interval between questions to the scheduler about its workers."""
_END_S = 15.0
"""Agents may take so long to end when asked: longer than `held_agent` waits before it ends one for certain."""
_PAUSE_S = 0.02
_CONNECT_S = 20.0


@dataclass(frozen=True)
class Dask:
    """Processes on the workers of a dask cluster.

        pt.run(job, strategy, workers=4, engine=pt.engines.dask(client))

    `client` is a `distributed.Client`, or the address of a scheduler ("tcp://host:8786"), to which the run makes a
    connection of its own. `workers` names the addresses of dask workers to use; None: all. On each of them is one
    agent, which starts its share of the run's processes.

    Errors: ValueError where no scheduler answers, or no worker is there, or it is not known; ImportError without dask;
    PolytempoError where the agents are not there within `wait_s`.
    """

    client: Any
    workers: Sequence[str] | None = None
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        if isinstance(self.workers, str) or (self.workers is not None and not self.workers):
            raise ValueError(f"workers={self.workers!r} must be some addresses of dask workers, or None for all")
        if self.wait_s <= 0:
            raise ValueError(f"wait_s={self.wait_s} must be more than 0")
        if isinstance(self.client, str):
            if not self.client:
                raise ValueError("a scheduler's address is missing; give one, such as dask:tcp://host:8786")
            return
        if not hasattr(self.client, "nthreads"):
            raise ValueError(f"client={self.client!r} must be a distributed.Client, or the address of a scheduler")
        if self.client.asynchronous:
            raise ValueError("this client is asynchronous; give a client with asynchronous=False")

    @classmethod
    def from_address(cls, address: str) -> Dask:
        """The engine of the command line's `dask:tcp://host:8786`."""
        return cls(address)

    @contextmanager
    def open(self, launch: Launch) -> Iterator[Engine]:
        """See `EngineSetup`."""
        if launch.spec is None:
            raise ValueError("a function cannot travel to a dask worker; give engine=pt.engines.local()")
        with _connected(self.client) as client:
            starter = DaskStarter(client, self.workers)
            address = address_to(host_of(client.scheduler.address))
            num_agents = len(starter.usable())
            with opened_remote(launch, starter, num_agents, address=address, wait_s=self.wait_s) as engine:
                yield engine


@contextmanager
def _connected(client: Any) -> Iterator[Any]:
    if not isinstance(client, str):
        yield client
        return
    distributed = required("distributed", "dask")
    try:
        own = distributed.Client(client, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no dask scheduler answers at {client!r} ({error}); start one by `dask scheduler`, or give the address "
            "of one, such as tcp://host:8786"
        ) from error
    with own:
        yield own


def host_of(url: str) -> str:
    """The host in `tcp://host:port`, or in `tls://[::1]:8786`; a cluster of threads is in this process."""
    return "127.0.0.1" if url.startswith("inproc:") else url.partition("://")[2].rpartition(":")[0].strip("[]")


def spread(workers: Sequence[str], agents: Mapping[str, int], count: int) -> list[str]:
    """The workers of `count` new agents: each time a worker with the fewest, in the order of `workers`."""
    taken, chosen = Counter(agents), list[str]()
    for _ in range(count):
        chosen.append(min(workers, key=lambda address: taken[address]))
        taken[chosen[-1]] += 1
    return chosen


@dataclass(eq=False)
class _Task:
    started: StartedAgent
    worker: str
    key: str
    future: Any
    """The future word on how its agent ended."""


class DaskStarter:
    """See `AgentStarter`."""

    replaces = True

    def __init__(self, client: Any, workers: Sequence[str] | None = None) -> None:
        self._client, self._workers = client, workers
        self._tasks: list[_Task] = []
        self._look_at_s = 0.0

    def usable(self) -> list[str]:
        """The addresses of the workers that agents may be on. ValueError where there is none."""
        there = self._there()
        found = there if self._workers is None else [address for address in self._workers if address in there]
        if not found:
            asked = "" if self._workers is None else f" of {', '.join(self._workers)}"
            raise ValueError(
                f"the dask scheduler at {self._client.scheduler.address} has no worker{asked}; start some by "
                f"`dask worker {self._client.scheduler.address}`"
            )
        return found

    def _there(self) -> list[str]:
        """The workers that the scheduler names at this moment. `Client.scheduler_info` may answer an earlier question
        of the client's own, which is without workers.
        """
        return list(self._client.nthreads())

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> list[StartedAgent]:
        """See `AgentStarter`."""
        agents = Counter(task.worker for task in self._tasks if task.started.ended is None)
        places = spread(self.usable(), agents, len(numbers))
        begun = [self._begin(number, place, ticket) for number, place in zip(numbers, places, strict=True)]
        self._tasks += begun
        return [task.started for task in begun]

    def _begin(self, number: int, worker: str, ticket: AgentTicket) -> _Task:
        key = f"polytempo-agent-{number}-{secrets.token_hex(4)}"
        text = ticket.numbered(number).to_json()
        future = self._client.submit(
            hold_agent, key, text, key=key, workers=[worker], allow_other_workers=False, retries=0, pure=False
        )
        return _Task(StartedAgent(number, f"dask worker {worker}"), worker, key, future)

    def poll(self) -> None:
        """See `AgentStarter`."""
        running = [task for task in self._tasks if task.started.ended is None]
        for task in running:
            if task.future.status == "finished":
                task.started.ended = str(task.future.result())
            elif task.future.done():
                task.started.ended = f"was lost by dask (its task is {task.future.status})"
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_S
        there = self._there()
        for task in running:
            if task.started.ended is None and task.worker not in there:
                task.started.ended = "ended with its dask worker, which the scheduler has lost"
                task.future.cancel()  # or it would begin again where a new worker gets the same address

    def stop(self) -> None:
        """See `AgentStarter`."""
        running = [task for task in self._tasks if task.started.ended is None]
        with suppress(OSError, TimeoutError):  # the cluster is gone: its workers' agents end with them
            there = self._there()
            for task in running:
                if task.worker in there:
                    self._client.run(end_agent, task.key, workers=[task.worker], wait=False, on_error="ignore")
            until_s = time.monotonic() + _END_S
            while time.monotonic() < until_s and not all(
                task.future.done() for task in running if task.worker in there
            ):
                time.sleep(_PAUSE_S)
        for task in running:
            task.started.ended = task.started.ended or "was ended"
            task.future.cancel()
