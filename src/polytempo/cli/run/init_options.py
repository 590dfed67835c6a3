"""The table of `polytempo init`, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from polytempo.cli.options.command_options import table
from polytempo.cli.options.shared_options import ARGUMENT, OPTIONS, BatchSize, Strategy, Workers
from polytempo.jobs.job_text import PartCall, part_call
from polytempo.spec.rates.schedules import schedules_like
from polytempo.spec.table.option import Option, Positive

SHARDS = {
    ".parquet": "parquet",
    **dict.fromkeys(
        [f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in ("", ".gz", ".bz2", ".xz", ".zst")],
        "json_lines",
    ),
}
"""Endings of names of files in shards, and their readers in `polytempo.data`."""
_LIBRARIES = ("torchvision", "timm", "transformers")


def shards_reader(name: str) -> str | None:
    """The reader of files in shards with this name; None for a table or a folder."""
    return next((reader for ending, reader in SHARDS.items() if name.endswith(ending)), None)


def _there(text: object) -> str:
    found = str(text)
    if "://" in found:
        return found
    path = Path(found)
    if not (path.exists() or any(Path(path.anchor).glob(str(path.relative_to(path.anchor))))):
        raise ValueError(
            "there is no such file or folder; name a CSV table with a header, files of Parquet or JSON lines, or a "
            "folder of pictures"
        )
    return found


def _job_path(text: object) -> Path:
    path = Path(str(text))
    if path.suffix not in (".toml", ".py"):
        raise ValueError("must end with .toml or .py")
    return path


def _model(text: object) -> PartCall:
    """A call; a name behind a library is taken as it is, because names of models have dots and slashes."""
    library, colon, rest = str(text).partition(":")
    if colon and library in _LIBRARIES and "(" not in rest:
        return PartCall(f"{library}:{rest.strip()}")
    return part_call(str(text))


def _part(text: object) -> PartCall:
    return text if isinstance(text, PartCall) else part_call(str(text))


def _metrics(given: object) -> Mapping[str, PartCall]:
    found = {}
    for text in given if isinstance(given, list | tuple) else [given]:
        name, equals, call = str(text).partition("=")
        if not (equals and name.isidentifier()):
            raise ValueError("write NAME=module:object, such as f1=torchmetrics:F1Score(task='binary')")
        found[name] = part_call(call)
        if ":" not in call:
            raise ValueError(f"{call} is in no module; write {name}=module:{call}")
    return found


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Options of `polytempo init`."""

    files: Annotated[str | None, Option(ARGUMENT, "DATA", read=_there)] = None
    """A CSV table with a header, files of Parquet or JSON lines ('train/*.parquet'), or a folder with a folder of
    pictures for each class; each may be at a URL (s3://…). Without it, questions are asked."""
    test: Annotated[str | None, Option(OPTIONS, "DATA", read=_there)] = None
    """Files of Parquet or JSON lines to measure with. Default: no test set."""
    target: Annotated[str | None, Option(OPTIONS, "COLUMN")] = None
    """The column of a table that is predicted. Default: the last."""
    kind: Annotated[Literal["classes", "number"] | None, Option(OPTIONS, "KIND")] = None
    """The target has classes, or a number. Default: classes for text, and for up to 20 different numbers."""
    size: Annotated[Annotated[int, Meta(ge=1, le=4096)], Option(OPTIONS, "PIXELS")] = 64
    """Width and height that pictures are scaled to. Default: 64."""
    model: Annotated[PartCall | None, Option(OPTIONS, "CALL", read=_model)] = None
    """torchvision:resnet18, timm:vit_tiny_patch16_224, transformers:NAME or a folder, or your module:Net(width=3).
    Default: a small network for the data."""
    loss: Annotated[PartCall | None, Option(OPTIONS, "CALL", read=_part)] = None
    """A function of torch.nn.functional, or module:loss. Default: cross_entropy for classes, mse_loss for numbers."""
    optimizer: Annotated[PartCall | None, Option(OPTIONS, "CALL", read=_part)] = None
    """SGD(momentum=0.9), …, or module:optimizer. Default: AdamW(weight_decay=0.01)."""
    lr: Annotated[Positive, Option(OPTIONS, "R")] = 0.003
    """Learning rate. Default: 0.003."""
    schedule: Annotated[PartCall | None, Option(OPTIONS, "CALL", read=_part, complete=schedules_like)] = None
    """plateau(patience=3), StepLR(step_size='5 epochs'), …. Default: a cosine to the last epoch."""
    metric: Annotated[Sequence[str], Option(OPTIONS, "NAME=CALL", read=_metrics)] = ()
    """Another score: f1=torchmetrics:F1Score(task='binary'); again for another."""
    out: Annotated[Path, Option(OPTIONS, "FILE", read=_job_path)] = Path("job.toml")
    """The job file, or a Python file: job.py. Default: job.toml."""
    batch_size: BatchSize = None
    epochs: Annotated[Annotated[int, Meta(ge=1, le=10_000)], Option(OPTIONS, "E")] = 10
    """Passes over the training data. Default: 10."""
    workers: Workers = 2
    strategy: Strategy = "sync_sgd"
    trackers: Annotated[Sequence[Any], table()["trackers"]] = ()
    force: Annotated[bool, Option(OPTIONS)] = False
    """Overwrite the file."""
