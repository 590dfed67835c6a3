"""`Tally`: the rows of workers of a parameter server, and the result of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polytempo.core.calls.refusals import refuse
from polytempo.data.batches import Batches
from polytempo.data.usage import of_tickets
from polytempo.diagnosis.bound import NETWORK, StepParts, UsedLink, bound
from polytempo.diagnosis.server_pace import ServedPaces
from polytempo.report.status.rows import METRIC_KINDS
from polytempo.runs.served.run_snapshot import RunSnapshot
from polytempo.runs.served.served_program import ServedProgram
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.message import Statistics
from polytempo.spec.job import OF_ROWS
from polytempo.spec.result import Result
from polytempo.spec.run_options import goals_met
from polytempo.training.job.start import start_facts
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.served.server_facts import facts_of
from polytempo.training.served.worker_program import Attendance
from polytempo.training.step.guard import check_score
from polytempo.training.step.pace_store import LEAST_LOST_S


class ServedTotals(NamedTuple):
    """The totals of all processes of a run."""

    world: str
    """"process" or "virtual"."""
    attendances: Sequence[Attendance]
    """The attendances of workers that lived to the end."""
    statistics: Sequence[Statistics]
    """The statistics of each shard."""
    idle_share: Callable[[float], float]
    """A function from the run's seconds to the workers' share of time without computation."""
    worker_bytes: int
    """Bytes that the workers have sent."""
    server_bytes: int
    """Bytes that the shards' copies have sent."""
    threads: int
    parameters_sha256: str | None
    trace_hash: str
    stages: Sequence[dict[str, Any]] = ()
    """The reports of a replica's stages; see `Result.stages`."""
    link: UsedLink = NETWORK
    server_busy: float | None = None
    """Part of its time that the busiest server's processor computes; None: not measured."""
    server_facts: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default, which is only read)
    """Further facts for `Result.server`."""


class Tally:
    """The rows of metrics so far, which `record` takes. It stops the run when `until` is reached."""

    def __init__(
        self,
        program: ServedProgram,
        coordinator: Coordinator,
        record: Callable[[dict[str, Any]], None],
        before: RunSnapshot | None = None,
        host: CallbackHost | None = None,
        *,
        least_lost_s: float = LEAST_LOST_S,
    ) -> None:
        self._spec, self._service, self._batches = program.spec, program.plan.service, program.batches
        self._precision = program.precision
        self._coordinator, self._scheduler, self._record = coordinator, coordinator.scheduler, record
        self.last_step, self._seconds = (0, 0.0) if before is None else (before.step, before.seconds)
        """The highest step of any row, and the seconds of the run before it was resumed."""
        replicas = self._spec.workers // self._spec.strategy.stages  # one row for all stages of a replica
        self._paces = ServedPaces(replicas, self._batches.size, least_lost_s)
        self._found: list[dict[str, Any]] = []
        self._resumed_at = None if before is None else before.step
        self._host, self._asked_to_stop = host, False
        self._tested: dict[str, Any] | None = None
        self._trained: dict[str, Any] | None = None
        self._reached: bool | None = False if self._spec.options.until else None
        self.on_save: Callable[[], None] = lambda: None
        """Called where a callback asks for a checkpoint."""

    def take(self, text: bytes) -> None:
        """Take a row, as JSON, of any worker."""
        self.take_row(json.loads(text))

    def take_row(self, row: dict[str, Any]) -> None:
        """Take a row; its time counts from the first work of the run, also if the run was resumed."""
        if row["kind"] not in METRIC_KINDS:
            return self._record(row)
        row = row | {"seconds": self._seconds + max(0.0, row["seconds"] - self._coordinator.began_s)}
        self.last_step = max(self.last_step, row["step"])
        if row["kind"] == "test":
            self._tested = row
            if not self._reached:
                self._reached = goals_met(row, self._spec.options.until)
                if self._reached:
                    self._coordinator.stop()
        else:
            self._trained = row
        self._record(row)
        for found in self._paces.take(row) if row["kind"] == "train" else ():
            self._found.append(found)
            self._record(found)
        if self._host is not None:
            self._call(self._host, row)

    def _call(self, host: CallbackHost, row: dict[str, Any]) -> None:
        """Call the callbacks that the row is due to, and follow their requests."""
        host.take_row(row)
        if row["kind"] == "train":
            host.stepped(row["step"], row["epoch"], row["samples"], row["seconds"])
        asked = host.take()
        if asked.evaluate:
            refuse({"asked evaluation", "server"})
        if asked.save:
            self.on_save()
        if asked.stop and not (self._asked_to_stop or self._reached or self._scheduler.finished):
            self._asked_to_stop = True
            self._coordinator.stop()

    def result(self, totals: ServedTotals) -> Result:
        """The run in numbers."""
        workers = self._spec.workers
        trained = [a for a in totals.attendances if a.steps]  # who came too late for a batch has no time
        seconds = max(a.end_s for a in trained) - min(a.begin_s for a in trained) if trained else 0.0
        samples = _samples_behind(self._scheduler, self._batches)
        train_loss = None if self._trained is None else self._trained["loss"]
        if not self._spec.options.allow_nan and self._tested is not None:
            check_score(self._tested["loss"], self.last_step)
        return Result(
            job=self._spec.job.name,
            strategy=str(self._spec.strategy),
            world=totals.world,
            workers=workers,
            steps=-(-sum(last - first + 1 for first, last in self._scheduler.done) // self._batches.size),
            epochs=samples / self._batches.num_samples,
            samples=samples,
            seconds=self._seconds + seconds,
            samples_per_s=samples / (self._seconds + seconds) if seconds else 0.0,
            loss=train_loss if self._tested is None else self._tested["loss"],
            accuracy=None if self._tested is None else self._tested["accuracy"],
            train_loss=train_loss,
            callbacks=None if self._host is None else self._host.report(),
            metrics={n: v for n, v in (self._tested or {}).items() if n not in OF_ROWS} or None,
            bytes_sent_per_rank=totals.worker_bytes / workers,
            communication_share=min(1.0, max(0.0, totals.idle_share(seconds))) if seconds else 0.0,
            batch_size=self._spec.batch_size,
            seed=self._spec.seed,
            threads=totals.threads,
            parameters_sha256=totals.parameters_sha256,
            trace_hash=totals.trace_hash,
            reached=self._reached,
            resumed_at=self._resumed_at,
            ledger=of_tickets(
                *(self._batches, self._scheduler.done, [shard.tickets for shard in totals.statistics]),
                numbers_per_batch=self._service.numbers_per_batch,
            ),
            server=facts_of(self._service, totals.statistics, totals.attendances, totals.server_bytes)
            | totals.server_facts,
            stages=list(totals.stages) or None,
            precision=self._precision,
            started_from=start_facts(self._spec.options),
            bound=self._bound(totals, trained),
            diagnoses=self._found,
        )

    def _bound(self, totals: ServedTotals, trained: Sequence[Attendance]) -> dict[str, Any] | None:
        """`Result.bound`, by the workers' mean batch."""
        batches = sum(each.steps for each in trained)
        if not batches:
            return None
        lived_s = sum(each.end_s - each.begin_s for each in trained) / batches
        idle_s = min(lived_s, sum(each.idle_s for each in trained) / batches)
        noise = None if self._trained is None else self._trained.get("noise_scale")
        found = bound(
            StepParts(
                str(self._spec.strategy),
                len(trained),
                compute_s=max(0.0, lived_s - idle_s),
                wait_s=idle_s,
                least_wait_s=idle_s,
                sent_bytes=totals.worker_bytes / batches,
                messages=2.0 * self._service.shards,
                link=totals.link,
                batch_size=self._spec.batch_size,
                noise_scale=noise,
                serves=True,
                server_busy=totals.server_busy,
                virtual=totals.world == "virtual",
            )
        )
        return None if found is None else found.as_json()


def _samples_behind(scheduler: BatchScheduler, batches: Batches) -> int:
    """The samples of the finished tickets; of an unfinished epoch, as if its first tickets were finished."""
    return batches.samples_before(sum(last - first + 1 for first, last in scheduler.done))
