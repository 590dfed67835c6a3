"""The table of `polytempo init`, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from polytempo.cli.options.shared_options import ARGUMENT, OPTIONS, Strategy, Workers
from polytempo.spec.table.option import Option


def _there(text: object) -> Path:
    path = Path(str(text))
    if not (path.exists() or any(Path(path.anchor).glob(str(path.relative_to(path.anchor))))):
        raise ValueError(
            "there is no such file or folder; name a CSV table with a header, files of Parquet or JSON lines, or a "
            "folder of pictures"
        )
    return path


def _toml(text: object) -> Path:
    path = Path(str(text))
    if path.suffix != ".toml":
        raise ValueError("must end with .toml")
    return path


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Options of `polytempo init`."""

    files: Annotated[Path, Option(ARGUMENT, "DATA", read=_there)]
    """A CSV table with a header, files of Parquet or JSON lines ('train/*.parquet'), or a folder with a folder of
    pictures for each class."""
    test: Annotated[Path | None, Option(OPTIONS, "DATA", read=_there)] = None
    """Files of Parquet or JSON lines to measure with. Default: no test set."""
    target: Annotated[str | None, Option(OPTIONS, "COLUMN")] = None
    """The column of a table that is predicted. Default: the last."""
    out: Annotated[Path, Option(OPTIONS, "FILE", read=_toml)] = Path("job.toml")
    """The job file. Default: job.toml."""
    epochs: Annotated[Annotated[int, Meta(ge=1, le=10_000)], Option(OPTIONS, "E")] = 10
    """Passes over the training data. Default: 10."""
    workers: Workers = 2
    strategy: Strategy = "sync_sgd"
    force: Annotated[bool, Option(OPTIONS)] = False
    """Overwrite the file."""
