"""Workers that average their models are killed, sent away and taken in: all samples count, and the model learns."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - optimizers need it: a second here instead of in each worker
from torch import Tensor

import polytempo as pt
from polytempo.aggregation import mean
from polytempo.core import Strategy
from polytempo.engines.processes.failures import WorkerDied
from polytempo.runs.elastic.run_elastic import ElasticLauncher, run_elastic
from polytempo.runs.run_collective import run_collective
from polytempo.spec.precision import precision_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.synchronization import every
from process.elastic_stories import harmed, trains_with, watching
from waiting import soon

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("none_left")]

EPOCHS, SAMPLES = 8, 1437
ACCURACY_SPREAD = 0.03
"""Two runs with workers that come and go at other steps differ less: three times the noise of 360 test samples at 97
%."""
Story = Callable[[ElasticLauncher, list[int]], Iterator[None]]


calls: list[float] = []


def digits(hurry: Path) -> pt.Job:
    """The digits, with longer and longer steps until a test's story is over."""
    found = pt.jobs.find("digits")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad and not hurry.exists():
            calls.append(min(0.5, 0.005 * 1.01 ** len(calls)))
            soon(hurry.exists, calls[-1])
        return found.loss(output, target)

    return replace(found, loss=loss)


def all_sorts(launcher: ElasticLauncher, room: list[int]) -> Iterator[None]:
    """The first worker is killed, one leaves, there is room for one more, and for one alone."""
    for number in (signal.SIGKILL, signal.SIGTERM):
        yield from trains_with(launcher, 3)
        yield from harmed(launcher, 0, number)
    for size in (4, 1, 2):
        room.append(size)
        yield from trains_with(launcher, size)


def told(story: Story, spec: RunSpec, hurry: Path, workers: int = 3) -> Any:
    """An elastic run with `story`; it hurries to its end afterwards."""
    room = [workers]
    watch = watching(lambda launcher: story(launcher, room), hurry)
    result = run_elastic(spec, pt.engines.local(), None, lambda: room[-1], watch)
    assert hurry.exists(), "the run was over before the story"
    return result


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("local_sgd(period=4, codec=feedback(top_k(0.3)))", None),
        ("post_local_sgd(switch_step=8, period=5)", None),
        ("diloco(period=6, outer_momentum=0.5)", None),
        ("diloco(period=6, outer_momentum=0.5)", "bf16"),
        ("gossip(period=2)", None),
        ("parameter_averaging(period=5)", None),
        ("adasum(of='updates')", None),
    ],
)
def test_a_run_goes_on_and_ends_near_the_calm_one(strategy: str, precision: str | None, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    options = RunOptions(epochs=EPOCHS, global_batch_size=48, seed=2, threads=1, precision=precision_of(precision))
    spec = RunSpec.of(digits(hurry), pt.parse_strategy(strategy), 3, options)
    hurry.touch()
    calm = run_collective(spec, pt.engines.local())
    hurry.unlink()
    elastic = replace(options, min_workers=1, max_workers=4)
    result = told(all_sorts, replace(spec, options=elastic), hurry)
    assert [(row["once"], row["last_epoch"]) for row in result.ledger] == [(SAMPLES, EPOCHS - 1)]
    lost = [text for change in result.membership for text in change["lost"]]
    assert lost == ["member-0 was killed by SIGKILL"]
    assert calm.accuracy > 0.9
    assert result.accuracy > calm.accuracy - ACCURACY_SPREAD


def test_a_step_that_exchanges_both_gradients_and_parameters_is_refused(tmp_path: Path) -> None:
    both = Strategy("both", mean(), every(2, mean()))
    (tmp_path / "hurry").touch()
    options = RunOptions(epochs=1, min_workers=1, threads=1)
    with pytest.raises(WorkerDied, match="both exchanges gradients within a round"):
        run_elastic(RunSpec.of(digits(tmp_path / "hurry"), both, 2, options), pt.engines.local())
