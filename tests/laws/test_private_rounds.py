"""Laws of `private`: clipping, the noise's scale, cohorts, and ε of the whole run. Seeds are literals."""

from __future__ import annotations

import json
import math
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy.stats import poisson
from torch import Tensor
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo import federated as fed
from polytempo.core.calls.refusals import Incompatible
from polytempo.core.strategy import InRounds, Privacy
from polytempo.federated.clients import Cohorts
from polytempo.federated.privacy import add_noise_, clip_, epsilon, gaussian_like, noise_source
from polytempo.spec.text.catalogue import parse_strategy

CLIENTS, WIDTH, LR = 40, 50, 0.1


def job(gradient: float = 1.0) -> pt.Job:
    """The loss g Σ θ: every client moves by lr g along every parameter, and starts from 0."""

    def model() -> torch.nn.Module:
        net = torch.nn.Linear(WIDTH, 20, bias=False).double()
        torch.nn.init.zeros_(net.weight)
        return net

    rows = TensorDataset(torch.eye(WIDTH, dtype=torch.float64)[torch.arange(CLIENTS) % WIDTH], torch.zeros(CLIENTS))
    return pt.Job(
        model=model,
        data=lambda path: pt.Data(rows, rows),
        loss=lambda output, target: (gradient * output).sum(),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=LR,
    )


@pytest.fixture
def accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for dp-accounting: its ε is the rounds that it was asked for, and a little of q and z."""

    class Accountant:
        def compose(self, event: Any, count: int) -> None:
            self.told = event, count

        def get_epsilon(self, delta: float) -> float:
            event, count = self.told
            probability, noise = event if isinstance(event, tuple) else (0.0, event)
            return count + probability / 1000 + noise / 1e6

    def stub(name: str, **content: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(__import__("sys").modules, name, module)

    stub("dp_accounting", PoissonSampledDpEvent=lambda q, of: (q, of), GaussianDpEvent=float)
    stub("dp_accounting.rdp", RdpAccountant=Accountant)
    epsilon.cache_clear()


def trained(strategy: str, steps: int = 1, **more: Any) -> Tensor:
    trainer = pt.Trainer(job(more.pop("gradient", 1.0)), strategy, steps=steps, clients="iid(40)", seed=3, **more)
    trainer.fit()
    [weight] = trainer.model.parameters()
    return weight.detach()


def test_a_movement_is_scaled_to_the_norm_and_a_shorter_one_is_kept() -> None:
    movement = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    clip_(movement, 1.0)
    torch.testing.assert_close(movement, [torch.tensor([0.6, 0.0]), torch.tensor([[0.8]])])
    kept = [each.clone() for each in movement]
    clip_(movement, 2.0)
    assert all(torch.equal(one, other) for one, other in zip(movement, kept, strict=True))
    clip_([torch.zeros(3)], 1.0)


def test_without_noise_a_round_is_the_sum_of_clipped_movements_over_the_expected_cohort() -> None:
    """A client moves by lr on the 20 weights of its input: norm 0.1 √20."""
    drawn = Cohorts(fed.clients(job().data("").train, fed.iid(CLIENTS), 3), 40, 3, expected=8).order(0)
    taken = int((drawn < CLIENTS).sum())
    weight = trained("private(fed_avg(cohort=8), clip=0.2, noise=0.0)")
    assert float(weight.sum()) == pytest.approx(-taken / 8 * 20 * 0.2 / math.sqrt(20))
    wide = trained("private(fed_avg(cohort=8), clip=9.0, noise=0.0)")
    assert float(wide.sum()) == pytest.approx(-taken / 8 * 20 * 0.1)


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize(("clip", "noise"), [(0.5, 1.0), (0.2, 3.0)])
def test_the_noise_of_a_round_has_deviation_z_s_over_m(clip: float, noise: float) -> None:
    told = trained(f"private(fed_avg(cohort=8), clip={clip}, noise={noise})", gradient=0.0)
    squares = float(told.square().sum()) / (noise * clip / 8) ** 2
    assert abs(squares - told.numel()) < 4 * math.sqrt(2 * told.numel())
    assert abs(float(told.sum())) / (noise * clip / 8) < 4 * math.sqrt(told.numel())


def test_noise_of_known_scale() -> None:
    part = [torch.zeros(20_000), torch.zeros(100, 100)]
    add_noise_(part, Privacy(clip=2.0, noise=1.5, delta=1e-5, cohort=6), noise_source(1))
    for each in part:
        assert float(each.std()) == pytest.approx(0.5, rel=0.03)


def test_all_of_a_secret_draws_its_noise() -> None:
    """torch's generator on the CPU takes 32 bits of a seed, which a server could try one by one."""
    like = torch.zeros(5)
    first, others = gaussian_like(like, noise_source(3, 1)), [noise_source(3 + (1 << 100), 1), noise_source(3, 2)]
    assert torch.equal(gaussian_like(like, noise_source(3, 1)), first)
    assert not any(torch.equal(gaussian_like(like, other), first) for other in others)


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize("inner", ["fed_prox", "fed_adam"])
def test_the_bits_do_not_depend_on_the_number_of_workers(inner: str) -> None:
    strategy = parse_strategy(f"private({inner}(cohort=6), clip=0.3, noise=0.7)")
    assert str(parse_strategy(str(strategy))) == str(strategy)
    found = [
        pt.simulate(job(), strategy, workers=n, clients="iid(40)", seed=3, steps=3).parameters_sha256 for n in (1, 3)
    ]
    assert len(set(found)) == 1


@pytest.mark.usefixtures("accountant")
def test_epsilon_after_a_resume_is_of_the_whole(tmp_path: Path) -> None:
    def run(folder: str, steps: int, **more: Any) -> pt.Result:
        given = {"clients": "iid(40)", "seed": 3, "out": tmp_path / folder}
        strategy = fed.private(fed.fed_avg(cohort=10), noise=2.0, delta=1e-4)
        return pt.Trainer(job(), strategy, steps=steps, **given, **more).fit()

    whole = run("whole", 4)
    run("part", 2, checkpoint_every=2)
    resumed = run("part", 4, resume=True)
    expected = {"epsilon": 4 + 0.25 / 1000 + 2 / 1e6, "delta": 1e-4}
    assert resumed.metrics == whole.metrics == pytest.approx(expected)
    assert resumed.parameters_sha256 == whole.parameters_sha256
    last = (tmp_path / "part" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["epsilon"] == resumed.metrics["epsilon"]


def test_each_client_takes_part_by_the_same_probability() -> None:
    drawn = Cohorts(fed.clients(job().data("").train, fed.iid(CLIENTS)), 40, seed=1, expected=10)
    counts, sizes = torch.zeros(CLIENTS), []
    for number in range(400):
        order = drawn.order(number)
        assert len(set(order.tolist())) == 40
        taken = order[order < CLIENTS]
        counts[taken] += 1
        sizes.append(float(len(taken)))
    assert float(((counts - 100) ** 2 / 75).sum()) < 40 + 4 * math.sqrt(80)
    found = torch.tensor(sizes)
    assert abs(float(found.mean()) - 10) < 4 * math.sqrt(7.5 / 400)
    assert float(found.var()) == pytest.approx(7.5, rel=0.3)
    nobody = drawn[CLIENTS + 3]
    assert len(nobody) == 0


def test_noise_without_the_accountant_is_refused() -> None:
    with pytest.raises(Incompatible, match="PT2513"):
        pt.run(job(), fed.private(fed.fed_avg(cohort=4)), workers=1, steps=1, clients="iid(40)")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: fed.private(fed.fed_nova(cohort=4)), "fed_nova"),
        (lambda: fed.private(pt.strategies.sync_sgd()), "sync_sgd"),
        (lambda: fed.private(fed.private(fed.fed_avg(cohort=4))), "private"),
        (lambda: fed.private(fed.fed_avg(), clip=0.0), "clip"),
        (lambda: fed.private(fed.fed_avg(), noise=-1.0), "noise"),
        (lambda: fed.private(fed.fed_avg(), delta=1.0), "delta"),
    ],
)
def test_impossible_ones_are_refused_when_they_are_made(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_more_expected_than_there_are() -> None:
    with pytest.raises(ValueError, match="a round of 41 clients"):
        trained("private(fed_avg(cohort=41), noise=0.0)")


def test_clients_by_another_sampling_are_refused() -> None:
    rows = fed.clients(job().data("").train, fed.iid(CLIENTS), sampling=fed.day_and_night())
    with pytest.raises(ValueError, match="equal probabilities"):
        Cohorts(rows, 40, 3, expected=8)


def test_a_code_around_a_private_strategy_can_be_named() -> None:
    strategy = fed.fed_coded(fed.private(fed.fed_avg(cohort=8), noise=0.0), pt.compression.int8())
    assert str(parse_strategy(str(strategy))) == str(strategy)
    assert parse_strategy(str(strategy)).rounds.privacy == strategy.rounds.privacy


@pytest.mark.parametrize("cohort", [1, 2, 12, 100, 2500])
def test_a_round_has_places_for_all_but_one_of_1e15(cohort: int) -> None:
    meeting = fed.private(fed.fed_avg(cohort)).meeting
    assert isinstance(meeting, InRounds)
    most = meeting.number - 1
    assert poisson.sf(most, cohort) <= 1e-15 < poisson.sf(most - 1, cohort)
