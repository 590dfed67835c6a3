"""Events of a run in a sentence, for trackers that show texts."""

from __future__ import annotations

from polytempo.report.status.records import CheckpointSaved, Diagnosis, GroupStatus, ProcessEvent, StreamRecord, line_of


def sentence(event: StreamRecord) -> str:
    """The event in a sentence: "3.2 s: worker-1 was killed by SIGKILL; started again"."""
    match event:
        case ProcessEvent(who=who, how=how, at_s=at_s, then=then):
            return f"{at_s:.1f} s: {who} {how}; {then}"
        case GroupStatus(generation=generation, step=step, workers=workers):
            return f"step {step:,}: group {generation} of {workers} workers"
        case CheckpointSaved(step=step, path=path):
            return f"step {step:,}: checkpoint {path}"
        case Diagnosis(at_s=at_s, text=text):
            return f"{at_s:.1f} s: {text}"
    return line_of(event)
