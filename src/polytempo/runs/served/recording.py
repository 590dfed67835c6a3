"""The record of a run with a parameter server, for `polytempo replay`.

out/record/0000/                    one folder for each time that the run was started or resumed
  run.json                          job, strategy, options, versions: all that a repetition must have in common
  coordinator.jsonl                 the coordinator's entries, in their order
  shard-0-node-2.jsonl, …           the entries of each copy of each shard (see `server.record`)
  start/                            of a resumed run: the snapshot that it went on from
  end.json                          the hash of each worker's final weights, if the run came to its end
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from polytempo.core.system import files
from polytempo.core.system.url_path import Place, local_path, place, without_secrets
from polytempo.native.library import instruction_set
from polytempo.runs.served.run_snapshot import RunSnapshot, run_snapshot_path
from polytempo.server.message import Entry as ShardEntry
from polytempo.server.record import Asking, Entry, Recorder, entry_of
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.snapshot import files_of
from polytempo.spec.run_spec import RunSpec

FORMAT = "polytempo-run"
VERSION = 1


class RunFacts(msgspec.Struct, frozen=True):
    """The facts that a repetition must, or should, have in common with the run."""

    format: str
    version: int
    job: str
    origin: str | None
    """The text that named the job; None if a program gave the job."""
    origin_sha256: str | None
    """The hash of the job's file."""
    strategy: str
    workers: int
    shards: int
    options: dict[str, Any]
    native: bool
    """True if the shards' optimizer was the native kernel."""
    threads: int
    bits: dict[str, str]
    """Versions and instruction sets: rounding may depend on them."""
    generation: int = 0
    snapshot: int | None = None
    """The snapshot that it went on from."""


def facts_now(spec: RunSpec, *, native: bool, threads: int) -> RunFacts:
    """The facts of a run that is about to begin on this machine."""
    job, strategy, options = spec.job, spec.strategy, spec.options
    kept = ("epochs", "steps", "batch_size", "lr", "seed", "allow_nan", "ema")
    taken = {name: getattr(options, name) for name in kept}
    data = None if options.data is None else without_secrets(str(place(options.data).absolute()))
    taken |= {"until": dict(options.until), "data": data}
    taken |= {} if options.clip_norm is None else {"clip_norm": options.clip_norm}
    taken |= {} if options.eval_every is None else {"eval_every": str(options.eval_every)}
    taken |= {} if options.accumulate == 1 else {"accumulate": options.accumulate}
    taken |= {} if options.start_from is None else {"start_from": options.start_from}
    taken |= {} if options.precision is None else {"precision": str(options.precision)}
    return RunFacts(
        format=FORMAT,
        version=VERSION,
        job=job.name,
        origin=job.origin,
        origin_sha256=sha256_of(job.origin),
        strategy=str(strategy),
        workers=spec.workers,
        shards=0 if strategy.server is None else strategy.server.shards,
        options=taken,
        native=native,
        threads=threads,
        bits=bits_now(),
    )


def bits_now() -> dict[str, str]:
    """Versions and instruction sets of this machine: rounding may depend on them."""
    return {
        "polytempo": version("polytempo"),
        "torch": str(torch.__version__),
        "processor": platform.machine(),
        "torch's instruction set": torch.backends.cpu.get_cpu_capability(),
        "the native core's instruction set": instruction_set() or "none",
    }


def sha256_of(origin: str | None) -> str | None:
    """The hash of the job's file; None for a job without a file."""
    path = Path((origin or "").rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" and path.is_file() else None


class Recording:
    """The record of one start of a run. Made in the launcher; each copy of a shard opens a file of its own."""

    def __init__(self, out: Path, facts: RunFacts, last: RunSnapshot | None) -> None:
        records = out / "record"
        if last is None:
            files.remove(records)
        generation = 0 if last is None else last.generation + 1
        self.folder = records / f"{generation:04d}"
        files.made(records)
        files.remove(self.folder)  # a resume that went no further than its first snapshot
        files.made(self.folder)
        self._heard: dict[int, tuple[int, int]] = {}
        if last is not None:
            _keep(out / "checkpoint", last, self.folder / "start")
        taken = msgspec.structs.replace(facts, generation=generation, snapshot=None if last is None else last.number)
        files.replace(self.folder / "run.json", msgspec.json.format(msgspec.json.encode(taken)) + b"\n")
        self._coordinator = Recorder(self.folder / "coordinator.jsonl", "coordinator")

    def on_entry(self, entry: Entry) -> None:
        """Record an entry of the coordinator; a repeated call is recorded once."""
        if isinstance(entry, Asking):
            number = entry.incarnation, entry.sequence
            if number <= self._heard.get(entry.worker, (-1, -1)):
                return
            self._heard[entry.worker] = number
        self._coordinator.append(entry, time.monotonic())

    def flush(self) -> None:
        """Hand the coordinator's entries to the operating system, before a snapshot that depends on them."""
        self._coordinator.flush()

    def close(self) -> None:
        """Close the coordinator's file."""
        self._coordinator.close()


def leave_end(out: Place, generation: int, finals: Mapping[str, str]) -> None:
    """Note the end of a run, also without a record; `finals`: hashes of final weights by worker and life ("0.1")."""
    path = files.made(out / "record" / f"{generation:04d}") / "end.json"
    files.replace(path, json.dumps({"parameters_sha256": dict(finals)}) + "\n")


def has_ended(out: Place, generation: int) -> bool:
    """True if start number `generation` of the run in `out` came to its end, with its last score."""
    return (out / "record" / f"{generation:04d}" / "end.json").is_file()


def _keep(checkpoint: Path, last: RunSnapshot, start: Path) -> None:
    """Keep the first snapshot of a resumed run, by links if possible, because it will not change."""
    start.mkdir()
    of_shards = files_of(checkpoint, last.number, last.facts["shards"])
    for path in map(local_path, [*of_shards, run_snapshot_path(checkpoint, last.number)]):
        try:
            os.link(path, start / path.name)
        except OSError:
            shutil.copy2(path, start / path.name)


class CopyRecorder:
    """The record of one copy of a shard, from its first entry on."""

    def __init__(self, folder: Path | None, shard: Shard, node: int) -> None:
        self._folder, self._shard, self._node = folder, shard, node
        self._recorder: Recorder | None = None

    def on_entry(self, index: int, entry: ShardEntry) -> None:
        """Record entry number `index` of the copy."""
        if self._folder is None:
            return
        if self._recorder is None:
            number = self._shard.number
            path = self._folder / f"shard-{number}-node-{self._node}.jsonl"
            self._recorder = Recorder(path, f"shard {number}", node=self._node, first=index)
        self._recorder.append(entry_of(entry, self._shard.version), time.monotonic())

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._recorder is not None:
            self._recorder.close()
