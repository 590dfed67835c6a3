"""`pt.log` in a simulation: a call of one virtual rank is never another one's, also behind an exchange or a wait."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.jobs import find
from polytempo.report.status.records import Logged
from polytempo.report.status.stream import stream

s = pt.strategies


@pytest.mark.parametrize(
    "strategy", [s.sync_sgd(), s.local_sgd(period=2), s.shared_memory(), s.async_sgd(), s.ssp()], ids=str
)
def test_logged_numbers_are_those_of_the_rank_that_writes(strategy: pt.Strategy, tmp_path: Path) -> None:
    """Rank 0 writes; with a parameter server each worker. All have three micro-batches in a step."""
    losses: dict[int, list[float]] = defaultdict(list)
    kept: list[nn.Module] = []  # so that no id comes again

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if torch.is_grad_enabled():
            kept.append(model)
            losses[id(model)].append(found.item())
            pt.log(own=found)
        return found

    job = replace(find("digits"), loss=pt.of_batch(loss), correct=None)
    pt.simulate(job, strategy, 3, steps=3, accumulate=3, out=tmp_path)
    logged: dict[int | None, list[float]] = defaultdict(list)
    for record in stream(tmp_path):
        if isinstance(record, Logged):
            logged[record.worker].append(record.values["own"])
    assert set(logged) == ({None} if strategy.server is None else {0, 1, 2})
    for numbers in logged.values():
        assert len(numbers) == 9
        assert any(own[-9:] == numbers for own in losses.values()), "they are not of one rank"


@pytest.mark.parametrize("strategy", [s.gpipe(stages=2), s.ddg(stages=2)], ids=lambda strategy: strategy.schedule.name)
def test_a_stage_that_does_not_write_says_so(
    strategy: pt.Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last stage has the loss, and rank 0, which writes, has the first."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(output, target)
        pt.log(own=found)
        return found

    pt.simulate(replace(find("digits"), loss=loss), strategy, 2, steps=3, out=tmp_path)
    assert not [record for record in stream(tmp_path) if isinstance(record, Logged)]
    assert capsys.readouterr().err.count("note: pt.log on stage 1 is not written") == 1
