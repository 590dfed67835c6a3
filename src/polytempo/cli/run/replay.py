"""`polytempo replay`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import typer

from polytempo.cli.look.look_options import ReplayOptions
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.replay.message_order import Stop
from polytempo.replay.records import read_facts
from polytempo.replay.replay import PushSeen, Replayed
from polytempo.replay.replay import replay as replayed_of
from polytempo.spec.job import Job
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.spec.text.plain_text import plain_text

_SHOWN = 20
_COLUMNS = ("entry", "worker", "step", "tickets", "basis", "version", "stale", "loss", "norm", "outcome")
_MOST_TICKETS = 4


def replay(asked: ReplayOptions) -> None:
    """Re-run a run; ends with exit code 1 where it differs from the record."""
    stop, shard = None if asked.until is None else Stop(*asked.until), asked.shard
    _, facts = read_facts(asked.run)
    if not 0 <= shard < facts.shards:
        raise ValueError(f"--shard {shard}: the run had {facts.shards} shards, numbered from 0")
    with notes_on_stderr():
        done = replayed_of(
            *(asked.run, _job(asked.job or facts.origin), parse_strategy(facts.strategy)), stop=stop, data=asked.data
        )
    pushes = [push for push in done.pushes if push.shard == shard]
    if asked.json:
        show_json(replace(done, pushes=pushes if asked.inspect else pushes[-_SHOWN:]).as_json())
    else:
        _show(done, stop, pushes, facts.shards, inspect=asked.inspect)
    if not done.same:
        raise typer.Exit(1)


def _job(origin: str | None) -> Job:
    if origin is None:
        raise ValueError(
            "the run was started from Python, so its record names no job; name it with --job path/to/file.py:job"
        )
    return found_job(origin)


def _show(done: Replayed, stop: Stop | None, pushes: Sequence[PushSeen], shards: int, *, inspect: bool) -> None:
    resumed = f", from its resume number {done.generation} on" if done.generation else ""
    print(plain_text(f"{done.run}: {done.strategy} on {done.job}, {done.workers} workers{resumed}"))
    for note in done.notes:
        print(plain_text(f"note: {note}"))
    if inspect or stop is not None or done.difference or done.errors:
        of = "" if shards == 1 else f" of shard {pushes[0].shard if pushes else 0}"
        shown = pushes if inspect else pushes[-_SHOWN:]
        print(f"{counted(len(shown), len(pushes))}{of}:")
        show_table(_COLUMNS, [_row(push, done.workers) for push in shown])
    for life, error in done.errors.items():
        print(plain_text(f"worker {life.partition('.')[0]} (life {life.partition('.')[2]}) ended by {error}"))
    for line in _verdict(done, stop):
        print(plain_text(line))


def counted(shown: int, pushes: int) -> str:
    """The line above the table of pushes.

    >>> counted(1, 1), counted(7, 7), counted(20, 36)
    ('the only push', 'all 7 pushes', 'the last 20 of 36 pushes')
    """
    if shown < pushes:
        return f"the last {shown} of {pushes} pushes"
    return "the only push" if pushes == 1 else f"all {pushes} pushes" if pushes else "no pushes"


def _row(push: PushSeen, workers: int) -> tuple[str, ...]:
    tickets = ", ".join(map(str, push.tickets[:_MOST_TICKETS])) + (", …" if len(push.tickets) > _MOST_TICKETS else "")
    worker = str(push.worker) if push.life == 1 else f"{push.worker} (life {push.life})"
    became = f"{push.verdict}: {push.reason}" if push.reason else push.verdict
    loss = "-" if push.loss is None else f"{push.loss:.4g}"
    numbers = str(push.basis), str(push.version), str(push.staleness)
    step = str(max(push.tickets) // workers + 1) if push.tickets else "-"  # as the metrics count
    return str(push.entry), worker, step, tickets or "-", *numbers, loss, f"{push.norm:.3g}", became


def _verdict(done: Replayed, stop: Stop | None) -> list[str]:
    """The result for a person, the main thing last."""
    taken = ", ".join(f"{name} {passed} of {all_}" for name, (passed, all_) in done.entries.items())
    lines = [f"entries taken in: {taken}"]
    if done.difference is not None:
        return [*lines, f"DIFFERENT. The first difference: {done.difference}"]
    if done.stopped is not None:
        return [*lines, f"stopped at {done.stopped}; the same as recorded so far, {done.rows} rows of metrics too"]
    if stop is not None:
        lines.append(f"{stop.kind} {stop.number} was not reached: the record ends before it")
    if done.ends:
        return [*lines, *(f"the record ends before {end}" for end in done.ends), "the same as recorded so far"]
    if done.recorded_sha256 is None:
        return [*lines, "the same as recorded; the run did not come to its end, so there are no final weights"]
    return [
        *lines,
        f"the same to the bit: {done.rows} rows of metrics, and the final weights, sha256 {done.parameters_sha256}",
    ]
