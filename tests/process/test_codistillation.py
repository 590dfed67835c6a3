"""Codistillation on real processes: the bits of the virtual world, and of a run that was not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polytempo import collectives, strategies
from polytempo.cluster import one_host
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.jobs import find
from polytempo.runs.simulated.simulate import simulate
from polytempo.training.trainer import Trainer

pytestmark = pytest.mark.process

INNER = strategies.local_sgd(period=3, route=collectives.ring)
STRATEGY = strategies.codistillation(groups=2, period=4, burn_in=6, inner=INNER)


def on_processes(workers: int, **options: Any) -> list[dict[str, Any]]:
    """The last words of each real rank."""

    def work(rank_info: RankInfo) -> dict[str, Any]:
        return Trainer(find("digits"), STRATEGY, world=init(quiet=True), **options).fit().as_json()

    return launch(work, workers, threads=1)


def test_two_groups_of_two_reach_the_bits_of_the_virtual_world() -> None:
    real = on_processes(4, steps=15)[0]
    virtual = simulate(find("digits"), STRATEGY, 4, one_host(), steps=15, threads=1).as_json()
    for figure in ("parameters_sha256", "loss", "accuracy", "steps", "samples", "bytes_sent_per_rank"):
        assert real[figure] == virtual[figure], figure


def test_a_stopped_run_goes_on_with_the_models_that_groups_had_of_each_other(tmp_path: Path) -> None:
    """Stopped between two exchanges: at step 11, of models of step 10."""
    whole = on_processes(2, steps=15)[0]
    on_processes(2, steps=11, checkpoint_every=11, out=tmp_path)
    resumed = on_processes(2, steps=15, out=tmp_path, resume=True)[0]
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
