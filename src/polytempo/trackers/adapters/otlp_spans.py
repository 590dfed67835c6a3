"""OpenTelemetry: a span for the run and one for the time between two of its rows, sent by OTLP over HTTP."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, cast

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from polytempo.report.status.records import RunFinished, StreamRecord
from polytempo.trackers.tracker import TrackedRun
from polytempo.trackers.words import sentence

_NS = 1_000_000_000


class OtlpSpans:
    """Spans `run` and, inside it, `steps`, with a row's numbers as attributes; events of the run are events of `run`.

    All parts of a resumed run have one trace id. Times are rows' `seconds`: virtual in a simulation.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint

    def start(self, facts: TrackedRun) -> None:
        """Begin the span of the run."""
        resource = Resource.create({"service.name": "polytempo", "service.instance.id": facts.identity})
        self._provider = TracerProvider(resource=resource, id_generator=cast("Any", _OneTrace(facts.identity)))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=self._endpoint)))
        self._tracer = self._provider.get_tracer("polytempo")
        self._began_ns = int(facts.began_s * _NS)
        self._seconds: dict[str, float] = {}
        self._first_s: float | None = None
        settings = {f"polytempo.{name}": value for name, value in facts.settings.items()}
        self._span: Span = self._tracer.start_span("run", attributes=settings, start_time=self._began_ns)

    def log(self, row: Mapping[str, float], step: int) -> None:
        """A span from the row before, of the same kind and worker, to this one."""
        seconds = next((name for name in row if name.partition("/")[0] == "seconds"), None)
        if seconds is None:
            self._span.add_event("log", {**row, "step": step})
            return
        kind = "evaluation" if any(name.startswith("test/") for name in row) else "steps"
        key, now_s = f"{kind}/{seconds}", row[seconds]
        if self._first_s is None:
            self._first_s = 0.0 if step and now_s < 60 else now_s
        before_s = self._seconds.get(key, self._first_s)
        self._seconds[key] = now_s
        span = self._tracer.start_span(
            kind, set_span_in_context(self._span), attributes={**row, "step": step}, start_time=self._at(before_s)
        )
        span.end(self._at(now_s))

    def event(self, event: StreamRecord) -> None:
        """An event of the run's span."""
        self._span.add_event(sentence(event))

    def finish(self, status: RunFinished) -> None:
        """End the run's span, and send the rest."""
        self._span.set_attribute("polytempo.state", status.state)
        self._span.set_status(
            Status(StatusCode.OK) if status.state == "finished" else Status(StatusCode.ERROR, status.why)
        )
        self._span.end()
        self._provider.shutdown()

    def _at(self, seconds: float) -> int:
        assert self._first_s is not None
        return self._began_ns + int(max(0.0, seconds - self._first_s) * _NS)


class _OneTrace:
    """Ids of spans are drawn; the trace's is the run's."""

    def __init__(self, identity: str) -> None:
        self._trace = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:16], "big")

    def generate_trace_id(self) -> int:
        """The id of the run's trace."""
        return self._trace

    def generate_span_id(self) -> int:
        """Another id, never 0."""
        return 1 + secrets.randbits(63)

    def is_trace_id_random(self) -> bool:
        """False: samplers must not take its bits for random ones."""
        return False
