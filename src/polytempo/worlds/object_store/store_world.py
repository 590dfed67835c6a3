"""`StoreWorld`: the world of a worker that meets others in an object store alone; `join_bucket` enters it."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from polytempo.core.calls.refusals import refuse
from polytempo.core.op import Collective, Op, Pull, Recv, Send, Work
from polytempo.core.system.url_path import UrlPath
from polytempo.worlds.object_store.object_store import ObjectStore, StoreFailed, StoreRequests
from polytempo.worlds.object_store.objects import objects_at
from polytempo.worlds.object_store.rounds import StoreRounds
from polytempo.worlds.process.process_world import ProcessWorld, set_current
from polytempo.worlds.process.transport import Begun, Transport
from polytempo.worlds.trace import OpTotals, Trace


class StoreTransport(Transport):
    """Performs collectives through an object store. Messages between two workers are refused (PT2903)."""

    def __init__(self, rounds: StoreRounds) -> None:
        super().__init__(rounds.worker, rounds.workers, rounds)
        self._rounds = rounds

    @property
    def timeout_s(self) -> float:
        """The deadline of operations."""
        return self._rounds.timeout_s

    def forget(self) -> None:
        """Do nothing: there are no groups."""

    def send(self, op: Send) -> Begun:
        """Refuse."""
        self._rounds.check_inside(op)
        refuse({"object store", "messages"}, what=str(op))
        raise AssertionError(op)

    def recv(self, op: Recv) -> Begun:
        """Refuse."""
        self._rounds.check_inside(op)
        refuse({"object store", "messages"}, what=str(op))
        raise AssertionError(op)

    def collective(self, op: Collective[Any]) -> Begun:
        """Perform it to its end."""
        answer = self._rounds.perform(op)
        return Begun(None, lambda: answer)

    def translated(self, op: Op[Any], step: int, peer: int, error: RuntimeError) -> Exception:
        """The error itself."""
        return error


class StoreTrace(Trace):
    """The trace of a worker that exchanges by requests of its store, in collectives and outside of them."""

    def __init__(self, requests: StoreRequests) -> None:
        super().__init__(timed=False)
        self._requests = requests

    def exchanged(self, rank: int) -> dict[str, OpTotals]:
        """The requests so far: `put` and `get`."""
        return self._requests.totals


class StoreWorld(ProcessWorld):
    """Worker `rounds.worker` of `rounds.workers`; see `join_bucket`."""

    def __init__(self, rounds: StoreRounds) -> None:
        super().__init__(rounds.worker, range(rounds.workers), group=rounds)
        self.rounds = rounds
        self.parting: Callable[..., None] = rounds.leave
        """Tells the other workers that this one goes; `done`: with its work behind it."""
        self.pulled: Callable[[], Any] | None = None
        """The answer to a pull that was begun, where the store has a log."""
        self.transport = StoreTransport(rounds)
        self.trace = StoreTrace(rounds.store.requests)
        rounds.store.waits = self._waited

    def perform(self, op: Op[Any]) -> Any:
        """The answer to an operation, or an object to wait for."""
        if isinstance(op, Work) and isinstance(op.handle, Pull) and self.pulled is not None:
            return self.pulled()
        return super().perform(op)

    def _waited(self, seconds: float) -> None:
        self.waited_s += seconds

    def leave(self) -> None:
        """Tell the other workers not to wait for this one. The end of the process does it, too."""
        self.parting(done=True)

    def at_exit(self) -> None:
        """Leave; after an error keep no state. A store that does not answer ends this silently."""
        with suppress(StoreFailed):
            self.parting(done=getattr(sys, "last_value", None) is None)


def join_bucket(
    url: str | Path | UrlPath,
    *,
    worker: int,
    workers: int,
    wait_s: float = 60.0,
    timeout_s: float = 1800.0,
    retry_s: float = 60.0,
) -> StoreWorld:
    """Train with workers that see no address of each other, only an object store: `s3://bucket/run`, a shared folder.

        pt.join_bucket("s3://bucket/run", worker=2, workers=4)
        pt.attach(model, optimizer, "diloco(period=100)")
        for x, y in pt.shard(data, batch_size=32): …

    Call it in place of `pt.init()`, and once in a process: `attach` and `shard` then use it. Workers have the numbers
    0 to `workers` - 1, each once. A run has a URL of its own; credentials are the filesystem's own affair. Strategies
    that exchange rarely work: `local_sgd`, `diloco`, `slowmo`, `sparse_loco` and others made of `every(period, …)`; and
    `async_diloco` and `decoupled_diloco`, with a log in the store for a server (`store_log`).

    A round waits for a worker for `wait_s` seconds, then goes on without it. A worker that was left out, or that is
    started again, gets the newest state from another one, with its position in the data, and takes part from the next
    round on. `timeout_s`: without any other worker for so long it gives up. `retry_s`: an operation of the store is
    tried again for so long.

    Errors: ValueError for a number out of range; `Incompatible` (PT29xx) for a strategy that exchanges in every step,
    and for a store without conditional puts; `StoreFailed` with the code PT2906 for a store that does not answer, or
    immediately for a missing bucket, and PT2907 where no worker does.

    By a log no worker waits for another, but for a quorum. Cost of a push of k workers: two puts and a get of the log,
    and meanwhile the k - 1 others' movements; each worker has a copy of the server's parameters and momentum.

    Cost of a round of k workers by a mean: 3 k + 3 puts, and gets by waiting; a worker sends its tensors once and
    receives the sum once, and the merger receives the others' tensors. `polytempo explain STRATEGY --bucket` counts
    requests and bytes of any strategy.
    """
    if not 0 <= worker < workers:
        raise ValueError(f"worker is {worker} of {workers}; workers count from 0 to workers - 1")
    for name, seconds in (("wait_s", wait_s), ("timeout_s", timeout_s), ("retry_s", retry_s)):
        if not 0 < seconds < math.inf:
            raise ValueError(f"{name} is a number of seconds over 0, got {seconds}")
    store = ObjectStore(objects_at(url), str(url), deadline_s=retry_s)
    store.check_conditional()
    world = StoreWorld(StoreRounds(store, worker, workers, wait_s=wait_s, timeout_s=timeout_s))
    set_current(world)
    atexit.register(world.at_exit)
    return world
