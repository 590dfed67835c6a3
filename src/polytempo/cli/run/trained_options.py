"""The tables of commands that use the model of a run that is over, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from polytempo.cli.options import values
from polytempo.cli.options.shared_options import ARGUMENT, OPTIONS, Data, Device, Json, Threads
from polytempo.spec.table.option import Option

_Run = Annotated[str, Option(ARGUMENT, "RUN", read=values.run_folder)]
_Job = Annotated[str | None, Option(OPTIONS, "JOB", read=values.job)]


def _table_file(text: str) -> str:
    if not text.endswith((".csv", ".npy")):
        raise ValueError("must end with .csv or .npy")
    return text


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `polytempo evaluate`."""

    run: _Run
    """The folder of a run, as --out names it, or of one of its checkpoints."""
    average: Annotated[bool, Option(OPTIONS)] = False
    """Take the moving average of the weights (--ema of the run)."""
    job: _Job = None
    """The run's job, if it does not ship."""
    data: Data = None
    device: Device = "auto"
    threads: Threads = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of `polytempo predict`."""

    run: _Run
    """The folder of a run, as --out names it, or of one of its checkpoints."""
    out: Annotated[str, Option(OPTIONS, "FILE", read=_table_file)]
    """The file: *.csv has a row for each sample, *.npy an array (samples, …)."""
    average: Annotated[bool, Option(OPTIONS)] = False
    """Take the moving average of the weights (--ema of the run)."""
    job: _Job = None
    """The run's job, if it does not ship."""
    data: Data = None
    device: Device = "auto"
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `polytempo export`."""

    run: _Run
    """The folder of a run, as --out names it, or of one of its checkpoints."""
    to: Annotated[Literal["safetensors", "torch", "onnx", "hf"], Option(OPTIONS, "FORM")] = "safetensors"
    """safetensors or torch: tensors by name; onnx: the graph, too; hf: the folder that from_pretrained reads. Default:
    safetensors."""
    out: Annotated[str | None, Option(OPTIONS, "FILE")] = None
    """The file; with hf the folder. Default: model.safetensors, model.pt, model.onnx or hf in RUN."""
    average: Annotated[bool, Option(OPTIONS)] = False
    """Take the moving average of the weights (--ema of the run)."""
    job: _Job = None
    """The run's job, if it does not ship."""
    data: Data = None
