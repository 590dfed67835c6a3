"""Horovod's timeline, autotuner, codecs and strategies on real processes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import polytempo.horovod.torch as hvd
from polytempo.horovod import run

pytestmark = pytest.mark.process

LOADED = (torch._dynamo,)
"""Slow to load: once here instead of once in every worker."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def loss(model: nn.Module, step: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + hvd.rank())
    return (model(torch.randn(6, 4, generator=random)) - torch.randn(6, 3, generator=random)).pow(2).mean()


def trained(steps: int, **options: Any) -> list[Tensor]:
    """The parameters after so many steps of `DistributedOptimizer`."""
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_timeline_shows_every_rank_and_changes_nothing(tmp_path: Path, size: int) -> None:
    """It is begun anew by the program, on all ranks or on rank 0 alone; the file is whole after each stop."""
    path = tmp_path / "timeline.json"

    def work() -> tuple[list[Tensor], list[Tensor], list[Any]]:
        with pytest.raises(ValueError, match=r"hvd\.init"):
            hvd.start_timeline(path)
        hvd.init()
        before = trained(3)
        hvd.start_timeline(path, mark_cycles=True)
        hvd.barrier()
        during = trained(3)
        hvd.broadcast(torch.ones(2), 0, name="sent")
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="refused")
        hvd.stop_timeline()
        seen = events(path) if hvd.rank() == 0 else []
        hvd.stop_timeline()
        if hvd.rank() == 0:
            hvd.start_timeline(path)
        hvd.allgather(torch.ones(1), name="again")
        hvd.shutdown()
        return before, during, seen

    found = run(work, np=size)
    for before, during, _ in found:
        torch.testing.assert_close(before, during, rtol=0, atol=0)
    seen = found[0][2]
    rows = {each["args"]["name"]: each["pid"] for each in seen if "name" in each.get("args", {})}
    assert {"allreduce.0.weight", "broadcast.sent", "allreduce.refused"} < set(rows)
    mine = [each for each in seen if each["pid"] == rows["allreduce.2.bias"] and each["ph"] != "M"]
    for turn in range(3):
        names = [each.get("name") for each in mine]
        start = [place for place, name in enumerate(names) if name == "NEGOTIATE_ALLREDUCE"][turn]
        ready = {each["name"] for each in mine[start + 1 : start + 1 + size]}
        assert ready == {str(rank) for rank in range(size)}
        assert names[start + size + 2] == "ALLREDUCE"
    depth = 0
    for each in mine:
        depth += {"B": 1, "E": -1}.get(each["ph"], 0)
        assert depth >= 0
    assert depth == 0
    assert {"SHARED_ALLREDUCE", "SHARED_BROADCAST", "CYCLE_START"} <= {each.get("name") for each in seen}
    refused = [each.get("name") for each in seen if each["pid"] == rows["allreduce.refused"] and each["ph"] == "B"]
    assert refused == ["NEGOTIATE_ALLREDUCE"]
    last = [each.get("name") for each in events(path)]
    assert "SHARED_ALLGATHER" in last
    assert "CYCLE_START" not in last


def test_a_timeline_and_an_autotuner_by_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings change while ranks submit in orders of their own; all results are right, and the log ends."""
    timeline, log = tmp_path / "timeline.json", tmp_path / "log.csv"
    for name, value in {
        "HOROVOD_TIMELINE": str(timeline),
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(log),
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "6",
    }.items():
        monkeypatch.setenv(name, value)

    def work() -> bool:
        hvd.init()
        for step in range(60):
            names = torch.randperm(8, generator=torch.Generator().manual_seed(10 * step + hvd.rank())).tolist()
            handles = {n: hvd.allreduce_async(torch.full((n + 1,), n + step), op=hvd.Sum, name=f"{n}") for n in names}
            for n, handle in handles.items():
                assert torch.equal(hvd.synchronize(handle), torch.full((n + 1,), 2 * (n + step)))
        return True

    assert run(work, np=2) == [True, True]
    assert "NEGOTIATE_ALLREDUCE" in {each.get("name") for each in events(timeline)}
    rows = list(csv.DictReader(log.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 7
    assert len({row["cycle_time_ms"] for row in rows}) > 3
    measured = [(row["cycle_time_ms"], row["score"]) for row in rows[:-1]]
    assert (rows[-1]["cycle_time_ms"], rows[-1]["score"]) in measured


def test_a_timeline_that_cannot_be_written_is_an_error_on_rank_0(tmp_path: Path) -> None:
    def work() -> str:
        hvd.init()
        try:
            hvd.start_timeline(tmp_path / "missing" / "t.json")
        except OSError as error:
            return str(error)
        return ""

    first, second = run(work, np=2)
    assert "missing" in first
    assert second == ""
