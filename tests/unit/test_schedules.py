"""Schedules as tables: each stage's actions and their times, bubbles, memory and delays."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from polytempo.cli.predict.cut import predictions
from polytempo.partition import schedules
from polytempo.partition.schedules import (
    Action,
    Schedule,
    ddg,
    features_replay,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    pipelined_backprop,
    synthetic_gradients,
    zero_bubble,
)
from polytempo.partition.schedules.action import Turn
from polytempo.partition.schedules.facts import facts
from polytempo.partition.schedules.timetable import StageTimes, played


def written(schedule: Schedule, stage: int) -> str:
    return " ".join(map(str, schedule.actions(stage)))


TABLES = [
    (gpipe(2, 3), ["F0 F1 F2 B0 B1 B2 U"] * 2),
    (one_f_one_b(3, 4), ["F0 F1 F2 B0 F3 B1 B2 B3 U", "F0 F1 B0 F2 B1 F3 B2 B3 U", "F0 B0 F1 B1 F2 B2 F3 B3 U"]),
    (one_f_one_b(3, 1), ["F0 B0 U"] * 3),
    (zero_bubble(2, 3), ["F0 F1 I0 W0 F2 I1 W1 I2 W2 U", "F0 I0 F1 I1 W0 F2 I2 W1 W2 U"]),
    (interleaved(2, 2), ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1 U", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1 U"]),
    (ddg(3), ["F0 B-2 U", "F0 B-1 U", "F0 B0 U"]),
    (features_replay(2), ["F0 B-1 U", "F0 B0 U"]),
    (pipelined_backprop(3), ["F0 B-4 U", "F0 B-2 U", "F0 B0 U"]),
    (pipedream(2), ["F0 B-1 U", "F0 B0 U"]),
    (synthetic_gradients(3), ["F0 B0 U L-1", "F0 B0 U L-1", "F0 B0 U"]),
    (pipedream_2bw(3, 3), ["F0 B-2 F1 B-1 U F2 B0", "F0 B-1 U F1 B0 F2 B1", "F0 B0 F1 B1 F2 B2 U"]),
]


@pytest.mark.parametrize(
    ("schedule", "table"), TABLES, ids=lambda value: str(value) if isinstance(value, Schedule) else ""
)
def test_what_each_stage_does(schedule: Schedule, table: list[str]) -> None:
    assert [written(schedule, stage) for stage in range(schedule.stages)] == table


EVERY: dict[str, Callable[[int], Schedule]] = {
    "gpipe": lambda stages: gpipe(stages, 2 * stages),
    "one_f_one_b": lambda stages: one_f_one_b(stages, 2 * stages),
    "interleaved": lambda stages: interleaved(stages, 2 * stages, parts=3),
    "zero_bubble": lambda stages: zero_bubble(stages, 2 * stages),
    "ddg": ddg,
    "features_replay": features_replay,
    "pipelined_backprop": pipelined_backprop,
    "pipedream": pipedream,
    "synthetic_gradients": synthetic_gradients,
    "pipedream_2bw": lambda stages: pipedream_2bw(stages, 2 * stages),
}


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", EVERY)
def test_each_micro_batch_goes_once_forward_and_once_back_in_every_part(name: str, stages: int) -> None:
    schedule = EVERY[name](stages)
    steps = 4 * stages
    timetable = played(schedule, steps)  # which raises where stages wait for each other for ever
    for stage in range(stages):
        turns = [entry.turn for entry in timetable.of(stage)]
        for kinds in (("forward",), ("backward", "input")):
            done = [(t.micro_batch, t.action.part) for t in turns if t.action.kind in kinds]
            assert len(done) == len(set(done))
        weights = [(t.micro_batch, t.action.part) for t in turns if t.action.kind == "weight"]
        halves = [(t.micro_batch, t.action.part) for t in turns if t.action.kind == "input"]
        assert sorted(weights) == sorted(halves)
        forward = {(t.micro_batch, t.action.part) for t in turns if t.action.kind == "forward"}
        assert len(forward) == steps * schedule.micro_batches * schedule.parts


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_bubbles_are_those_of_the_papers(stages: int) -> None:
    k, m = stages, 3 * stages
    f, b, w = 1.0, 2.0, 0.75
    times = StageTimes(f, b, w)
    i = b - w
    expected = {
        gpipe(k, m, recompute=False): (k - 1) / (m + k - 1),
        gpipe(k, m): (k - 1) / (m + k - 1),
        one_f_one_b(k, m): (k - 1) / (m + k - 1),
        interleaved(k, m, parts=2): (k - 1) / (2 * m + k - 1),
        interleaved(k, m, parts=3): (k - 1) / (3 * m + k - 1),
        zero_bubble(k, m): (k - 1) * (f + i - w) / (m * (f + b) + (k - 1) * (f + i - w)),
        ddg(k): 0.0,
        features_replay(k): 0.0,
        pipelined_backprop(k): 0.0,
        synthetic_gradients(k): 0.0,
        pipedream_2bw(k, m): 0.0,
    }
    for schedule, bubble in expected.items():
        each = StageTimes(f / schedule.parts, b / schedule.parts, w / schedule.parts)
        assert played(schedule, 5 * k, each).bubble == pytest.approx(bubble, abs=1e-9), schedule
    assert played(gpipe(k, 1, recompute=False), 2, times).step_s == pytest.approx(k * (f + b))


@pytest.mark.parametrize(("stages", "speedup"), [(2, 1.5), (3, 1.8), (4, 2.0)])
def test_delayed_gradients_in_lockstep_are_as_fast_as_the_paper_says(stages: int, speedup: float) -> None:
    """A step takes T_F + T_B / K, where a backward pass takes twice as long as a forward pass."""
    times = StageTimes(1 / stages, 2 / stages, 1 / stages)
    assert 3 / played(ddg(stages, lockstep=True), 20, times).step_s == pytest.approx(speedup)
    assert 3 / played(ddg(stages), 20, times).step_s == pytest.approx(stages)


def test_turns_that_were_measured_each_take_their_own_time() -> None:
    """Steps of 6, 8 and 6: stage 0's second forward pass takes 3 instead of 1."""

    def seconds(stage: int, turn: Turn) -> float:
        if (stage, str(turn)) == (0, "F1"):
            return 3.0
        return {"forward": 1.0, "backward": 2.0}.get(turn.action.kind, 0.0)

    timetable = played(one_f_one_b(2, 1), 3, seconds)
    assert [[e.end_s for e in timetable.of(stage) if str(e.turn) == "U"] for stage in range(2)] == [
        [6, 14, 20],
        [4, 12, 18],
    ]
    assert (timetable.mean_step_s, timetable.step_s) == (7, 6)


def test_pipelined_backprop_hides_messages_that_ddg_waits_for() -> None:
    times = StageTimes(1.0, 2.0)
    assert played(pipelined_backprop(4), 40, times, link_s=0.7).step_s == pytest.approx(3.0)
    assert played(ddg(4), 40, times, link_s=0.7).step_s > 3.5


def test_messages_of_two_parts_stand_in_line_where_they_occupy_the_link() -> None:
    """Backward messages take 5 s, so a step does; forward ones, of 1 s, hide behind them."""
    times = StageTimes(1.0, 1.0)
    for schedule in (pipelined_backprop(2), ddg(2)):
        timetable = played(schedule, 40, times, link_s=lambda source, target: 1.0 if source < target else 5.0)
        assert timetable.step_s == pytest.approx(5.0)
    assert played(pipelined_backprop(2), 40, times, link_s=lambda *_: 0.5).step_s == pytest.approx(2.0)


def test_an_unequal_top_layer_slows_every_stage() -> None:
    """The pipeline is as fast as its slowest stage."""
    equal = [StageTimes(1.0, 2.0)] * 4
    heavy = [*equal[:3], StageTimes(2.0, 4.0)]
    total_s = 4 * 3.0
    assert total_s / played(pipelined_backprop(4), 40, equal).step_s == pytest.approx(4.0)
    assert (total_s + 3.0) / played(pipelined_backprop(4), 40, heavy).step_s == pytest.approx(2.5)


FACTS = [  # stage by stage: micro-batches held, delay, versions
    (gpipe(3, 6), [(6, 0, 1)] * 3),
    (one_f_one_b(3, 6), [(3, 0, 1), (2, 0, 1), (1, 0, 1)]),
    (interleaved(3, 6), [(8, 0, 1), (6, 0, 1), (4, 0, 1)]),
    (zero_bubble(3, 6), [(3, 0, 1)] * 3),
    (ddg(3), [(3, 2, 3), (2, 1, 2), (1, 0, 1)]),
    (ddg(3, weights="current"), [(3, 2, 1), (2, 1, 1), (1, 0, 1)]),
    (features_replay(3), [(3, 2, 1), (2, 1, 1), (1, 0, 1)]),
    (pipelined_backprop(3), [(5, 4, 1), (3, 2, 1), (1, 0, 1)]),
    (pipedream(3, vertical_sync=True), [(3, 2, 3), (2, 2, 3), (1, 2, 3)]),
    (pipedream_2bw(3, 6), [(3, 1, 2), (2, 1, 2), (1, 1, 2)]),
]


@pytest.mark.parametrize(
    ("schedule", "table"), FACTS, ids=lambda value: str(value) if isinstance(value, Schedule) else ""
)
def test_what_a_stage_holds_and_how_late_it_updates(schedule: Schedule, table: list[tuple[int, int, int]]) -> None:
    assert [facts(schedule, stage)[:3] for stage in range(schedule.stages)] == table


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_memory_is_as_the_docstrings_say(stages: int) -> None:
    k, m, v = stages, 2 * stages, 2
    assert [facts(one_f_one_b(k, m), s).held for s in range(k)] == [min(k - s, m) for s in range(k)]
    assert [facts(interleaved(k, m, v), s).held for s in range(k)] == [k * (v + 1) - 2 * s - 1 for s in range(k)]
    assert max(facts(zero_bubble(k, m), s).held for s in range(k)) == k
    assert [facts(pipelined_backprop(k), s).delay for s in range(k)] == [2 * (k - 1 - s) for s in range(k)]
    assert [facts(ddg(k), s).delay for s in range(k)] == [k - 1 - s for s in range(k)]


DRAWN = {
    gpipe: (gpipe(2, 4, recompute=False), 1),
    one_f_one_b: (one_f_one_b(2, 4), 1),
    zero_bubble: (zero_bubble(2, 4), 1),
    interleaved: (interleaved(2, 2), 1),
}


@pytest.mark.parametrize("make", DRAWN, ids=lambda make: make.__name__)
def test_docstrings_draw_what_happens(make: Callable[..., Schedule]) -> None:
    schedule, steps = DRAWN[make]
    drawn = re.findall(r"^    stage \d   (.*)$", inspect.getdoc(make) or "", re.M)
    assert drawn == played(schedule, steps).drawn()


def test_the_module_draws_a_pipeline_that_is_full_from_its_third_step_on() -> None:
    drawn = re.findall(r"stage \d   (.*) …$", schedules.late_orders.__doc__ or "", re.M)
    assert drawn == played(ddg(3), 5, StageTimes(1.0, 1.0)).drawn()


def test_estimated_gradients_are_drawn_with_what_the_estimators_learn() -> None:
    drawn = re.findall(r"^    stage \d   (.*)$", inspect.getdoc(synthetic_gradients) or "", re.M)
    assert drawn == played(synthetic_gradients(3), 4, StageTimes(1.0, 1.0, learn_s=1.0)).drawn()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: interleaved(4, 6), "multiple of stages=4, not 6; use 8"),
        (lambda: pipedream_2bw(4, 2), "needs at least 3 micro-batches, not 2"),
        (lambda: gpipe(0, 4), "stages"),
        (lambda: one_f_one_b(2, 0), "micro_batches"),
        (lambda: played(ddg(3), 3, [StageTimes()] * 2), "times of 2 stages were given for 3"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_schedule_that_cannot_run_says_where_it_stands() -> None:
    def order(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
        return Action("backward"), Action("forward"), Action("update")

    with pytest.raises(ValueError, match=r"waits for ever; the next action of each stage is .*B0"):
        played(Schedule("backwards", 2, 1, order), 1)


def test_the_page_draws_what_happens() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    drawn = [text.splitlines() for text in re.findall(r"```text\n(stage 0 .*?)\n```", page, re.S)]
    played_ones = [
        played(gpipe(2, 4, recompute=False), 1),
        played(one_f_one_b(2, 4), 1),
        played(zero_bubble(2, 4), 1),
        played(ddg(3), 5, StageTimes(1.0, 1.0)),
        played(synthetic_gradients(3), 4, StageTimes(1.0, 1.0, learn_s=1.0)),
    ]
    assert drawn == [[f"stage {k}   {line}" for k, line in enumerate(each.drawn())] for each in played_ones]


def test_what_is_foreseen_of_a_cut_is_the_slowest_stage_and_the_bubble() -> None:
    """Stages of 2, 1 and 1 s: four at most twice as fast as one; with a flush, less."""
    found = {each.schedule: each for each in predictions([2.0, 1.0, 1.0], 8)}
    assert found["ddg"].step_s == pytest.approx(2.0)
    assert found["ddg"].speed_up == pytest.approx(2.0)
    assert found["ddg"].delay == 2
    assert found["features_replay"].step_s == pytest.approx(2.0 * 4 / 3)
    assert 2.0 < found["one_f_one_b"].step_s < 2.25
    assert found["zero_bubble"].step_s < found["one_f_one_b"].step_s < found["gpipe"].step_s
