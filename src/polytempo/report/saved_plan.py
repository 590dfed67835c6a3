"""`SavedPlan`: the file beside the page of `polytempo plan`, which the live page lists and other programs can read.

plan.html ── `polytempo plan … --page plan.html` ── plan.plan.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from polytempo.core.system import files

SUFFIX = ".plan.json"
MOST_RUNS, _MOST_BYTES = 1_000, 8 << 20
_Number = Annotated[float, Meta(ge=0, le=1e300)]
_Text = Annotated[str, Meta(max_length=2_000)]


class SavedForecast(msgspec.Struct, frozen=True):
    """A run that was compared."""

    strategy: _Text
    workers: int
    batch_size: int
    seconds: _Number
    """Time to the target; nine of ten runs end between `low_s` and `high_s`."""
    low_s: _Number
    high_s: _Number
    money: _Number


class SavedPlan(msgspec.Struct, frozen=True):
    """A plan: the target, the runs that were compared, the front, and the choice."""

    format: Literal["polytempo-plan"]
    version: Literal[1]
    job: _Text
    cluster: _Text
    until: dict[str, _Number]
    unit: _Text
    """The unit of money."""
    sentences: list[_Text]
    commands: list[_Text]
    winner: SavedForecast | None
    front: Annotated[list[SavedForecast], Meta(max_length=MOST_RUNS)]
    forecasts: Annotated[list[SavedForecast], Meta(max_length=MOST_RUNS)]


def write_plan(
    page: Path, plan: Mapping[str, Any], unit: str, sentences: Sequence[str], commands: Sequence[str]
) -> Path:
    """Write the plan of `RunPlan.as_json` beside its page. The first 1,000 runs are kept. Errors: OSError."""
    kept = {name: plan[name] for name in ("job", "cluster", "until", "winner")}
    kept |= {name: list(plan[name])[:MOST_RUNS] for name in ("front", "forecasts")}
    kept |= {"unit": unit, "sentences": list(sentences), "commands": list(commands)}
    found = msgspec.convert({"format": "polytempo-plan", "version": 1, **kept}, SavedPlan)
    path = page.with_suffix(SUFFIX)
    files.replace(path, msgspec.json.encode(found))
    return path


def read_plan(path: Path) -> SavedPlan:
    """The plan in a file of `write_plan`. Errors: OSError; ValueError for another file."""
    try:
        return msgspec.json.decode(files.read(path, _MOST_BYTES), type=SavedPlan)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a plan of `polytempo plan --page`: {error}") from error
