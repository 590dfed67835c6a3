"""TensorBoard: event files and profiles in the run's folder, written without torch and without TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import (
    DATA_TYPE_BOOL,
    DATA_TYPE_FLOAT64,
    DATA_TYPE_STRING,
    STATUS_FAILURE,
    STATUS_SUCCESS,
    STATUS_UNKNOWN,
    Experiment,
    HParamInfo,
    MetricInfo,
    MetricName,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from polytempo.report.status.records import LoggedImage, LoggedText, RunFinished, StreamRecord
from polytempo.trackers.adapters.tensorboard_profile import ProfileFiles
from polytempo.trackers.tracker import AXES, TrackedRun
from polytempo.trackers.words import sentence

_SCORES = ("test/accuracy", "test/loss", "train/loss")
"""Columns beside the hyper-parameters."""
_TYPES = {bool: DATA_TYPE_BOOL, str: DATA_TYPE_STRING}
_STATES = {"finished": STATUS_SUCCESS, "failed": STATUS_FAILURE}


class TensorBoardFiles:
    """Scalars (float32, as TensorBoard's own writers), hyper-parameters, pictures, texts, events as texts, profiles."""

    def __init__(self, logdir: str | None) -> None:
        self._logdir, self._step = logdir, 0

    def start(self, facts: TrackedRun) -> None:
        """Begin an event file, behind the files of earlier parts of the run."""
        self._folder, own = Path(facts.folder), self._logdir is None
        if own and "://" in facts.folder:
            raise ValueError(f"tensorboard writes no event files to {facts.folder}; give a folder, as tensorboard:runs")
        logdir = self._folder / "tensorboard" if own else Path(self._logdir or "") / f"{facts.name}-{facts.identity}"
        for old in [] if facts.resumed or not own else logdir.glob("events.out.tfevents.*"):
            old.unlink()  # of another run that was in this folder
        self._writer = EventFileWriter(str(logdir))
        self._profiles = ProfileFiles(self._folder, logdir, facts.name, 0.0 if facts.resumed else facts.began_s)
        if not facts.resumed and own:
            self._profiles.clear()
        if facts.resumed:
            return
        self._write(_hparams(metadata.EXPERIMENT_TAG, experiment=_columns(facts.settings)))
        begun = SessionStartInfo(start_time_secs=facts.began_s)
        for name, value in facts.settings.items():
            field = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
            setattr(begun.hparams[name], field, value)
        self._write(_hparams(metadata.SESSION_START_INFO_TAG, session_start_info=begun))

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Scalars of a step."""
        self._step = step
        tags = {name: f"x-axes/{name}" if name.partition("/")[0] in AXES else name for name in row}  # after the losses
        values = [Summary.Value(tag=tags[name], simple_value=value) for name, value in row.items()]
        self._write(Summary(value=values), step)
        self._profiles.look()

    def event(self, event: StreamRecord) -> None:
        """A picture, a text, or an event of the run as a text."""
        if isinstance(event, LoggedImage):
            png = (self._folder / event.path).read_bytes()
            width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
            image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
            data = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="images"))
            self._write(Summary(value=[Summary.Value(tag=event.name, image=image, metadata=data)]), event.step)
        elif isinstance(event, LoggedText):
            self._text(event.name, event.text, event.step)
        else:
            self._text("events", sentence(event), self._step)

    def finish(self, status: RunFinished) -> None:
        """End the session of hyper-parameters, and the file."""
        ended = SessionEndInfo(status=_STATES.get(status.state, STATUS_UNKNOWN), end_time_secs=time.time())
        self._write(_hparams(metadata.SESSION_END_INFO_TAG, session_end_info=ended))
        if status.why:
            self._text("events", f"{status.state}: {status.why}", self._step)
        self._writer.close()
        self._profiles.look()

    def _text(self, name: str, text: str, step: int) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        data = create_summary_metadata(display_name=name, description="")
        self._write(Summary(value=[Summary.Value(tag=name, tensor=tensor, metadata=data)]), step)

    def _write(self, written: Summary, step: int = 0) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=written))
        self._writer.flush()  # a killed run is readable to its last row


def _columns(settings: Mapping[str, object]) -> Experiment:
    """The columns of the table of hyper-parameters."""
    infos = [HParamInfo(name=n, type=_TYPES.get(type(v), DATA_TYPE_FLOAT64)) for n, v in sorted(settings.items())]
    scores = [MetricInfo(name=MetricName(tag=score)) for score in _SCORES]
    return Experiment(hparam_infos=infos, metric_infos=scores)


def _hparams(tag: str, **part: Any) -> Summary:
    """A message of the plugin for hyper-parameters; its own functions that make these need TensorFlow."""
    data = metadata.create_summary_metadata(HParamsPluginData(**part))
    return Summary(value=[Summary.Value(tag=tag, metadata=data, tensor=metadata.NULL_TENSOR)])
