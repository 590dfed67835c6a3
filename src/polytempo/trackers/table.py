"""Adapters: from a `TrackerCall` to the `Tracker` that performs it. Its library is loaded then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import NamedTuple, cast

from polytempo.core.calls.refusals import refuse
from polytempo.spec.tracker_call import TRACKERS, TrackerCall
from polytempo.trackers.tracker import Tracker


class Adapter(NamedTuple):
    """The class of an adapter, and the library that it needs."""

    module: str
    kind: str
    library: str | None
    """The module to look for; None: no library is needed. The extra that brings it has the tracker's name."""


ADAPTERS = {
    "tensorboard": Adapter("tensorboard_files", "TensorBoardFiles", "tensorboard"),
    "wandb": Adapter("wandb_run", "WandbRun", "wandb"),
    "mlflow": Adapter("mlflow_run", "MlflowRun", "mlflow"),
    "trackio": Adapter("trackio_run", "TrackioRun", "trackio"),
    "comet": Adapter("comet_run", "CometRun", "comet_ml"),
    "prometheus": Adapter("prometheus_page", "PrometheusPage", "prometheus_client"),
    "opentelemetry": Adapter("otlp_spans", "OtlpSpans", "opentelemetry.exporter.otlp.proto.http"),
    "kubeflow": Adapter("train_job_status", "TrainJobStatus", None),
}


def made(call: TrackerCall) -> Tracker:
    """The tracker of the call: its class with the call's arguments. ImportError for a library that cannot be loaded."""
    adapter = ADAPTERS[call.name]
    kind = getattr(import_module(f"polytempo.trackers.adapters.{adapter.module}"), adapter.kind)
    return cast("Tracker", kind(**{name: call.arguments.get(name, p.default) for name, p in _parameters(call).items()}))


def check_libraries(trackers: Iterable[object]) -> None:
    """`Incompatible` for a tracker without its library. Nothing is loaded."""
    for call in trackers:
        if not isinstance(call, TrackerCall):
            continue
        library = ADAPTERS[call.name].library
        if library is not None and not _is_here(library):
            refuse({"tracker", "no library"}, tracker=call.name, library=library.partition(".")[0])


def _parameters(call: TrackerCall) -> Mapping[str, Parameter]:
    return signature(TRACKERS[call.name]).parameters


def _is_here(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # a parent of it
        return False
