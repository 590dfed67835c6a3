"""The table of `polytempo compress`, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from polytempo.cli.options import values
from polytempo.cli.options.shared_options import ARGUMENT, OPTIONS, Data, Json, Threads
from polytempo.spec.table.option import Option, Positive, converted

_Share = Annotated[float, Meta(gt=0, le=1)]
_Bits = Annotated[int, Meta(ge=1, le=12)]
_Epochs = Annotated[float, Meta(ge=0, le=1e6)]


def _by_layer(text: Any, kind: Any) -> Any:
    """A number for all layers, or one for each named layer: `1=0.08,3=0.09`."""
    if not isinstance(text, str):
        return converted(text, kind)
    if "=" not in text:
        return _number(text, kind)
    pairs = [pair.partition("=") for pair in text.split(",")]
    return {name.strip(): _number(value, kind) for name, _, value in pairs}


def _number(text: str, kind: Any) -> Any:
    try:
        return converted(float(text) if kind is _Share else int(text), kind)
    except ValueError as error:
        said = str(error) if "must be" in str(error) else f"{text!r} is not a number"
        raise ValueError(f"{said}; write one for all layers, such as 0.1, or LAYER=NUMBER,LAYER=NUMBER") from None


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """Options of `polytempo compress`."""

    run: Annotated[str, Option(ARGUMENT, "RUN", read=values.run_folder)]
    """The folder of a run, as --out names it, or of one of its checkpoints."""
    keep: Annotated[float | Mapping[str, float], Option(OPTIONS, "SHARE", read=partial(_by_layer, kind=_Share))] = 0.1
    """Share of the weights that stay: of all, or of each layer, as in 1=0.08,3=0.09. Default: 0.1."""
    bits: Annotated[int | Mapping[str, int], Option(OPTIONS, "B", read=partial(_by_layer, kind=_Bits))] = 5
    """Let the weights of a layer share 2^B values at most: for all layers, or for each. Default: 5."""
    rounds: Annotated[Annotated[int, Meta(ge=1, le=1000)], Option(OPTIONS, "R")] = 2
    """Prune in so many rounds. Default: 2."""
    epochs: Annotated[_Epochs, Option(OPTIONS, "E")] = 1.0
    """Train for so long after each pruning. Default: 1."""
    share_epochs: Annotated[_Epochs, Option(OPTIONS, "E")] = 1.0
    """Train for so long with shared values. Default: 1."""
    lr: Annotated[Positive | None, Option(OPTIONS, "RATE")] = None
    """Learning rate of both. Default: the job's."""
    seed: Annotated[int, Meta(ge=0, le=2**62 - 1), Option(OPTIONS, "S")] = 0
    """Seed of the order of samples. Default: 0."""
    job: Annotated[str | None, Option(OPTIONS, "JOB", read=values.job)] = None
    """The run's job, if it does not ship."""
    data: Data = None
    threads: Threads = None
    out: Annotated[Path | None, Option(OPTIONS, "FILE")] = None
    """The file. Default: network.ptnet in RUN."""
    json: Json = False
