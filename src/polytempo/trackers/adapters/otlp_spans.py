"""OpenTelemetry: spans of a run, sent by OTLP over HTTP.

run ─┬─ steps, evaluation    from one row to the next, as rows come
     └─ step ─ all_reduce    at the end of the run: the last steps of its trace, with the operations of each rank
"""

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

from polytempo.core.system.url_path import place
from polytempo.report.runs import read_events
from polytempo.report.status.records import RunFinished, StreamRecord
from polytempo.trackers.tracker import TrackedRun
from polytempo.trackers.words import sentence
from polytempo.worlds.trace import OFF_THE_CLOCK, Event

_NS = 1_000_000_000
_MOST_STEPS, _MOST_RANKS, _MOST_OPERATIONS = 20, 16, 4000
_QUEUE = 16_384
"""Spans that wait to be sent: more than a trace's at the end."""


class OtlpSpans:
    """Spans `run` and, inside it, `steps`, with a row's numbers as attributes; events of the run are events of `run`.

    At the end the last 20 steps of the trace follow, of at most 16 ranks and 4,000 operations: a span `step` for each
    rank's, and inside it a span for each operation, with its bytes and peer.

    All parts of a resumed run have one trace id. Times are rows' `seconds`: virtual in a simulation.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint

    def start(self, facts: TrackedRun) -> None:
        """Begin the span of the run."""
        resource = Resource.create({"service.name": "polytempo", "service.instance.id": facts.identity})
        self._provider = TracerProvider(resource=resource, id_generator=cast("Any", _OneTrace(facts.identity)))
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=self._endpoint), max_queue_size=_QUEUE)
        )
        self._tracer = self._provider.get_tracer("polytempo")
        self._folder = facts.folder
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
        begin_s = max(0.0, before_s - self._first_s)
        self._child(self._span, kind, {**row, "step": step}, begin_s).end(self._at(now_s))

    def event(self, event: StreamRecord) -> None:
        """An event of the run's span."""
        self._span.add_event(sentence(event))

    def finish(self, status: RunFinished) -> None:
        """End the run's span, and send the rest."""
        if status.state == "finished":  # others leave no trace, or keep an earlier run's
            self._steps()
        self._span.set_attribute("polytempo.state", status.state)
        self._span.set_status(
            Status(StatusCode.OK) if status.state == "finished" else Status(StatusCode.ERROR, status.why)
        )
        self._span.end()
        self._provider.shutdown()

    def _steps(self) -> None:
        """Spans of the last steps of the trace, where the run has left one."""
        trace = place(self._folder) / "trace.json"
        if not trace.is_file():
            return
        events, _ = read_events(trace)
        last = max((event.step for event in events), default=0)
        steps = dict[tuple[int, int], list[Event]]()
        for event in events[-_MOST_OPERATIONS:]:
            if last - _MOST_STEPS < event.step and event.rank < _MOST_RANKS and event.op not in OFF_THE_CLOCK:
                steps.setdefault((event.step, event.rank), []).append(event)
        for (step, rank), found in steps.items():
            begin_s, end_s = min(each.start_s for each in found), max(each.end_s for each in found)
            span = self._child(self._span, "step", {"step": step, "rank": rank}, begin_s)
            for each in found:
                attributes = {"bytes": each.bytes} | ({"peer": each.peer} if each.peer >= 0 else {})
                self._child(span, each.op, attributes, each.start_s).end(self._since(each.end_s))
            span.end(self._since(end_s))

    def _child(self, parent: Span, name: str, attributes: Mapping[str, Any], begin_s: float) -> Span:
        inside = set_span_in_context(parent)
        return self._tracer.start_span(name, inside, attributes=attributes, start_time=self._since(begin_s))

    def _since(self, seconds: float) -> int:
        return self._began_ns + int(seconds * _NS)

    def _at(self, seconds: float) -> int:
        assert self._first_s is not None
        return self._since(max(0.0, seconds - self._first_s))


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
