"""The gradient noise scale: its estimators against Gaussians with known noise, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.large_batch import NoiseScale, Squares, of_workers, sketch, speed_up, squares
from polytempo.report.pages.noise import last_noise, noise_curves, noise_of
from polytempo.report.runs import RunRecord
from polytempo.training.step import noise_watch

s = pt.strategies
DIMS = 3000


def test_equal_batches_give_the_paper_s_two_estimates() -> None:
    """One worker's batch, and all workers' together."""
    gradients = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    norms = gradients.square().sum(1).tolist()
    found = of_workers([8] * 4, norms, gradients)
    known = squares(sum(norms) / 4, 8, float(gradients.mean(0).square().sum()), 32)
    assert found.of_gradient == pytest.approx(known.of_gradient, rel=1e-12)
    assert found.of_noise == pytest.approx(known.of_noise, rel=1e-12)


@pytest.mark.parametrize("samples", [[4, 4, 4, 4], [2, 4, 8, 16]], ids=["even", "uneven"])
def test_sketches_of_synthetic_gaussians_give_the_noise_scale_within_3_percent(samples: list[int]) -> None:
    """|G|² = 1 and tr Σ = 40, so the noise scale is 40 samples; seed 0."""
    drawn = torch.Generator().manual_seed(0)
    truth = torch.randn(DIMS, generator=drawn)
    truth /= truth.norm()
    spread = math.sqrt(40 / DIMS)
    noise = NoiseScale(keeps=0.9995)
    for step in range(400):
        rows = [truth + spread / math.sqrt(b) * torch.randn(DIMS, generator=drawn) for b in samples]
        norms = [float(row.square().sum()) for row in rows]
        noise.add(of_workers(samples, norms, torch.stack([sketch(row, seed=step) for row in rows])))
    assert noise.mean.of_noise == pytest.approx(40, rel=0.03)
    assert noise.simple == pytest.approx(40, rel=0.03)


@pytest.mark.parametrize("shape", [(7,), (1024,), (3, 700), (300, 1100)], ids=str)
def test_a_sketch_keeps_inner_products_on_average(shape: tuple[int, ...]) -> None:
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(shape, generator=drawn), torch.randn(shape, generator=drawn) + 0.5
    alike = torch.ones(shape)  # rows that are all the same: signs of places tell them apart
    for a, b in ((x, y), (alike, alike)):
        found = [float(sketch(a, seed) @ sketch(b, seed)) for seed in range(60)]
        deviation = math.sqrt(2 / 1024 / 60) * float(a.norm() * b.norm())
        assert abs(sum(found) / 60 - float((a * b).sum())) < 4 * deviation


def test_a_sketch_is_linear_and_one_map_for_each_seed() -> None:
    a, b = torch.randn(2, 5000, dtype=torch.float64)
    assert torch.allclose(sketch(a + 2 * b, 5), sketch(a, 5) + 2 * sketch(b, 5))
    assert not torch.equal(sketch(a, 5), sketch(a, 6))


def test_too_few_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two workers with samples, got batches of \[8, 0\]"):
        of_workers([8, 0], [1.0, 1.0], torch.ones(2, 3))


def job(**more: Any) -> pt.Job:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return pt.Job(
        **{
            "model": lambda: nn.Linear(3, 1),
            "data": lambda folder: pt.Data(TensorDataset(x, x.sum(1, keepdim=True))),
            "loss": nn.functional.mse_loss,
            "optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
            "batch_size": 4,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("strategy", "workers", "more", "said"),
    [
        (s.sync_sgd(), 1, {}, "PT1506"),
        (s.gpipe(stages=2, micro_batches=2), 2, {}, "PT1501"),
        (s.sync_sgd(route=pt.collectives.invariant(4)), 2, {}, "PT1503"),
        (s.hogwild(), 2, {}, "PT1504"),
        (s.flexrr(), 3, {}, "PT1505"),
        (s.downpour(), 2, {"batch_size": 2}, "batch_size is 2; give 3 or more"),
        (s.sync_sgd(), 2, {"meta": True, "steps": 2}, "PT1317"),
        (s.gossip(), 4, {}, r"of gossip\(graph=ring_graph, period=1\) differ after every step"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    strategy: pt.Strategy, workers: int, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        pt.simulate(job(), strategy, workers, noise_scale=1, epochs=None if "meta" in more else 1, **more)


def test_an_elastic_run_is_refused() -> None:
    with pytest.raises(ValueError, match="PT1507"):
        pt.run(job(), s.sync_sgd(), 2, noise_scale=4, min_workers=1)


def test_a_batch_without_a_row_for_each_sample_is_refused() -> None:
    bare = job(
        data=lambda folder: pt.Data(TensorDataset(torch.ones(24, 3)), collate=lambda samples: torch.ones(3)),
        loss=pt.of_batch(lambda model, batch: model(batch).sum()),
    )
    with pytest.raises(ValueError, match=r"holds float32 \(3,\), which has no row for each"):
        pt.simulate(bare, s.downpour(), 2, noise_scale=1, epochs=1)


def row(samples: int, square: float, trace: float, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "samples": samples, "gradient_square": square, "noise_trace": trace, **more}


def test_workers_are_added_up_before_they_are_divided() -> None:
    rows = [row(1, 1.0, 8.0, worker=0), row(2, 3.0, 8.0, worker=1), row(3, 1.0, 12.0, worker=0), {"kind": "train"}]
    assert last_noise(rows) == pytest.approx(20 / 4)
    assert noise_of([row(1, -1.0, 8.0)]) is None


def test_the_page_draws_the_noise_scale_and_the_samples_of_a_step() -> None:
    result = {"world": "virtual", "strategy": "sync_sgd()", "steps": 10, "samples": 640, "workers": 4}
    drawn = noise_curves([RunRecord(result, [row(64, 1.0, 32.0), row(640, 1.0, 64.0)], [])])
    assert drawn is not None
    assert [(line["x"], line["y"]) for line in drawn.data] == [([64.0, 640.0], [32.0, 64.0]), ([64.0, 640.0], [64, 64])]
    assert noise_curves([RunRecord(result, [{"kind": "train", "samples": 64}], [])]) is None


def test_the_noise_scale_of_a_gaussian_is_found_within_3_percent() -> None:
    """Gradients G + noise of variance Σ, over 4 workers of 8 samples: B_simple = tr Σ / |G|²."""
    drawn = torch.Generator().manual_seed(3)
    true = torch.linspace(-1, 1, 200, dtype=torch.float64)
    deviations = torch.linspace(0.5, 3, 200, dtype=torch.float64)
    expected = float((deviations**2).sum() / (true**2).sum())
    found = NoiseScale(keeps=0.999)
    for _ in range(2000):
        noise = torch.randn(4, 200, generator=drawn, dtype=torch.float64) * deviations / math.sqrt(8)
        local = true + noise
        small = float((local**2).sum(1).mean())
        found.add(squares(small, 8, float((local.mean(0) ** 2).sum()), 32))
    assert found.simple == pytest.approx(expected, rel=0.03)


def test_means_are_divided_not_averaged() -> None:
    """One step without the gradient does not spoil the other steps' findings."""
    found = NoiseScale(keeps=0.5)
    for step in (Squares(1.0, 10.0), Squares(-0.25, 10.0), Squares(1.0, 10.0)):
        found.add(step)
    of_gradient = (0.125 * 1.0 - 0.25 * 0.25 + 0.5 * 1.0) / 0.875
    assert found.mean == pytest.approx((of_gradient, 10.0))
    assert found.simple == pytest.approx(10.0 / of_gradient)
    found.add(Squares(-100.0, 10.0))
    assert found.simple == math.inf


def test_noise_scale_refuses_what_it_cannot_know() -> None:
    with pytest.raises(ValueError, match="got 8 and 8 samples"):
        squares(1.0, 8, 1.0, 8)
    with pytest.raises(ValueError, match="no step has been added"):
        _ = NoiseScale().simple
    with pytest.raises(ValueError, match="at least 0 and below 1, got 1"):
        NoiseScale(keeps=1)
    with pytest.raises(ValueError, match="are positive, got 0 and 100"):
        speed_up(0, 100)


def test_a_batch_of_the_noise_scale_takes_twice_the_fewest_steps() -> None:
    assert speed_up(1e12, 100) / speed_up(100, 100) == pytest.approx(2)
    assert speed_up(1, 100) == 1
    assert speed_up(64, math.inf) == 64, "what noise hides wants any batch"


def embedding_job(*, sparse: bool) -> pt.Job:
    """Rows of a table that some samples have, summed; a step of two workers touches some of them."""
    drawn = torch.Generator().manual_seed(0)
    words, y = torch.randint(0, 40, (120, 3), generator=drawn), torch.randn(120, 1, generator=drawn)
    return pt.Job(
        model=lambda: nn.Sequential(nn.EmbeddingBag(40, 5, mode="sum", sparse=sparse), nn.Linear(5, 1)),
        data=lambda folder: pt.Data(TensorDataset(words, y)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=4,
        lr=0.05,
        epochs=1,
    )


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.local_sgd(period=2), s.top_k_sgd(0.1)], ids=str)
def test_sparse_tables_have_the_noise_scale_of_dense_ones(
    strategy: pt.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients travel as rows, of other rows on each worker. Whole vectors stand in for sketches of them."""

    def whole(vector: Tensor, seed: int) -> Tensor:
        begin = 300 * (seed & 0xFFF)  # of this bucket
        return nn.functional.pad(vector.double().reshape(-1), (begin, 1500 - begin - vector.numel()))

    monkeypatch.setattr(noise_watch, "sketch", whole)
    found: list[list[Squares]] = [[], []]
    take = NoiseScale.add
    for sparse in (True, False):
        monkeypatch.setattr(
            NoiseScale, "add", lambda self, each, seen=found[sparse]: (seen.append(each), take(self, each))[1]
        )
        pt.simulate(embedding_job(sparse=sparse), strategy, 2, noise_scale=2)
    assert len(found[0]) >= 10
    for dense, rows in zip(*found, strict=True):
        assert rows == pytest.approx(dense, rel=1e-4, abs=1e-4)
