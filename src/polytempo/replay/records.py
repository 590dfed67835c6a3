"""`read_run`: a run's records, brought together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polytempo.core.system import files
from polytempo.replay.message_order import Life
from polytempo.report.runs import has_result, load_result
from polytempo.report.status.rows import read_metrics
from polytempo.runs.served.recording import FORMAT, VERSION, RunFacts
from polytempo.runs.served.run_snapshot import resumed
from polytempo.server.record import Asking, Entry, Lost, Record, RecordError, history, read_record
from polytempo.training.job.start import START

_MAX_FACTS_BYTES = 1 << 20
_MOST = 100_000


class Recorded(NamedTuple):
    """The records of one start of a run."""

    facts: RunFacts
    coordinator: list[Entry]
    shards: list[list[Entry]]
    begins: list[int]
    """The number of entries of each shard's log before this start."""
    whole: bool
    """True if every record is known to its end."""
    start: Path | None
    """The folder of this start's first snapshot, if it resumed."""
    finals: dict[str, str]
    """The hashes of the workers' final weights by worker and life; empty if the run did not come to its end."""
    rows: list[dict[str, Any]]
    """All rows of metrics of the run."""
    result: dict[str, Any] | None

    @property
    def lives(self) -> list[Life]:
        """The lives, in the order of their first calls for work."""
        return list(dict.fromkeys((e.worker, e.incarnation) for e in self.coordinator if isinstance(e, Asking)))


def read_facts(run: Path) -> tuple[Path, RunFacts]:
    """The folder of the newest record in `run`, and its facts. ValueError if there is no record."""
    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder; name the folder of a run")
    folders = sorted(path for path in (run / "record").glob("[0-9]*") if (path / "run.json").is_file())
    if not folders:
        raise ValueError(f"{run} has no record of messages; {_why_not(run)}")
    path = folders[-1] / "run.json"
    try:
        facts = msgspec.json.decode(files.read(path, _MAX_FACTS_BYTES), type=RunFacts)
    except (OSError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} is damaged ({error}); replay another run") from error
    if (facts.format, facts.version) != (FORMAT, VERSION):
        raise ValueError(f"{path} is {facts.format!r} version {facts.version}; this program reads version {VERSION}")
    if not (0 < facts.shards <= _MOST and 0 < facts.workers <= _MOST):
        raise ValueError(
            f"{path} speaks of {facts.shards} shards and {facts.workers} workers; a run has 1 to {_MOST:,} of each"
        )
    if "start_from" in facts.options:  # the run's own copy, wherever the folder is now
        facts = msgspec.structs.replace(facts, options=facts.options | {"start_from": str(run / START)})
    return folders[-1], facts


def _why_not(run: Path) -> str:
    if not has_result(run):
        return "name the folder of a run that polytempo train has made with a parameter server"
    try:
        result = load_result(run)
    except ValueError as error:
        return f"and {error}"
    world, strategy = result["world"], result["strategy"]
    if world == "virtual":
        return "it was simulated, so the same command gives the same bits"
    if str(strategy).startswith("flexrr"):
        return "flexrr's workers act on how far the others are at a moment, which is not recorded"
    if result.get("stages") and result.get("server"):
        return f"{strategy} cuts the model, and messages between its stages are not recorded"
    return f"{strategy} has no parameter server, so the same command and seed repeat it"


def read_run(run: Path) -> Recorded:
    """All records of the newest start of the run in `run`. Errors: ValueError, RecordError."""
    folder, facts = read_facts(run)
    coordinator = read_record(folder / "coordinator.jsonl")
    lost = {entry.node for entry in coordinator.entries if isinstance(entry, Lost)}
    records: dict[int, list[Record]] = {}
    for path in sorted(folder.glob("shard-*-node-*.jsonl")):
        record = read_record(path)
        shard = record.machine.removeprefix("shard ")
        if not shard.isdecimal() or int(shard) >= facts.shards:
            raise RecordError(f"{path} is the record of {record.machine!r}, and the run had {facts.shards} shards")
        records.setdefault(int(shard), []).append(record)
    start = folder / "start" if facts.snapshot is not None else None
    begins = [0] * facts.shards if start is None else list(resumed(start, facts.shards, {}).indices)
    logs = [history(records.get(shard, []), begins[shard], lost) for shard in range(facts.shards)]
    end = folder / "end.json"
    return Recorded(
        facts=facts,
        coordinator=coordinator.entries,
        shards=[log.entries for log in logs],
        begins=begins,
        whole=not coordinator.torn and all(log.whole for log in logs),
        start=start,
        finals=_finals(end) if end.is_file() else {},
        rows=read_metrics(run),
        result=load_result(run) if end.is_file() and has_result(run) else None,
    )


def _finals(end: Path) -> dict[str, str]:
    finals = files.parsed(end)
    if not isinstance(finals, dict) or not isinstance(finals.get("parameters_sha256"), dict):
        raise ValueError(f"{end} holds no hashes of final weights; no run has written it")
    return dict(finals["parameters_sha256"])
