"""Laws of callbacks over the catalogue: idle ones change nothing, and a stop at step s is a run of s steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import polytempo as pt
from laws import test_plateau, test_served_observation
from laws.catalogue import ROWS, SERVED, STAGED, Row, label
from laws.test_observation import TESTS, WORKERS, job
from polytempo.cluster import Cluster, Crash, Link
from polytempo.core.errors import JobFailed, PolytempoError
from polytempo.spec.result import Result
from staged_job import job as staged_job

CRASHED = Cluster(Link(1e-5, 1e9), flops_per_s=1e7, faults=(Crash(rank=1, step=2),))


class Idle(pt.callbacks.Callback):
    """Sees all, and asks for nothing."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_start(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append("start")

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append("step")

    def on_evaluation(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append("evaluation")

    def on_checkpoint(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append("checkpoint")

    def on_finish(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append("finish")


class AskAt(pt.callbacks.Callback):
    """Asks once, after a step."""

    def __init__(self, step: int, **asked: bool) -> None:
        self._step, self._asked = step, pt.callbacks.Control(**asked)

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> pt.callbacks.Control | None:
        return self._asked if facts.step == self._step else None


def trained(row: Row, callbacks: list[Any] | None = None, **options: Any) -> Result:
    random.seed(0)
    np.random.seed(0)
    staged = row in STAGED
    served = row in SERVED
    made = staged_job(tested=True) if staged else served_job() if served else job(TESTS["plain"])
    workers = row.make().stages * (2 if "inner" in label(row) else 1) if staged else WORKERS
    return pt.simulate(made, row.make(), workers, threads=1, callbacks=callbacks or [], **options)


def served_job() -> pt.Job:
    return replace(test_served_observation.job(test_served_observation.TESTS["a test set"], whole=False), epochs=2)


def same(ours: Result, other: Result) -> None:
    assert ours.parameters_sha256 == other.parameters_sha256
    assert (ours.steps, ours.samples, ours.train_loss) == (other.steps, other.samples, other.train_loss)


@pytest.mark.parametrize("row", [*ROWS, *STAGED], ids=label)
def test_a_stop_after_a_step_is_a_run_of_so_many_steps(row: Row) -> None:
    """An idle callback changes no bit and no time, either."""
    stopped = trained(row, [AskAt(3, stop=True)], epochs=2)
    idle = Idle()
    alone, watched = trained(row, steps=stopped.steps), trained(row, [idle], steps=stopped.steps)
    assert 3 <= stopped.steps <= 12
    for found in (stopped, watched):
        same(found, alone)
        assert (found.seconds, found.trace_hash) == (alone.seconds, alone.trace_hash)
    assert stopped.callbacks is not None
    assert stopped.callbacks[0]["asked_to_stop_at"] == 3
    assert [idle.seen[0], idle.seen[-1]] == ["start", "finish"]
    assert idle.seen.count("step") == alone.steps


@pytest.mark.parametrize("row", SERVED, ids=label)
def test_idle_callbacks_change_nothing_at_a_server(row: Row) -> None:
    idle = Idle()
    alone, watched = trained(row, steps=6), trained(row, [idle], steps=6)
    same(watched, alone)
    assert (watched.seconds, watched.trace_hash) == (alone.seconds, alone.trace_hash)
    assert {"start", "step", "evaluation", "finish"} <= set(idle.seen)


@pytest.mark.parametrize("row", SERVED[:3], ids=label)
def test_a_stop_ends_a_run_with_a_server(row: Row) -> None:
    whole, stopped = trained(row, epochs=4), trained(row, [AskAt(2, stop=True)], epochs=4)
    assert 2 <= stopped.steps < whole.steps


@pytest.mark.parametrize("row", [ROWS[0], next(row for row in ROWS if "local_sgd" in label(row))], ids=label)
def test_evaluations_and_checkpoints_on_request_change_nothing(row: Row, tmp_path: Path) -> None:
    idle = Idle()
    alone = trained(row, steps=6)
    asked = trained(row, [AskAt(2, evaluate=True, save=True), idle], steps=6, out=tmp_path)
    same(asked, alone)
    assert (asked.seconds, asked.trace_hash) == (alone.seconds, alone.trace_hash)
    assert "checkpoint" in idle.seen
    assert idle.seen.count("evaluation") >= 2


class Moments(pt.callbacks.Callback):
    """Notes evaluations and checkpoints with their steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_evaluation(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append(("evaluation", facts.step))

    def on_checkpoint(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append(("checkpoint", facts.step))


@pytest.mark.parametrize("ends", [{"epochs": 3}, {"steps": 13}])
def test_an_epochs_last_checkpoint_comes_behind_its_score(ends: dict[str, int], tmp_path: Path) -> None:
    """Otherwise a resumed run would lack that evaluation in the states of its callbacks."""
    moments = Moments()
    given: dict[str, Any] = {"threads": 1, "checkpoint_every": 5, "out": tmp_path, "callbacks": [moments]}
    pt.simulate(test_plateau.JOB, "sync_sgd()", 2, **ends, **given)
    last = 15 if "epochs" in ends else 13
    assert moments.seen == [(kind, step) for step in (5, 10, last) for kind in ("evaluation", "checkpoint")]


def test_an_evaluation_at_a_server_is_refused() -> None:
    with pytest.raises(pt.errors.Incompatible) as caught:
        trained(SERVED[0], [AskAt(1, evaluate=True)], steps=6)
    assert caught.value.code == "PT2305"


def test_a_checkpoint_of_simulated_shards_is_refused_with_a_folder(tmp_path: Path) -> None:
    assert trained(SERVED[0], [AskAt(1, save=True)], steps=6).steps  # without a folder there is nothing to save
    with pytest.raises(pt.errors.Incompatible) as caught:
        trained(SERVED[0], [AskAt(1, save=True)], steps=6, out=tmp_path)
    assert caught.value.code == "PT2309"


class Faults(pt.callbacks.Callback):
    """Notes faults, and the end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_fault(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append(facts.fault)

    def on_finish(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append(facts.status)


def test_a_crash_that_a_simulation_survives_is_a_fault() -> None:
    faults = Faults()
    found = trained(SERVED[0], [faults], epochs=2, cluster=CRASHED)
    assert faults.seen[0].startswith("worker 1 crashed at ")
    assert faults.seen[1:] == ["finished"]
    assert found.trace_hash == trained(SERVED[0], epochs=2, cluster=CRASHED).trace_hash


def test_a_crash_that_ends_a_simulation_is_a_fault() -> None:
    faults = Faults()
    with pytest.raises(PolytempoError):
        trained(ROWS[0], [faults], cluster=CRASHED)
    assert faults.seen[-1] == "failed"
    assert len(faults.seen) == 2


def f1(predicted: Tensor, target: Tensor) -> float:
    """A number that grows with training."""
    return float((predicted == target).double().mean())


@pytest.mark.parametrize("strategy", ["local_sgd(period=4)", "ssp"])
def test_a_run_until_a_metric_stops_where_a_run_until_the_same_accuracy_does(strategy: str) -> None:
    digits = pt.jobs.find("digits")
    measured = replace(
        digits, metrics={"f1": f1}, predictions=lambda output, target: (output.argmax(1), target), name="measured"
    )
    found = [pt.simulate(measured, strategy, 2, threads=1, until={name: 0.8}) for name in ("f1", "accuracy")]
    assert found[0].reached
    assert found[0].steps == found[1].steps
    assert found[0].metrics == {"f1": found[0].accuracy}
    several = replace(measured, metrics={"f1": lambda predicted, target: {"own": f1(predicted, target)}})
    assert pt.simulate(several, strategy, 2, threads=1, until={"f1/own": 0.8}).steps == found[0].steps
    with pytest.raises(ValueError, match=r"until f1=…: a score has .*f1/own"):
        pt.simulate(several, strategy, 2, threads=1, until="f1=0.8")
    with pytest.raises(ValueError, match=r"until precision=…: scores of job measured have accuracy, loss, f1"):
        pt.simulate(measured, strategy, 2, threads=1, until="precision=0.9")


@pytest.mark.parametrize("run", [pt.run, pt.simulate])
@pytest.mark.parametrize("strategy", ["sync_sgd", "ssp"])
@pytest.mark.parametrize(
    "callback", ["early_stop(metric=acuracy)", "keep(metric=acuracy)", "median_stop(metric=acuracy)"]
)
def test_a_metric_that_no_score_has_is_refused_before_the_run(
    run: Any, strategy: str, callback: str, tmp_path: Path
) -> None:
    if (strategy, callback.partition("(")[0]) == ("ssp", "keep"):
        return  # PT2302
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"metric='acuracy'.*: scores of job digits have accuracy, loss; give one"):
        run("digits", strategy, 2, epochs=1, callbacks=callback, out=out, threads=1)
    assert not (out / "metrics.jsonl").exists()


def test_callbacks_may_read_further_test_sets_and_need_one() -> None:
    digits = pt.jobs.find("digits")
    several = replace(digits, data=lambda path: (made := digits.data(path))._replace(more={"again": made.test}))
    asked: dict[str, Any] = {"until": {"again/accuracy": 0.1}, "callbacks": "early_stop('again/loss')"}
    assert pt.simulate(several, "sync_sgd", 2, epochs=1, threads=1, **asked).reached
    with pytest.raises(ValueError, match="have accuracy, loss, again/accuracy, again/loss; give one"):
        pt.simulate(several, "sync_sgd", 2, epochs=1, threads=1, callbacks="early_stop('other/loss')")
    unmeasured = replace(digits, correct=None)
    with pytest.raises(ValueError, match=r"early_stop.* needs a job with an accuracy, and job digits has none"):
        pt.simulate(unmeasured, "sync_sgd", 2, epochs=1, threads=1, callbacks="early_stop(accuracy)")
    unseen = replace(digits, data=lambda path: digits.data(path)._replace(test=None))
    with pytest.raises(ValueError, match=r"early_stop.* needs a test set, and job digits has none"):
        pt.simulate(unseen, "sync_sgd", 2, epochs=1, threads=1, callbacks="early_stop()")


class Broken(pt.callbacks.Callback):
    """Raises at the first evaluation."""

    def on_evaluation(self, facts: pt.callbacks.CallbackFacts) -> None:
        raise KeyError("nothing")


class Wrong(pt.callbacks.Callback):
    """Returns something else than a Control."""

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> Any:
        return True


@pytest.mark.parametrize("broken", [Broken(), Wrong()], ids=["raises", "returns"])
@pytest.mark.parametrize("row", [ROWS[0], SERVED[0]], ids=label)
def test_a_callback_that_fails_ends_the_run_with_its_name(row: Row, broken: pt.callbacks.Callback) -> None:
    idle = Idle()
    with pytest.raises(JobFailed, match=type(broken).__name__):
        trained(row, [broken, idle], epochs=2)
    assert idle.seen[-1] == "finish"
