"""`polytempo bench`: measure, print the table, and leave JSON, Markdown and a picture."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
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
from polytempo.cli.show import notes_on_stderr, show_json, show_table

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZES = "4KiB,64KiB,1MiB,16MiB,256MiB"
_RESULT, _TABLE, _PICTURE = "result.json", "table.md", "picture.png"
_MAX_FOLDERS = 10_000


def collectives(given: Mapping[str, Any]) -> None:
    """`polytempo bench collectives`."""
    quick = bool(given["quick"])
    plan = CollectivesPlan(
        ranks=_numbers("--ranks", _or(given["ranks"], "2" if quick else "2,4")),
        sizes=[parse_size(part) for part in _parts("--sizes", _or(given["sizes"], "4KiB,1MiB" if quick else _SIZES))],
        operations=_parts("--operations", _or(given["operations"], ",".join(OPERATIONS))),
        rounds=_at_least_one("--rounds", _or(given["rounds"], 2 if quick else 7)),
        turn_s=_positive("--turn-s", _or(given["turn_s"], 0.01 if quick else 0.1)),
    )
    perform("collectives", lambda: measure_collectives(plan), given)


def training(given: Mapping[str, Any]) -> None:
    """`polytempo bench training`."""
    quick = bool(given["quick"])
    plan = TrainingPlan(
        models=_parts("--models", _or(given["models"], "mlp" if quick else ",".join(MODELS))),
        workers=_or(given["workers"], 2),
        rounds=_at_least_one("--rounds", _or(given["rounds"], 2 if quick else 9)),
        turn_s=_positive("--turn-s", _or(given["turn_s"], 0.1 if quick else 1.0)),
    )
    perform("training", lambda: measure_training(plan), given)


def memory(given: Mapping[str, Any]) -> None:
    """`polytempo bench memory`."""
    quick = bool(given["quick"])
    plan = MemoryPlan(
        workers=_or(given["workers"], 2 if quick else 4),
        parameters=_count("--parameters", _or(given["parameters"], "1M" if quick else "100M")),
        steps=_at_least_one("--steps", _or(given["steps"], 2 if quick else 3)),
    )
    perform("memory", lambda: measure_memory(plan), given)


def parse_size(text: str) -> int:
    """`"4KiB"`, `"1.5 MiB"` or `"4096"` as bytes. ValueError names what was written and what could be."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if not found or unit is None:
        raise ValueError(f"--sizes {text}: must be sizes separated by commas, such as 4096, 4KiB or 16MB")
    return int(float(found[1]) * unit)


def perform(name: str, measure: Callable[[], dict[str, Any]], given: Mapping[str, Any]) -> None:
    """Measure, show, and write three files into the run's folder."""
    folder = _folder(name, given["out"])
    with notes_on_stderr():
        result = measure()
    found = table(result)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (folder / _TABLE).write_text(markdown(found), encoding="utf-8")
    write_picture(folder / _PICTURE, result)
    if given["json"]:
        show_json(result)
    else:
        show_table(*found)
    for line in (*missing(result), f"written to {folder}: {_RESULT}, {_TABLE}, {_PICTURE}"):
        print(line, file=sys.stderr if given["json"] else sys.stdout)


def _folder(name: str, out: Path | None) -> Path:
    """A folder without a result: the one that was asked for, or a new one under `runs/`."""
    if out is not None:
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out}: this is a file; name a folder")
        if (out / _RESULT).exists():
            raise ValueError(f"--out {out}: a result is in it; name another folder")
        return out
    for number in range(1, _MAX_FOLDERS + 1):
        folder = Path("runs") / (f"bench-{name}" if number == 1 else f"bench-{name}-{number}")
        if not folder.exists():
            return folder
    raise ValueError(f"runs holds {_MAX_FOLDERS:,} folders named bench-{name}; name another one with --out")


def _or(given: Any, default: Any) -> Any:
    """What was given, zero and nothing too: they are refused, not replaced."""
    return default if given is None else given


def _parts(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"{option} {text}: must be names separated by commas, and one of them is empty")
    return parts


def _numbers(option: str, text: str) -> list[int]:
    parts = _parts(option, text)
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text}: must be whole numbers separated by commas, such as 2,4")
    return [int(part) for part in parts]


def _count(option: str, text: str) -> int:
    """`"100M"`, `"1_000_000"` or `"250k"` as a number."""
    scale = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.replace("_", "").isdecimal():
        raise ValueError(f"{option} {text}: must be a whole number such as 1000000, 250k or 100M")
    return int(digits) * scale


def _at_least_one(option: str, number: int) -> int:
    if number < 1:
        raise ValueError(f"{option} {number}: must be at least 1")
    return number


def _positive(option: str, number: float) -> float:
    if not 0 < number < float("inf"):
        raise ValueError(f"{option} {number:g}: must be a number of seconds above 0")
    return number
