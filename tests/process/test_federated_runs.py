"""Federated runs on real processes: the simulation's bits, also when broken off and resumed with other workers."""

from __future__ import annotations

from pathlib import Path

import pytest

import polytempo as pt
from laws.test_federated import SEED, job, simulated
from polytempo import federated as fed

pytestmark = pytest.mark.process
CLIENTS = "by_size(6, sigma=0.7)"


@pytest.mark.parametrize("strategy", [fed.fed_adam(4, batch_size=4), fed.scaffold(4, batch_size=4)], ids=str)
def test_a_run_that_goes_on_with_another_number_of_workers(strategy: pt.Strategy, tmp_path: Path) -> None:
    def run(workers: int, steps: int, *, resume: bool) -> pt.Result:
        return pt.run(
            job(), strategy, workers, steps=steps, seed=SEED, clients=CLIENTS, threads=1, out=tmp_path, resume=resume
        )

    run(2, 3, resume=False)
    found = run(3, 6, resume=True)
    assert found.parameters_sha256 == simulated(strategy, 6)["hash"]
    assert (found.steps, found.epochs, found.samples) == (6, 6.0, 24)
