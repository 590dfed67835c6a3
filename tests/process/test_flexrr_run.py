"""FlexRR on real processes: one worker has more to compute than the others."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import Value
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polytempo import strategies
from polytempo.jobs import find
from polytempo.report.status.rows import read_metrics
from polytempo.runs.run import run
from polytempo.runs.served.served_run import ServedOutcome, ServedRun
from polytempo.spec.result import Result
from slices import verdicts

DIGITS = find("digits")
_TIMES = 60


class Repeated(nn.Module):
    """Computes its output so many times."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, inputs: Tensor) -> Tensor:
        """The output."""
        with torch.no_grad():
            for _ in range(self.times - 1):
                self.inner(inputs)
        output: Tensor = self.inner(inputs)
        return output


def test_a_worker_with_more_to_compute_is_helped_and_every_sample_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models, runs = Value("i", 0), list[ServedRun]()
    result_of = ServedRun.result

    def model() -> nn.Module:
        """The launcher makes the first one, and the first of the workers the second."""
        with models.get_lock():
            models.value += 1
            return Repeated(DIGITS.model(), _TIMES if models.value == 2 else 1)

    def spy(self: ServedRun, outcome: ServedOutcome) -> Result:
        runs.append(self)
        return result_of(self, outcome)

    monkeypatch.setattr(ServedRun, "result", spy)
    strategy = strategies.flexrr(grain=0.125, first_offer=0.125, later_offers=0.25, shards=2)
    result = run(replace(DIGITS, model=model), strategy, workers=3, epochs=1)

    assert result.server is not None
    workers: list[dict[str, Any]] = result.server["workers"]
    assert sum(worker["slices_helped"] for worker in workers) > 0
    assert sum(worker["slices_given"] for worker in workers) > 0
    assert result.server["refused"] == 0
    assert result.accuracy is not None
    assert result.accuracy > 0.5
    (epoch,) = verdicts(strategy, runs[0].program.batches, runs[0].coordinator.statistics)
    assert epoch.exact, str(epoch)


@pytest.mark.parametrize("bound", [0, 1])
def test_a_resumed_run_trains_what_is_left(bound: int, tmp_path: Path) -> None:
    """Shards know slices, and the scheduler batches: applied slices must not be taken for batches."""
    strategy = strategies.flexrr(grain=0.125, first_offer=0.125, later_offers=0.25, shards=2, bound=bound)
    once = run(DIGITS, strategy, workers=2, epochs=1, out=tmp_path, threads=1)
    twice = run(DIGITS, strategy, workers=2, epochs=2, out=tmp_path, threads=1, resume=True)
    assert twice.samples == 2 * once.samples
    scores = [row for row in read_metrics(tmp_path) if row["kind"] == "test"]
    assert [row["samples"] for row in scores] == [once.samples, 2 * once.samples]
    assert twice.parameters_sha256 != once.parameters_sha256
