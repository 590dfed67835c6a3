"""Laws of `dp_sgd`: gradients of samples are clipped one by one, the noise's scale, and ε of the whole run.

Seeds are literals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from laws import test_private_rounds
from laws.test_federated import LR, SAMPLES, SEED, close, data, first, job, model, normed
from polytempo import federated as fed
from polytempo.compression import int8
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.core.strategy import SamplePrivacy
from polytempo.federated.sample_privacy import sample_epsilon
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.federated import sample_gradients
from polytempo.training.federated.sample_gradients import SampleGradients

accountant = test_private_rounds.accountant
WIDE = 1e9


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    sample_epsilon.cache_clear()


def trained(strategy: Strategy | str, steps: int = 3, **more: Any) -> list[Tensor]:
    given: dict[str, Any] = {"seed": SEED, "steps": steps} | more
    trainer = pt.Trainer(given.pop("job", job(batch_size=20)), strategy, **given)
    trainer.fit()
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def noiseless(inner: Strategy | None = None, clip: float = WIDE) -> Strategy:
    return fed.dp_sgd(inner, clip=clip, noise=0.0)


def by_hand(clip: float) -> tuple[dict[str, Tensor], float]:
    """Σ gᵢ min(1, S / ‖gᵢ‖) / n over all samples, one backward pass each, and the mean loss."""
    net, total, losses = first(), dict[str, Tensor](), 0.0
    for inputs, label in zip(*data().tensors, strict=True):
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs[None]), label[None])
        loss.backward()
        gradient = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradient.values()))
        for name, each in gradient.items():
            total[name] = total.get(name, 0) + each * min(1.0, clip / norm) / SAMPLES
        losses += float(loss.detach()) / SAMPLES
    return total, losses


@pytest.mark.parametrize("clip", [0.05, 0.4, 1.0])
@pytest.mark.parametrize("chunk_bytes", [1, 5000, 1 << 28])
def test_each_sample_is_clipped_by_its_norm(clip: float, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_gradients, "_MOST_BYTES", chunk_bytes)
    net, (expected, loss) = first(), by_hand(clip)
    found = SampleGradients(job(), net, SamplePrivacy(clip, 0.0, 1e-5), "dp_sgd").compute(list(data().tensors), 1)
    assert float(found) == pytest.approx(loss, abs=1e-12)
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)


def test_a_tied_weight_has_the_sum_of_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4, bias=False).double()
            self.down = nn.Linear(4, 4, bias=False).double()
            self.down.weight = self.up.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)))

    close(trained(noiseless(), job=job(model=Tied)), trained("sync_sgd", job=job(model=Tied)))


@pytest.mark.parametrize("workers", [1, 3])
def test_without_noise_and_clipping_it_is_plain_sgd(workers: int) -> None:
    close(trained(noiseless(), 7), trained("sync_sgd", 7))
    found = [
        pt.simulate(job(batch_size=7), each, workers=workers, seed=SEED, epochs=2)
        for each in (noiseless(), pt.strategies.sync_sgd())
    ]
    assert found[0].loss == pytest.approx(found[1].loss, abs=1e-12)


@pytest.mark.parametrize(
    "inner",
    [
        fed.fed_avg(3, 2, 4),
        fed.fed_prox(3, 0.5, 2, 4),
        fed.scaffold(3, 2, 4),
        fed.fed_rep(3, 1, 4),
        fed.secure(fed.fed_adam(3, 1, 4), 64, 40),
        fed.fed_coded(fed.fed_avg(3, 1, 4), int8()),
        fed.fed_buff(2, 3, batch_size=4),
    ],
    ids=lambda each: str(each).partition("(")[0],
)
def test_of_clients_without_noise_and_clipping_it_is_the_inner_strategy(inner: Strategy) -> None:
    strategy = noiseless(inner)
    assert str(parse_strategy(str(strategy))) == str(strategy)
    close(trained(strategy, clients="iid(6)"), trained(inner, clients="iid(6)"))


def flat() -> pt.Job:
    """A job of 1,000 parameters without a gradient: steps are by noise alone. Its test loss is Σ θ² / 4."""

    def make() -> nn.Module:
        net = nn.Linear(4, 250, bias=False).double()
        nn.init.zeros_(net.weight)
        return net

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return 0.0 * output.sum() if torch.is_grad_enabled() else output.square().sum() / len(output)

    test = TensorDataset(torch.eye(4, dtype=torch.float64), torch.zeros(4))
    return job(model=make, loss=loss, batch_size=SAMPLES, data=lambda path: pt.Data(data(), test))


def deviations(squares: float, scale: float, count: int = 1000) -> float:
    """The distance of a sum of squares from its mean, for numbers of N(0, scale²), in its deviations."""
    return abs(squares / scale**2 - count) / math.sqrt(2 * count)


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize(("clip", "noise"), [(0.5, 1.0), (0.2, 3.0)])
def test_the_noise_of_a_step_has_deviation_z_s_over_b(clip: float, noise: float) -> None:
    strategy = fed.dp_sgd(clip=clip, noise=noise)
    [alone] = trained(strategy, 1, job=flat())
    assert deviations(float(alone.square().sum()), LR * noise * clip / SAMPLES) < 4
    assert abs(float(alone.sum())) < 4 * math.sqrt(1000) * LR * noise * clip / SAMPLES
    [client] = trained(fed.dp_sgd(fed.fed_avg(1, 1, None), clip, noise), 1, job=flat(), clients="iid(6)")
    assert deviations(float(client.square().sum()), LR * noise * clip / (SAMPLES // 6)) < 4


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize(("workers", "size"), [(3, 20), (4, 16), (7, 10)])
def test_parts_of_the_noise_add_up_to_one(workers: int, size: int) -> None:
    """Equal parts; a smaller last one; and workers without a sample."""
    result = pt.simulate(flat(), fed.dp_sgd(clip=0.5, noise=2.0), workers=workers, batch_size=size, seed=SEED, steps=1)
    assert deviations(4 * (result.loss or 0.0), LR * 2.0 * 0.5 / SAMPLES) < 4


@pytest.mark.usefixtures("accountant")
def test_epsilon_after_a_resume_is_of_the_whole(tmp_path: Path) -> None:
    def run(folder: str, epochs: int, **more: Any) -> pt.Result:
        strategy = fed.dp_sgd(noise=2.0, delta=1e-4)
        own = job(batch_size=20)
        return pt.Trainer(own, strategy, seed=SEED, epochs=epochs, out=tmp_path / folder, **more).fit()

    whole, part = run("whole", 4), run("part", 2)
    resumed = run("part", 4, resume=True)
    assert part.metrics is not None
    assert part.metrics["epsilon"] == told(2)
    assert whole.metrics == resumed.metrics == {"epsilon": told(4), "delta": 1e-4}
    assert resumed.parameters_sha256 == whole.parameters_sha256
    rows = [json.loads(line) for line in (tmp_path / "part/metrics.jsonl").read_text().splitlines()]
    tests = {row["epoch"]: row["epsilon"] for row in rows if row["kind"] == "test"}
    assert tests[4] == told(4)
    assert tests[2] == told(2)


def told(passes: int) -> float:
    """The stand-in's answer after so many mechanisms of noise 2."""
    return passes + 2 / 1e6


@pytest.mark.usefixtures("accountant")
def test_epsilon_of_clients_is_of_the_one_that_trained_most(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(
        "polytempo.training.job.context.sample_epsilon", lambda privacy, passes: asked.append(passes) or 0.0
    )
    result = pt.Trainer(job(), fed.dp_sgd(fed.fed_avg(3, 2, 4), noise=2.0), seed=SEED, steps=5, clients="iid(6)").fit()
    cohorts = fed.Cohorts(fed.clients(data(), fed.iid(6), SEED), 3, SEED)
    drawn = [client for number in range(5) for client in cohorts.order(number).tolist()]
    assert asked[-1] == 2 * max(map(drawn.count, drawn))
    assert result.metrics == {"epsilon": 0.0, "delta": 1e-5}
    assert cohorts.most_turns(5) == max(map(drawn.count, drawn))
    assert cohorts.most_turns(1) == 1


@pytest.mark.parametrize(
    ("code", "attempt"),
    [
        ("PT2521", lambda: fed.dp_sgd(pt.strategies.local_sgd())),
        ("PT2521", lambda: fed.dp_sgd(pt.strategies.int8_sgd())),
        ("PT2521", lambda: fed.dp_sgd(pt.parse_strategy("sync_sgd(route=invariant)"))),
        ("PT2521", lambda: fed.dp_sgd(pt.strategies.downpour())),
        ("PT2521", lambda: fed.dp_sgd(fed.dp_sgd(noise=0.0))),
        ("PT2521", lambda: fed.dp_sgd(fed.q_fed_avg(3))),
        ("PT2521", lambda: fed.dp_sgd(fed.private(fed.fed_avg(3), noise=0.0))),
        ("PT2521", lambda: fed.private(noiseless(fed.fed_avg(3)), noise=0.0)),
        ("PT2540", lambda: pt.strategies.gpipe(2, inner=noiseless())),
        ("PT2540", lambda: pt.strategies.pipedream(2, inner=noiseless())),
        ("PT2541", lambda: pt.strategies.split({"0": "column"}, 2, inner=noiseless())),
        ("PT2541", lambda: pt.strategies.hybrid("0", inner=noiseless())),
        ("PT2522", lambda: trained(noiseless(), 1, job=job(model=normed))),
        ("PT2522", lambda: trained(noiseless(fed.fed_bn(3)), 1, job=job(model=normed), clients="iid(6)")),
        ("PT2523", lambda: pt.attach(net := model(), torch.optim.SGD(net.parameters(), 0.1), noiseless())),
        ("PT2524", lambda: trained(noiseless(), 1, accumulate=2)),
        ("PT2525", lambda: trained(noiseless(), 1, job=job(weight=lambda batch: 1.0))),
        ("PT2526", lambda: trained(noiseless(), 1, batch_growth={1: 2})),
        ("PT2527", lambda: trained(noiseless(), 1, precision="bf16")),
        ("PT2543", lambda: trained(noiseless(), 1, precision="autocast")),
        ("PT2528", lambda: pt.run(job(), noiseless(), workers=2, noise_scale=1, steps=1)),
        ("PT2529", lambda: pt.run(job(), noiseless(), workers=2, min_workers=1, steps=1)),
        ("PT2530", lambda: pt.run(job(), pt.then(pt.strategies.sync_sgd(), 1, noiseless()), workers=1, steps=1)),
        ("PT2531", lambda: pt.simulate(job(), noiseless(), workers=2, steps=1, batched=True)),
    ],
)
def test_refusals(code: str, attempt: Callable[[], object]) -> None:
    with pytest.raises(Incompatible) as refused:
        attempt()
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        (lambda: fed.dp_sgd(clip=0.0), "clip"),
        (lambda: fed.dp_sgd(clip=math.inf), "finite"),
        (lambda: fed.dp_sgd(noise=-1.0), "noise"),
        (lambda: fed.dp_sgd(delta=1.0), "delta"),
        (lambda: trained(noiseless(), 1, job=job(loss=nn.CrossEntropyLoss(reduction="sum"))), "sum"),
        (
            lambda: trained(noiseless(), 1, job=job(loss=lambda out, y: out.sum() if out.sum() > 0 else out.mean())),
            "vmap",
        ),
    ],
)
def test_mistakes(attempt: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        attempt()
