"""`Tally`: what workers of a parameter server tell of their training, and the result that it adds up to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from polytempo.core import Strategy
from polytempo.core.rule import Service
from polytempo.data.batches import Batches
from polytempo.data.usage import of_tickets
from polytempo.engines.cast import reached, samples_behind
from polytempo.engines.run_snapshot import RunSnapshot
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.message import Statistics
from polytempo.spec.job import Job
from polytempo.spec.options import RunOptions
from polytempo.spec.result import Result
from polytempo.training.guard import check_score
from polytempo.training.server_facts import facts_of
from polytempo.training.server_worker import Attendance


class Tally:
    """The rows of metrics so far. `record(row)` takes them; `stop()` is called once when `until` is reached."""

    def __init__(
        self,
        job: Job,
        strategy: Strategy,
        service: Service,
        options: RunOptions,
        batches: Batches,
        scheduler: BatchScheduler,
        *,
        workers: int,
        before: RunSnapshot | None = None,
    ) -> None:
        self._workers = workers
        self._job, self._strategy, self._service, self._options = job, strategy, service, options
        self._batches, self._scheduler = batches, scheduler
        self.record: Callable[[dict[str, Any]], None] = lambda row: None
        self.stop: Callable[[], None] = scheduler.stop
        self.last_step, self._seconds = (0, 0.0) if before is None else (before.step, before.seconds)
        """The highest step of any row; and how long the run lasted before it was resumed."""
        self._samples = samples_behind(scheduler, batches)
        self._tested: dict[str, Any] | None = None
        self._trained: dict[str, Any] | None = None
        self._reached: bool | None = False if options.until else None

    def take(self, text: bytes) -> None:
        """A row, as JSON, of whichever worker."""
        self.take_row(json.loads(text))

    def take_row(self, row: dict[str, Any]) -> None:
        """A row; its time counts from the beginning of the run, however often that was resumed."""
        row = row | {"seconds": self._seconds + row["seconds"]}
        self.last_step = max(self.last_step, row["step"])
        if row["kind"] == "test":
            self._tested = row
            if not self._reached:
                self._reached = reached(row, self._options)
                if self._reached:
                    self.stop()
        else:
            self._trained = row
        self.record(row)

    def result(
        self,
        world: str,
        attendances: Sequence[Attendance],
        statistics: Sequence[Statistics],
        *,
        idle_share: Callable[[float], float],
        worker_bytes: int,
        server_bytes: int,
        threads: int,
        parameters_sha256: str | None,
        trace_hash: str,
        more: dict[str, Any] | None = None,
    ) -> Result:
        """The run in numbers. `idle_share(seconds)` is the workers' part of the time that was not computation; `more`
        goes into `Result.server`.
        """
        workers = self._workers
        trained = [a for a in attendances if a.steps]  # who came too late for a batch has no time
        seconds = max(a.end_s for a in trained) - min(a.begin_s for a in trained) if trained else 0.0
        samples = samples_behind(self._scheduler, self._batches)
        train_loss = None if self._trained is None else self._trained["loss"]
        if not self._options.allow_nan and self._tested is not None:
            check_score(self._tested["loss"], self.last_step)
        return Result(
            job=self._job.name,
            strategy=str(self._strategy),
            world=world,
            workers=workers,
            steps=-(-sum(last - first + 1 for first, last in self._scheduler.done) // workers),
            epochs=samples / self._batches.num_samples,
            samples=samples,
            seconds=self._seconds + seconds,
            samples_per_s=(samples - self._samples) / seconds if seconds else 0.0,
            loss=train_loss if self._tested is None else self._tested["loss"],
            accuracy=None if self._tested is None else self._tested["accuracy"],
            train_loss=train_loss,
            bytes_sent_per_rank=worker_bytes / workers,
            communication_share=min(1.0, max(0.0, idle_share(seconds))) if seconds else 0.0,
            batch_size=self._batches.batch_size,
            seed=self._options.seed,
            threads=threads,
            parameters_sha256=parameters_sha256,
            trace_hash=trace_hash,
            reached=self._reached,
            ledger=of_tickets(
                *(self._batches, self._scheduler.done, [shard.tickets for shard in statistics]),
                numbers_per_batch=self._service.numbers_per_batch,
            ),
            server=facts_of(self._service, statistics, attendances, server_bytes) | (more or {}),
        )
