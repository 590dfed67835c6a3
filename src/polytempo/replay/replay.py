"""`replay`: runs a recorded run with a parameter server again, compares it with the record, lists its pushes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polytempo.core import Strategy
from polytempo.native.library import available
from polytempo.replay.message_order import Arrived, Stop
from polytempo.replay.records import Recorded, read_run
from polytempo.replay.rerun import Rerun
from polytempo.runs.served.recording import bits_now, sha256_of
from polytempo.spec.job import Job

STOPS = ("step", "ticket", "version")
_TIMES = ("seconds", "samples_per_s", "idle_share", "staleness")
"""The fields of a row of metrics that depend on the clock."""
_MEASURED = ("noise_scale", "gradient_square", "noise_trace")
"""The fields of the option `noise_scale`, which changes no step. A replay does not measure again."""


class PushSeen(NamedTuple):
    """A gradient, or a sum of gradients, as one shard took it in."""

    shard: int
    entry: int
    """The number in the shard's log."""
    worker: int
    life: int
    clock: int
    """The worker's own step."""
    tickets: tuple[int, ...]
    """The batches that it is of."""
    samples: int
    basis: int
    """The version of the weights that it was computed on."""
    version: int
    """The shard's version when it came."""
    staleness: int
    """Updates between the two, when it was used; when it came, as long as it waits."""
    verdict: str
    """ "applied", "dropped", "refused", or "waits" for other workers' gradients."""
    reason: str
    loss: float | None
    """The mean loss of its batches."""
    norm: float
    """The norm of the whole gradient, over all shards."""


@dataclass(frozen=True)
class Replayed:
    """The outcome of a replay."""

    run: str
    job: str
    strategy: str
    workers: int
    generation: int
    same: bool | None
    """True if the replay was as recorded, to the bit, up to its end."""
    difference: str | None
    """The first difference."""
    stopped: str | None
    """The stop that was asked for, if the replay reached it."""
    ends: list[str]
    """Machine -> its next entry, if the records end before the run's end."""
    entries: dict[str, list[int]]
    """Machine -> [entries taken in, entries recorded]."""
    rows: int
    """Rows of metrics that are as in the run."""
    parameters_sha256: str | None
    """The hash of the final weights; None if the replay does not come to the end."""
    recorded_sha256: str | None
    errors: dict[str, str]
    """Lives of workers that ended with an error: "worker.life" -> error."""
    notes: list[str]
    """Differences of machine and software from the recorded run that may change bits."""
    pushes: list[PushSeen]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"pushes": [push._asdict() for push in self.pushes]}


def replay(
    run: Path, job: Job, strategy: Strategy, *, stop: Stop | None = None, data: str | Path | None = None
) -> Replayed:
    """Re-run the run in the folder `run` in the virtual world, and compare it with its record.

    Each shard and the coordinator take in the same messages in the same order. So the gradients, the weights and the
    losses come out the same, to the bit, on the same kind of machine. `stop` ends it early; see `Stop`. After a resume
    the record begins with the snapshot that the run went on from.

    Cost: the run's own arithmetic in one process, and each living worker's memory.

    Errors: ValueError where there is no record, or it is of another job or strategy, or begins after `stop`;
    RecordError where it is damaged.
    """
    recorded = read_run(run)
    _check(recorded, job, strategy, stop)
    rerun = Rerun(recorded, job, strategy, data, stop)
    rerun.progress.check_stop(rerun.shards[0].version)
    rerun.perform()
    ends = [] if rerun.progress.stopped else [order.waits_for for order in rerun.orders if order.waits_for]
    difference, num_rows = _compare(recorded, rerun, ends)
    facts = recorded.facts
    recorded_sha256 = None if recorded.result is None else recorded.result["parameters_sha256"]
    finals = list(rerun.finals.values())
    return Replayed(
        run=str(run),
        job=facts.job,
        strategy=facts.strategy,
        workers=facts.workers,
        generation=facts.generation,
        same=difference is None,
        difference=difference,
        stopped=f"{stop.kind} {stop.number}" if stop is not None and rerun.progress.stopped else None,
        ends=ends if difference is None else [],
        entries={order.name: [order.passed, len(order.entries)] for order in rerun.orders},
        rows=num_rows,
        parameters_sha256=None if not finals else recorded_sha256 if recorded_sha256 in finals else finals[0],
        recorded_sha256=recorded_sha256,
        errors=rerun.errors,
        notes=_notes(recorded, job),
        pushes=[_seen(rerun, arrived) for shard in rerun.shards for arrived in shard.pushes],
    )


def _compare(recorded: Recorded, rerun: Rerun, ends: Sequence[str]) -> tuple[str | None, int]:
    """The first difference from the record, and how many rows of metrics are the same. `ends`: where records end."""
    difference = rerun.progress.difference
    whole = not ends and not rerun.progress.stopped
    rows, row_difference = _compare_rows(recorded, rerun.rows, whole=whole)
    scores, score_difference = _compare_scores(recorded, rerun.scored)
    if difference is None and ends and recorded.whole and recorded.finals:
        difference = f"{ends[0]} never came" + "".join(f"; worker {k} ended by {e}" for k, e in rerun.errors.items())
    difference = difference or row_difference or score_difference
    if difference is None and whole:
        difference = _compare_finals(recorded.finals, rerun.finals)
    return difference, rows + scores


def _check(recorded: Recorded, job: Job, strategy: Strategy, stop: Stop | None) -> None:
    facts = recorded.facts
    for what, saved, given in (("job", facts.job, job.name), ("strategy", facts.strategy, str(strategy))):
        if saved != given:
            raise ValueError(f"the run was of {what} {saved!r}, not {given!r}; replay it with its own {what}")
    if stop is not None and (stop.kind not in STOPS or stop.number < (stop.kind != "ticket")):
        raise ValueError(
            "a replay stops at step=K or version=K with K >= 1, or at ticket=T with T >= 0, not at "
            f"{stop.kind}={stop.number}"
        )


def _compare_rows(recorded: Recorded, rows: Sequence[dict[str, Any]], *, whole: bool) -> tuple[int, str | None]:
    """The number of equal rows about training, and the first difference."""
    before = [row for row in recorded.rows if row["kind"] == "train"]
    if recorded.facts.generation:  # the rows of earlier starts come first
        if not whole:
            return 0, None
        before = before[max(0, len(before) - len(rows)) :]
    for number, (was, now) in enumerate(zip(before, rows, strict=False)):
        if difference := _row_difference(f"row {number + 1} about training", was, now):
            return number, difference
    if whole and recorded.finals and len(before) != len(rows):
        return len(before), f"metrics: {len(before)} rows recorded, {len(rows)} replayed"
    return min(len(before), len(rows)), None


def _compare_scores(recorded: Recorded, rows: Sequence[dict[str, Any]]) -> tuple[int, str | None]:
    """Compare rows about tests: a run may lack some, because its evaluator was busy.

    A run's end and an epoch's end may have one step number.
    """
    replayed = defaultdict(list)
    for row in rows:
        replayed[row["step"]].append(row)
    found = 0
    for was in recorded.rows:
        if was["kind"] != "test" or was["step"] not in replayed:  # it is of an earlier start, or behind where this ends
            continue
        differences = [_row_difference("a row about a test", was, now) for now in replayed[was["step"]]]
        if all(differences):
            return found, differences[-1]
        found += 1
    return found, None


def _row_difference(which: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for key in sorted(was.keys() | now.keys()):
        if key not in _TIMES + _MEASURED and was.get(key) != _finite(now.get(key)):
            where = f"metrics, {which} (step {was['step']})"
            return f"{where}: {key} recorded as {was.get(key)}, replayed as {now.get(key)}"
    return None


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _compare_finals(recorded: Mapping[str, str], replayed: Mapping[str, str]) -> str | None:
    for life, sha256 in recorded.items():
        if replayed.get(life) != sha256:
            return f"worker {life}: final weights recorded as {sha256}, replayed as {replayed.get(life)}"
    return None


def _notes(recorded: Recorded, job: Job) -> list[str]:
    """Differences from the recorded run that may change bits."""
    facts, now = recorded.facts, bits_now()
    notes = [
        f"recorded with {name} {was}, replayed with {now.get(name, 'none')}"
        for name, was in facts.bits.items()
        if now.get(name) != was
    ]
    if facts.native and not available():
        notes.append("the shards used the native core, which is not there now; torch's operations stand in for it")
    if facts.threads > 1:
        notes.append(f"the workers had {facts.threads} threads each; only with one are sums surely in the same order")
    if facts.origin_sha256 is not None and sha256_of(job.origin) != facts.origin_sha256:
        notes.append(f"{facts.origin} has changed since the run")
    return notes


def _seen(rerun: Rerun, arrived: Arrived) -> PushSeen:
    progress, entry = rerun.progress, arrived.entry
    life = entry.worker, entry.incarnation
    fate = progress.verdicts.get((arrived.shard, life, entry.sequence))
    losses = dict(zip(progress.dealt[life], rerun.losses[life], strict=False))
    known = [losses[ticket] for ticket in entry.tickets if ticket in losses]
    return PushSeen(
        shard=arrived.shard,
        entry=arrived.number,
        worker=entry.worker,
        life=entry.incarnation,
        clock=entry.clock,
        tickets=entry.tickets,
        samples=entry.samples,
        basis=entry.basis,
        version=arrived.version,
        staleness=arrived.version - entry.basis if fate is None else fate.staleness,
        verdict="waits" if fate is None else fate.verdict,
        reason="" if fate is None else fate.reason,
        loss=sum(known) / len(known) if known else None,
        norm=math.sqrt(progress.squares[life, entry.clock, entry.tickets]),
    )
