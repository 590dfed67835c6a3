"""`polytempo bench`: measure, print the table, and leave JSON, Markdown and a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polytempo.bench.collectives import CollectivesPlan
from polytempo.bench.collectives import collectives as measure_collectives
from polytempo.bench.compression import Candidate, CompressionPlan
from polytempo.bench.compression import compression as measure_compression
from polytempo.bench.memory import MemoryPlan
from polytempo.bench.memory import memory as measure_memory
from polytempo.bench.models import MODELS
from polytempo.bench.operations import OPERATIONS
from polytempo.bench.pictures import write_picture
from polytempo.bench.tables import markdown, missing, table
from polytempo.bench.training import TrainingPlan
from polytempo.bench.training import training as measure_training
from polytempo.cli.bench.bench_options import (
    MEASURED,
    RESULT,
    CollectivesOptions,
    CompressionOptions,
    MemoryOptions,
    TrainingOptions,
    bench_folder,
)
from polytempo.cli.options.network_options import network_of
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.cli.options.values import sizes
from polytempo.cluster.cluster_file import read_cluster
from polytempo.compression import through
from polytempo.core import Transform
from polytempo.spec.text.call import split_calls
from polytempo.spec.text.catalogue import NAMES

_TABLE, _PICTURE = "table.md", "picture.png"


def collectives(asked: CollectivesOptions) -> None:
    """`polytempo bench collectives`."""
    quick = asked.quick
    plan = CollectivesPlan(
        ranks=asked.ranks or ((2,) if quick else (2, 4)),
        sizes=asked.sizes or sizes("4KiB,1MiB" if quick else "4KiB,64KiB,1MiB,16MiB,256MiB"),
        operations=asked.operations or list(OPERATIONS),
        rounds=asked.rounds or (2 if quick else 7),
        turn_s=asked.turn_s or (0.01 if quick else 0.1),
    )
    perform("collectives", lambda: measure_collectives(plan), asked.out, as_json=asked.json)


def training(asked: TrainingOptions) -> None:
    """`polytempo bench training`."""
    plan = TrainingPlan(
        models=asked.models or (["mlp"] if asked.quick else list(MODELS)),
        workers=asked.workers,
        rounds=asked.rounds or (2 if asked.quick else 9),
        turn_s=asked.turn_s or (0.1 if asked.quick else 1.0),
    )
    perform("training", lambda: measure_training(plan), asked.out, as_json=asked.json)


def memory(asked: MemoryOptions) -> None:
    """`polytempo bench memory`."""
    usual = MemoryPlan(2, 1_000_000, 2) if asked.quick else MemoryPlan(4, 100_000_000, 3)
    given = {"workers": asked.workers, "parameters": asked.parameters, "steps": asked.steps}
    plan = usual._replace(**{name: value for name, value in given.items() if value is not None})
    perform("memory", lambda: measure_memory(plan), asked.out, as_json=asked.json)


def perform(name: str, measure: Callable[[], dict[str, Any]], out: Path | None, *, as_json: bool) -> None:
    """Measure, show, and write three files into the run's folder."""
    folder = bench_folder(name, out)
    with notes_on_stderr():
        result = measure()
    found = table(result)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (folder / _TABLE).write_text(markdown(found), encoding="utf-8")
    write_picture(folder / _PICTURE, result)
    if as_json:
        show_json(result)
    else:
        show_table(*found)
    for line in (*missing(result), f"written to {folder}: {RESULT}, {_TABLE}, {_PICTURE}"):
        print(line, file=sys.stderr if as_json else sys.stdout)


def compression(asked: CompressionOptions) -> None:
    """`polytempo bench compression`."""
    plan = plan_of(asked)
    perform("compression", lambda: measure_compression(plan), asked.out, as_json=asked.json)


def plan_of(asked: CompressionOptions) -> CompressionPlan:
    """The plan with these options."""
    return CompressionPlan(
        sizes=asked.model,
        link=network_of(asked.link, asked.latency_us, asked.cluster, "1gbit"),
        workers=asked.workers,
        candidates=[candidate(call) for call in asked.codecs or split_calls(MEASURED)],
        steps=asked.rounds or (3 if asked.quick else 9),
        cluster=None if asked.cluster is None else read_cluster(asked.cluster),
    )


def candidate(text: str) -> Candidate:
    """The codec, or `low_rank`, that `text` spells."""
    found: Any = NAMES.codec(text)
    if isinstance(found, Transform):
        return Candidate(text, found)
    return Candidate(found.facts.name, through(found), found)
