"""TensorBoard: event files in the run's folder, written without torch and without TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import plugin_data_pb2, summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from polytempo.report.status.records import LoggedImage, LoggedText, RunFinished, StreamRecord
from polytempo.trackers.tracker import TrackedRun
from polytempo.trackers.words import sentence

_SCORES = ("test/accuracy", "test/loss", "train/loss")
"""Columns beside the hyper-parameters."""


class TensorBoardFiles:
    """Scalars (float32, as TensorBoard's own writers), hyper-parameters, pictures, texts, and events as texts."""

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
        if facts.resumed:
            return
        domains = {bool: plugin_data_pb2.DATA_TYPE_BOOL, str: plugin_data_pb2.DATA_TYPE_STRING}
        infos = [
            plugin_data_pb2.HParamInfo(name=n, type=domains.get(type(value), plugin_data_pb2.DATA_TYPE_FLOAT64))
            for n, value in sorted(facts.settings.items())
        ]
        names = [plugin_data_pb2.MetricName(tag=score) for score in _SCORES]
        columns = [plugin_data_pb2.MetricInfo(name=name) for name in names]
        self._write(summary.experiment_pb(infos, columns))
        self._write(summary.session_start_pb(facts.settings))

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Scalars of a step."""
        self._step = step
        self._write(Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in row.items()]), step)

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
        from_state = {"finished": summary.api_pb2.STATUS_SUCCESS, "failed": summary.api_pb2.STATUS_FAILURE}
        self._write(summary.session_end_pb(from_state.get(status.state, summary.api_pb2.STATUS_UNKNOWN)))
        if status.why:
            self._text("events", f"{status.state}: {status.why}", self._step)
        self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        data = create_summary_metadata(display_name=name, description="")
        self._write(Summary(value=[Summary.Value(tag=name, tensor=tensor, metadata=data)]), step)

    def _write(self, written: Summary, step: int = 0) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=written))
        self._writer.flush()  # what a killed run leaves is readable to the last row
