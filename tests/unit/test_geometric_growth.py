"""Dynamic sampling: batches at a geometric rate, and the linear rate of plain SGD on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.cli.options.command_options import given_options
from polytempo.data.shard import DataShard
from polytempo.jobs import find
from polytempo.spec.batch_growth import parse_growth
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.growth import GeometricGrowth

s = pt.strategies
SAMPLES, FIRST, MU, L = 16_384, 64, 0.25, 1.0
CURVES = torch.tensor([MU, 0.5, L], dtype=torch.float64)
"""The eigenvalues of the quadratic."""
CENTRES = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
BEGIN = 10.0


@pytest.mark.parametrize(
    ("first", "ratio", "most", "batches"),
    [
        (8, 1.1, 20, [8, 9, 10, 11, 13, 15, 17, 19, 20, 20]),
        (10, 1.1, 1000, [10, 11, 13, 15, 17, 19, 21, 24, 27, 30]),
        (4, 2.0, 100, [4, 8, 16, 32, 64, 100, 100]),
        (1, 1.5, 9, [1, 2, 3, 5, 8, 9, 9]),
    ],
)
def test_the_rule_as_a_table(first: int, ratio: float, most: int, batches: list[int]) -> None:
    rule, found = pt.training.geometric(ratio), [first]
    for _ in batches[1:]:
        found.append(min(rule.after(found[-1]), most))
    assert found == batches


def dealt(num_samples: int, size: int, rule: Any, steps: int, first: int = 4) -> list[int]:
    """The global batches of so many steps."""
    shard = DataShard(TensorDataset(torch.arange(num_samples)), rank=0, size=size, batch_size=first // size)
    growth, sizes, seen = GeometricGrowth(rule, shard), list[int](), 0
    batches = iter(shard)
    while len(sizes) < steps:
        try:
            for _ in shard.own:
                next(batches)
        except StopIteration:
            assert seen == num_samples, "each sample counts once an epoch"
            batches, seen = iter(shard), 0
            continue
        sizes.append(shard.global_samples)
        seen += sizes[-1]
        told = growth.grows(None, shard)  # type: ignore[arg-type]
        with pytest.raises(StopIteration) as ended:
            told.send(None)
        if ended.value.value:
            batches.close()  # type: ignore[attr-defined]
            batches = iter(shard)
    return sizes


@pytest.mark.parametrize(
    ("num_samples", "size", "rule", "sizes"),
    [
        # wanted: 4, 8, 16, 32, 64, 100, 100
        (100, 1, pt.training.geometric(2.0), [4, 8, 18, 35, 35, 100, 100]),
        (100, 2, pt.training.geometric(2.0), [4, 8, 18, 35, 35, 100, 100]),
        (100, 1, pt.training.geometric(2.0, every=2), [4, 4, 9, 9, 19, 19, 36, 34, 66, 100, 100]),
        (60, 1, pt.training.geometric(1.5), [4, 7, 10, 20, 19, 60, 60]),  # wanted: 4, 6, 9, 14, 21, 32, 48
    ],
)
def test_the_rest_of_an_epoch_comes_in_equal_batches(num_samples: int, size: int, rule: Any, sizes: list[int]) -> None:
    assert dealt(num_samples, size, rule, len(sizes)) == sizes


def test_a_batch_is_at_least_what_the_step_before_wanted() -> None:
    for num_samples in range(40, 400, 7):
        for ratio in (1.05, 1.3, 2.5):
            rule = pt.training.geometric(ratio)
            wanted = [4, 4]
            while len(wanted) < 40:
                wanted.append(min(rule.after(wanted[-1]), num_samples))
            sizes = dealt(num_samples, 2, rule, 39)
            assert all(batch >= least for batch, least in zip(sizes, wanted, strict=False)), (num_samples, ratio)
            assert sizes[-1] == num_samples or wanted[-1] <= num_samples / 2


class Point(nn.Module):
    """x; the loss of sample c is ½ (x - c)ᵀ H (x - c)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((3,), BEGIN, dtype=torch.float64))

    def forward(self, centres: Tensor) -> Tensor:
        """(batch, 3) -> (batch,)"""
        return 0.5 * ((self.x - centres) ** 2 * CURVES).sum(1)


def gap(x: Tensor) -> float:
    """f(x) - f*"""
    return float(0.5 * ((x - CENTRES.mean(0)) ** 2 * CURVES).sum())


class Descent(NamedTuple):
    gaps: list[float]
    """f - f* before each step."""
    batches: list[int]


def descent(steps: int, seed: int, **options: Any) -> Descent:
    gaps, batches = list[float](), list[int]()

    def watched(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr)
        x = optimizer.param_groups[0]["params"][0]
        optimizer.register_step_pre_hook(lambda o, a, k: gaps.append(gap(x.detach())))
        return optimizer

    made = pt.Job(
        model=Point,
        data=lambda folder: pt.Data(TensorDataset(CENTRES, torch.zeros(SAMPLES))),
        loss=lambda output, target: output.mean(),
        optimizer=watched,
        batch_size=FIRST,
        lr=1 / L,
        epochs=steps,
    )
    trainer = pt.Trainer(made, steps=steps, seed=seed, **options)
    begun = trainer.context.take_step

    async def counted(*given: Any) -> Any:
        batches.append(trainer.context.shard.global_samples)
        return await begun(*given)

    trainer.context.take_step = counted
    trainer.fit()
    return Descent(gaps, batches)


def bound(batches: list[int], most: int | None = None) -> list[float]:
    """E (f(x_k) - f*) ≤ q^k gap₀ + Σ q^(k-1-i) E ‖eᵢ‖² / 2L, q = 1 - μ/L, E ‖e‖² = (N - b) / (N b) S²."""
    variance = float(((CENTRES - CENTRES.mean(0)) * CURVES).square().sum() / (SAMPLES - 1))
    bounds = [gap(torch.full((3,), BEGIN, dtype=torch.float64))]
    for b in batches[:-1]:
        bounds.append((1 - MU / L) * bounds[-1] + (SAMPLES - b) / (SAMPLES * b) * variance / (2 * L))
    return bounds


STEPS = 40


def test_the_gap_falls_at_the_theorem_s_linear_rate_and_stalls_with_a_constant_batch() -> None:
    """γ = 4/3 is 1 / (1 - μ/L): the errors fall as the gap does with all samples. Means of four seeds."""
    grown = [descent(STEPS, seed, batch_growth=pt.training.geometric(4 / 3)) for seed in range(4)]
    still = [descent(STEPS, seed) for seed in range(4)]
    mean = [sum(each.gaps[k] for each in grown) / 4 for k in range(STEPS)]
    stalled = [sum(each.gaps[k] for each in still) / 4 for k in range(STEPS)]
    limits = bound(grown[0].batches)
    assert all(found <= limit for found, limit in zip(mean, limits, strict=True))
    linear = [gap(torch.full((3,), BEGIN, dtype=torch.float64)) * (1 - MU / L) ** k for k in range(STEPS)]
    assert all(found <= 2 * line for found, line in zip(mean, linear, strict=True))
    constant = bound(still[0].batches)[-1]
    assert constant / 20 < stalled[-1] <= constant, "a constant batch stalls where its errors are"
    assert stalled[-1] > 0.3 * stalled[STEPS // 2]
    assert stalled[-1] > 100 * mean[-1]
    assert grown[0].batches[-1] == SAMPLES


def batches_of(out: Path) -> list[int]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["global_batch_size"] for row in rows if row["kind"] == "train"]


@pytest.mark.process
def test_both_worlds_have_the_same_batches_and_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "batch_growth": "geometric(1.2, every=2)", "seed": 3}
    job, strategy = find("digits"), s.sync_sgd(route=pt.collectives.ring)
    virtual = pt.simulate(job, strategy, 2, out=tmp_path / "virtual", **options)
    real = pt.run(job, strategy, 2, out=tmp_path / "real", threads=1, **options)
    assert (real.steps, real.samples) == (virtual.steps, virtual.samples)
    assert real.parameters_sha256 == virtual.parameters_sha256
    found = batches_of(tmp_path / "virtual")
    assert batches_of(tmp_path / "real") == found
    assert found[0] < found[-1]


def test_any_number_of_workers_has_the_same_batches() -> None:
    options: dict[str, Any] = {"global_batch_size": 16, "epochs": 2, "batch_growth": "geometric(1.2, every=2)"}
    found = [pt.simulate(find("digits"), s.sync_sgd(), workers, **options) for workers in (1, 2, 4)]
    assert len({(each.steps, each.samples) for each in found}) == 1
    assert found[0].samples == 2 * 1437


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.top_k_sgd(0.1), s.local_sgd(period=3)], ids=str)
def test_it_grows_with_any_strategy_whose_workers_meet(strategy: pt.Strategy) -> None:
    result = pt.simulate(find("digits"), strategy, 2, epochs=1, batch_growth=pt.training.geometric(2.0))
    assert result.samples == 1437
    assert result.steps < 20


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_growth": pt.training.geometric(1.3, every=3), "batch_size": 8}
    whole = pt.Trainer(find("digits"), steps=40, **options).fit()
    pt.Trainer(find("digits"), steps=25, checkpoint_every=25, out=tmp_path, **options).fit()
    resumed = pt.Trainer(find("digits"), steps=40, resume=True, out=tmp_path, **options).fit()
    assert resumed.parameters_sha256 == whole.parameters_sha256
    assert resumed.samples == whole.samples


def test_the_rule_as_text_and_its_refusals() -> None:
    assert parse_growth("geometric(1.5)") == pt.training.geometric(ratio=1.5)
    assert parse_growth(str(pt.training.geometric(1.25, every=3))) == pt.training.geometric(1.25, every=3)
    assert given_options({"batch_growth": "geometric(1.5)"}).run["batch_growth"] == pt.training.geometric(1.5)
    there = RunSpec.of(find("digits"), s.sync_sgd(), 2, pt.RunOptions(batch_growth="geometric(1.5, every=2)"))
    assert RunSpec.from_json(there.to_json(), find).options.batch_growth == pt.training.geometric(1.5, every=2)
    for wrong in ("geometric(1)", "geometric(0.5)", "geometric(inf)", "geometric(2, every=0)"):
        with pytest.raises(ValueError, match="ratio is a finite number above 1 and every at least 1"):
            pt.RunOptions(batch_growth=wrong)


@pytest.mark.parametrize(
    ("strategy", "code"),
    [(s.downpour(), "PT1511"), (s.gpipe(stages=2, micro_batches=2), "PT1513"), (s.hogwild(), "PT1514")],
    ids=str,
)
def test_what_cannot_grow_is_refused(strategy: pt.Strategy, code: str) -> None:
    with pytest.raises(ValueError, match=code):
        pt.simulate(find("digits"), strategy, 2, batch_growth=pt.training.geometric())


def test_an_elastic_run_is_refused() -> None:
    with pytest.raises(ValueError, match="PT1525"):
        RunSpec.of(find("digits"), s.sync_sgd(), 1, pt.RunOptions(batch_growth=pt.training.geometric(), max_workers=2))
