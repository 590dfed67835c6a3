"""`polytempo bench`: measure, print the table, and leave JSON, Markdown and a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polytempo.bench.collectives import CollectivesPlan
from polytempo.bench.collectives import collectives as measure_collectives
from polytempo.bench.memory import MemoryPlan
from polytempo.bench.memory import memory as measure_memory
from polytempo.bench.models import MODELS
from polytempo.bench.operations import OPERATIONS
from polytempo.bench.pictures import write_picture
from polytempo.bench.tables import markdown, missing, table
from polytempo.bench.training import TrainingPlan
from polytempo.bench.training import training as measure_training
from polytempo.cli.bench.bench_values import RESULT, bench_folder
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table

_TABLE, _PICTURE = "table.md", "picture.png"


def collectives(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """`polytempo bench collectives`."""
    plan = CollectivesPlan(**{**values, "operations": values["operations"] or list(OPERATIONS)})
    perform("collectives", lambda: measure_collectives(plan), given)


def training(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """`polytempo bench training`."""
    plan = TrainingPlan(**{**values, "models": values["models"] or list(MODELS)})
    perform("training", lambda: measure_training(plan), given)


def memory(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """`polytempo bench memory`."""
    plan = MemoryPlan(**values)
    perform("memory", lambda: measure_memory(plan), given)


def perform(name: str, measure: Callable[[], dict[str, Any]], given: Mapping[str, Any]) -> None:
    """Measure, show, and write three files into the run's folder."""
    folder = bench_folder(name, given["out"])
    with notes_on_stderr():
        result = measure()
    found = table(result)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (folder / _TABLE).write_text(markdown(found), encoding="utf-8")
    write_picture(folder / _PICTURE, result)
    if given["json"]:
        show_json(result)
    else:
        show_table(*found)
    for line in (*missing(result), f"written to {folder}: {RESULT}, {_TABLE}, {_PICTURE}"):
        print(line, file=sys.stderr if given["json"] else sys.stdout)
