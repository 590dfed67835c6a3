"""Horovod's autotuner on synthetic surfaces of throughput, its log, and the timeline's file."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polytempo.horovod.negotiation.autotuner import AutotuneOptions, Autotuner, TunedSettings, fit, next_point
from polytempo.horovod.negotiation.message import Agreement, TensorRequest
from polytempo.horovod.runtime.runtime import Tuning
from polytempo.horovod.runtime.timeline import TimelineFile

START = TunedSettings(128 << 20, 0.02)
Surface = Callable[[TunedSettings], float]
"""Bytes a second."""


def surface(peak: TunedSettings) -> Surface:
    """One peak of 1e9, half of it 4 doublings of either setting away."""

    def rate(settings: TunedSettings) -> float:
        away = math.hypot(*(math.log2(max(a, 1e-9) / b) for a, b in zip(settings, peak, strict=True)))
        return 1e9 / (1 + (away / 4) ** 2)

    return rate


def tuned(rate: Surface, chance: float, seed: int, **options: object) -> Autotuner:
    """Operations of 1 MB under two names, until the tuner is done."""
    chosen = AutotuneOptions(seed=seed, **options)  # type: ignore[arg-type]
    tuner, random, now_s = Autotuner(START, chosen), np.random.default_rng(seed), 0.0
    for _ in range(100_000):
        if tuner.done:
            return tuner
        now_s += 2e6 / rate(tuner.settings) * random.lognormal(0.0, chance)
        tuner.performed(["a"], 1_000_000, now_s)
        tuner.performed(["b"], 1_000_000, now_s)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("peak", [TunedSettings(2 << 20, 0.0005), TunedSettings(32 << 20, 0.005)])
def test_the_tuner_finds_nine_tenths_of_the_highest_throughput(peak: TunedSettings, seed: int) -> None:
    rate = surface(peak)
    tuner = tuned(rate, 0.1, seed, steps_per_sample=3)
    assert rate(tuner.settings) > 0.9e9 > rate(START) * 1.2, f"{tuner.settings} with seed {seed}"


def test_what_is_set_is_not_tuned_and_where_all_is_set_nothing_is() -> None:
    tuner = tuned(surface(TunedSettings(1 << 20, 0.001)), 0.1, 0, tunes_fusion=False, steps_per_sample=2)
    assert {settings.fusion_bytes for settings, _ in tuner.rows} == {START.fusion_bytes}
    assert len({settings.cycle_s for settings, _ in tuner.rows}) > 5
    assert Autotuner(START, AutotuneOptions(tunes_fusion=False, tunes_cycle=False)).done


def test_warm_up_is_forgotten_and_samples_are_counted() -> None:
    options = AutotuneOptions(warmup_samples=2, steps_per_sample=4, max_samples=3)
    tuner = Autotuner(START, options)
    changes = [operation for operation in range(1, 200) if tuner.performed(["a"], 1, float(operation))]
    assert changes == [61, 82, 103]  # 3 · 5 · 4 operations, and one more for the clock of each setting
    assert tuner.done
    assert [row[0] for row in tuner.rows].count(tuner.settings) >= 1
    assert len(tuner.rows) == 4


def test_a_process_goes_through_what_it_saw_without_noise_and_looks_between() -> None:
    points = np.array([[0.1, 0.5], [0.5, 0.5], [0.9, 0.5]])
    scores = np.array([0.0, 2.0, 1.0])
    posterior = fit(points, scores, noise=1e-4)
    mean, deviation = posterior.at(points)
    np.testing.assert_allclose(mean, (scores - scores.mean()) / scores.std(), atol=1e-3)
    assert (deviation < 1e-2).all()
    assert posterior.at(np.array([[0.0, 0.0]]))[1] > 0.1
    found = next_point(posterior, 2, np.random.default_rng(0))
    assert abs(found[0] - 0.1) > 0.2


def agreement(name: str, kind: str = "allreduce") -> Agreement:
    return Agreement(TensorRequest(name, kind, ("float32",), ((3, 2),)))  # type: ignore[arg-type]


def test_the_log_has_horovods_columns_and_ends_with_the_best(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    tuner = Autotuner(START, AutotuneOptions(warmup_samples=0, steps_per_sample=1, max_samples=4))
    tuning = Tuning(tuner, str(log), (False, False, True))
    now_s = 0.0
    while not tuner.done:
        now_s += 0.001 + 0.001 * (tuner.settings.cycle_s > 0.01)
        tuning.performed([agreement("a"), agreement("b")], now_s)
    rows = list(csv.DictReader(log.read_text(encoding="utf-8").splitlines()))
    assert list(rows[0]) == [
        *("hierarchical_allreduce", "hierarchical_allgather", "cache_enabled"),
        *("cycle_time_ms", "tensor_fusion_threshold", "score"),
    ]
    assert len(rows) == 5
    assert rows[0] == {
        "hierarchical_allreduce": "0",
        "hierarchical_allgather": "0",
        "cache_enabled": "1",
        "cycle_time_ms": "20",
        "tensor_fusion_threshold": "128",
        "score": "0.024",
    }
    assert (rows[-1]["cycle_time_ms"], rows[-1]["score"]) in {(row["cycle_time_ms"], "0.048") for row in rows[:-1]}


def test_a_timelines_phases_nest_and_its_file_is_whole(tmp_path: Path) -> None:
    """Rank 1 asks for "a" again before rank 0 has noted that it is done; "b" never ends."""
    ticks = iter(range(1000))
    timeline = TimelineFile(tmp_path / "t.json", mark_cycles=True, clock=lambda: next(ticks) * 1e-6)
    a, b, refused = agreement("a"), agreement("b", "broadcast"), agreement("c")
    timeline.ready(1, [a.request, b.request, refused.request])
    timeline.cycle()
    timeline.ready(0, [a.request])
    timeline.agreed([a.request])
    timeline.refused(refused.request.key)
    timeline.ready(1, [a.request])
    timeline.begins([a])
    timeline.phase("MEMCPY_IN_FUSION_BUFFER")
    timeline.phase("SHARED_ALLREDUCE")
    timeline.ends([a])
    timeline.close()
    timeline.close()
    timeline.ready(0, [a.request])
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    rows = {event["args"]["name"]: event["pid"] for event in events if "name" in event.get("args", {})}
    assert set(rows) == {"a", "b", "c"}
    shown = {
        name: [e.get("name", "end") for e in events if e["pid"] == row and e["ph"] in "BEX"]
        for name, row in rows.items()
    }
    assert shown == {
        "a": [
            *("NEGOTIATE_ALLREDUCE", "1", "0", "end"),
            *("ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "end", "SHARED_ALLREDUCE", "end", "end"),
            *("NEGOTIATE_ALLREDUCE", "1", "end"),
        ],
        "b": ["NEGOTIATE_BROADCAST", "1", "end"],
        "c": ["NEGOTIATE_ALLREDUCE", "1", "end"],
    }
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    assert [event["name"] for event in events if event["ph"] == "i"] == ["CYCLE_START"]
    with pytest.raises(OSError, match="missing"):
        TimelineFile(tmp_path / "missing" / "t.json")
