"""A real run's trace beside its simulation's: steps, components, and the one behind most of the error."""

from __future__ import annotations

import pytest

from polytempo.report.pages.validation import steps_of_ranks, typical_step_s, validation
from polytempo.worlds.trace import Event


def trace(computing_s: float, sum_s: float, steps: int = 6) -> list[Event]:
    """Two ranks that compute and then meet; the second computes twice as long as the first."""
    events, now_s = list[Event](), 0.0
    for step in range(steps):
        for rank in (0, 1):
            begun_s = now_s + computing_s * (1 + rank) / 2
            events.append(Event(rank, step, "compute", 0, now_s, begun_s))
            events.append(Event(rank, step, "all_reduce", 8, begun_s, now_s + computing_s + sum_s))
        now_s += computing_s + sum_s
    return events


def test_steps_and_components_are_compared() -> None:
    found = validation(trace(0.004, 0.001), trace(0.004, 0.003))
    assert [step.name for step in found.steps] == ["2", "3", "4"]
    assert (found.whole.predicted_s, found.whole.measured_s) == pytest.approx((0.005, 0.007))
    assert found.whole.error == pytest.approx(-2 / 7)
    assert found.median_error == pytest.approx(2 / 7)
    by_name = {each.name: each for each in found.components}
    assert by_name["all_reduce"].measured_s == pytest.approx(0.003 + 0.001), "half of the ranks wait 2 ms"
    assert by_name["computing"].difference_s == pytest.approx(0.0)
    assert found.components[0].name == "all_reduce"
    assert steps_of_ranks(trace(0.004, 0.001)) == [pytest.approx([0.005] * 3)] * 2, "without the last"
    with pytest.raises(ValueError, match="no step in common"):
        validation(trace(1, 1, steps=2), trace(1, 1))


def test_a_server_marks_no_steps() -> None:
    served = [Event(2, 0, "take", 0, float(step), step + 0.5) for step in range(6)]
    assert validation(trace(0.004, 0.001) + served, trace(0.004, 0.003)) == validation(
        trace(0.004, 0.001), trace(0.004, 0.003)
    )


def test_scores_and_checkpoints_are_no_part_of_a_step() -> None:
    plain, stopped, off_s = trace(0.004, 0.001), list[Event](), 0.0
    for event in plain:
        moved = event._replace(start_s=event.start_s + off_s, end_s=event.end_s + off_s)
        stopped.append(moved)
        if event.step in (2, 3) and event.rank == 1 and event.op == "all_reduce":
            for rank in (0, 1):
                stopped.append(
                    Event(rank, event.step, "all_reduce", 8, moved.end_s + 0.1, moved.end_s + 0.4)
                )  # of means
                stopped.append(Event(rank, event.step, "score", 0, moved.end_s, moved.end_s + 0.5))
                stopped.append(Event(rank, event.step, "save", 0, moved.end_s + 0.5, moved.end_s + 0.7))
            off_s += 0.7
    assert steps_of_ranks(stopped) == [pytest.approx([0.005] * 3)] * 2
    for component in validation(plain, stopped).components:
        assert component.measured_s == pytest.approx(component.predicted_s), component.name


def test_operations_that_overlap_count_once() -> None:
    events = [
        Event(0, step, op, 0, step + begin_s, step + end_s)
        for step in range(5)
        for op, begin_s, end_s in (
            *(("compute", 0.0, 0.4), ("compute", 0.1, 0.2), ("compute", 0.6, 0.7)),  # the second within the first
            *(("recv", 0.2, 0.8), ("send", 0.2, 0.5), ("send", 0.7, 0.9)),
        )
    ]
    parts = {each.name: each.predicted_s for each in validation(events, events).components}
    assert parts == pytest.approx({"recv": 0.3, "send": 0.1, "computing": 0.6}), "from 0.1 before each step on"


def test_a_typical_step_counts_what_happens_in_one_of_eight() -> None:
    events, now_s = list[Event](), 0.0
    for step in range(80):
        seconds = (
            1.0 + 4.0 * (step % 8 == 7) + 100.0 * (step % 9 == 5)
        )  # an exchange in one of eight, and disturbed ones
        events.append(Event(0, step, "compute", 0, now_s, now_s + seconds))
        now_s += seconds
    assert typical_step_s(events) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="no whole step"):
        typical_step_s(events[:1])
