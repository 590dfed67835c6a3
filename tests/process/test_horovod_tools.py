"""Horovod's timeline, autotuner, codecs and strategies on real processes."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import polytempo as pt
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
    """The program begins it again, on all ranks or on rank 0 alone; the file is whole after each stop."""
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


# ---------------------------------------------------------------------- codecs

CODECS: dict[str, Any] = {
    **{name: getattr(hvd.Compression, name) for name in ("dynamic8", "exact", "int8", "natural", "one_bit", "sign")},
    "dgc": hvd.Compression.dgc(0.1, momentum=0.0),
    "feedback": hvd.Compression.feedback(hvd.Compression.top_k(0.2)),
    "pca": hvd.Compression.pca(rank=8),
    "prune": hvd.Compression.prune(below=0.1),
    "qsgd": hvd.Compression.qsgd(levels=127),
    "random_k": hvd.Compression.random_k(ratio=0.2),
    "terngrad": hvd.Compression.terngrad,
    "threshold": hvd.Compression.threshold(tau=4.0),
    "top_k": hvd.Compression.top_k(0.2),
    "bf16": hvd.Compression.bf16,
    "fp16": hvd.Compression.fp16,
}
ROUGH = {"natural": 0.1, "terngrad": 0.3, "bf16": 0.01, "fp16": 0.001, "qsgd": 0.1}
"""The error of the mean of 40 answers without a residual: random draws, and rounding."""


def descended(compression: Any, rows: int = 52, steps: int = 40) -> tuple[Tensor, Tensor]:
    """The mean of all steps' reduced gradients, with a constant gradient on each rank, and its right value."""
    weight = nn.Parameter(torch.zeros(rows, 20))
    mine = [torch.randn(rows, 20, generator=torch.Generator().manual_seed(rank)) for rank in range(hvd.size())]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1 / steps), [("weight", weight)], compression=compression
    )
    for _ in range(steps):
        optimizer.zero_grad()
        (weight * mine[hvd.rank()]).sum().backward()
        optimizer.step()
    return -weight.detach(), torch.stack(mine).mean(0)


FEW = ("int8", "one_bit", "dgc", "random_k", "terngrad", "bf16")


@pytest.mark.parametrize(("size", "chosen"), [(2, tuple(CODECS)), (4, FEW)])
def test_gradients_through_every_codec(size: int, chosen: Sequence[str]) -> None:
    """Ranks hold equal bits, and a codec's residual of one step is in the steps after it."""

    def work() -> dict[str, tuple[Tensor, float]]:
        hvd.init()
        answers = {}
        for name in chosen:
            found, expected = descended(CODECS[name])
            answers[name] = found, float((found - expected).norm() / expected.norm())
        few, expected = descended(hvd.Compression.one_bit, rows=2, steps=3)
        torch.testing.assert_close(few, expected)  # of so few elements no codec is made
        return answers

    found = run(work, np=size)
    assert set(CODECS) == {name for name in vars(hvd.Compression) if not name.startswith("_")} - {"none"}
    for name in chosen:
        assert all(torch.equal(answers[name][0], found[0][name][0]) for answers in found), name
        assert found[0][name][1] < (1e-6 if name == "exact" else ROUGH.get(name, 0.25)), (name, found[0][name][1])


def test_codecs_in_all_reduces_and_where_they_do_not_go() -> None:
    def work() -> bool:
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        mine = torch.randn(2000, generator=torch.Generator().manual_seed(rank))
        expected = sum(torch.randn(2000, generator=torch.Generator().manual_seed(r)) for r in range(size))
        int8 = hvd.Compression.int8
        for _ in range(2):
            answer = hvd.allreduce(mine, op=hvd.Sum, compression=int8, prescale_factor=2.0, postscale_factor=0.5)
            torch.testing.assert_close(answer, expected, rtol=0, atol=0.1)
        pair = hvd.grouped_allreduce([mine, torch.full((2,), rank)], compression=int8, name="pair", op=hvd.Sum)
        torch.testing.assert_close(pair[0], expected, rtol=0, atol=0.1)
        assert pair[1].tolist() == [sum(range(size))] * 2
        assert hvd.allreduce(torch.full((3,), rank), compression=int8, op=hvd.Max).tolist() == [size - 1] * 3
        at = mine.clone().requires_grad_()
        (hvd.allreduce(at, compression=int8) * (rank + 1)).sum().backward()
        torch.testing.assert_close(at.grad, torch.full((2000,), (size + 1) / 2))
        different = hvd.Compression.int8 if rank else hvd.Compression.top_k(0.5)
        with pytest.raises(hvd.HorovodInternalError, match=r"Mismatched codecs .* top_k\(ratio=0.5\), rank 1 int8"):
            hvd.allreduce(mine, compression=different, name="different")
        weight = nn.Parameter(torch.ones(3))
        heavy = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
        for words, call in {
            "has no later": lambda: hvd.allreduce(mine, compression=hvd.Compression.feedback(int8)),
            "not MAX": lambda: hvd.allreduce(mine, compression=int8, op=hvd.Max),
            "is for all-reduces": lambda: hvd.reducescatter(mine, compression=int8),
            "Average or Sum, not ADASUM": lambda: hvd.DistributedOptimizer(heavy, compression=int8, op=hvd.Adasum),
            "applies momentum 0.9 itself": lambda: hvd.DistributedOptimizer(heavy, compression=hvd.Compression.dgc),
        }.items():
            with pytest.raises(ValueError, match=words):
                call()
        with pytest.raises(TypeError, match="ratios"):
            hvd.Compression.top_k(ratios=2)
        if rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match=r"int8.* while ranks \[1\] have called join"):
                hvd.allreduce(mine, compression=int8, name="joined")
        hvd.join()
        return True

    assert run(work, np=2) == [True, True]


# ---------------------------------------------------------------------- strategies

STRATEGIES = (
    *("sync_sgd", "sync_sgd(route=ring)", "local_sgd(period=2)", "diloco(period=2, outer_momentum=0.5)", "gossip"),
    *("one_bit_sgd(exact_below=1)", "local_sgd(period=2, codec=int8)", "delayed_sgd", "adasum", "shared_memory"),
)


def looped(steps: int, make: Any, broadcasts: bool = False) -> list[Tensor]:
    """Training from other parameters on each rank, which rank 0's replace."""
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = make(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    if broadcasts:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        if broadcasts:
            optimizer.synchronize()
        with optimizer.skip_synchronize() if broadcasts else nullcontext():
            optimizer.step()
    answer = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.handle.detach()
    return answer


def attached(text: str) -> Any:
    def make(model: nn.Module, optimizer: Any) -> Any:
        optimizer.handle = pt.attach(model, optimizer, pt.parse_strategy(text))
        return optimizer

    return make


def by_strategy(strategy: Any) -> Any:
    return lambda model, optimizer: hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy=strategy)


@pytest.mark.parametrize("size", [2, 4])
def test_a_strategy_makes_the_steps_of_attach(size: int) -> None:
    def work() -> bool:
        hvd.init()
        for text in STRATEGIES:
            expected = looped(5, attached(text))
            for made in (looped(5, by_strategy(text)), looped(5, by_strategy(pt.parse_strategy(text)), True)):
                torch.testing.assert_close(
                    made, expected, rtol=0, atol=0, msg=lambda words, text=text: f"{text}: {words}"
                )
        return True

    assert run(work, np=size) == [True] * size


def test_what_does_not_go_with_a_strategy() -> None:
    def work() -> bool:
        model = net()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        make, named = hvd.DistributedOptimizer, list(model.named_parameters())
        with pytest.raises(ValueError, match=r"hvd\.init"):
            make(plain, named, strategy="sync_sgd")
        hvd.init()
        with pytest.raises(ValueError, match="compression, op, groups cannot be given"):
            make(plain, named, hvd.Compression.fp16, op=hvd.Sum, groups=2, strategy="sync_sgd")
        with pytest.raises(ValueError, match="named_parameters"):
            make(plain, strategy="sync_sgd")
        with pytest.raises(ValueError, match="no_such"):
            make(plain, named, strategy="no_such")
        with pytest.raises(TypeError, match="a strategy is"):
            make(plain, named, strategy=3)
        make(plain, named, strategy="sync_sgd")
        with pytest.raises(ValueError, match="already"):
            make(plain, named, strategy="sync_sgd")
        return True

    assert run(work, np=2) == [True, True]
