"""Laws of federated strategies, in float64 against plain loops; the same bits for any number of workers.

Seeds are literals; the data are drawn from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo import federated as fed
from polytempo.aggregation import trimmed_mean
from polytempo.compression import int8, qsgd
from polytempo.core import Strategy
from polytempo.federated.clients import Cohorts
from polytempo.spec.text.catalogue import parse_strategy

SEED, LR, SAMPLES, CLIENTS = 5, 0.1, 60, 6


def data() -> TensorDataset:
    """Samples of three classes, in float64."""
    random = torch.Generator().manual_seed(11)
    inputs = torch.randn(SAMPLES, 4, generator=random, dtype=torch.float64)
    return TensorDataset(inputs, (inputs @ torch.randn(4, 3, generator=random, dtype=torch.float64)).argmax(1))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def normed() -> nn.Module:
    """A model with running statistics."""
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def wide() -> nn.Module:
    """A model with a tensor that codecs encode."""
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3)).double()


def job(**more: Any) -> pt.Job:
    """A job of logistic regression with a hidden layer, by plain SGD."""
    parts: dict[str, Any] = {
        "model": model,
        "data": lambda path: pt.Data(data(), data()),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        "lr": LR,
    }
    return pt.Job(**parts | more)


def simulated(strategy: Strategy, rounds: int, workers: int = 1, **more: Any) -> dict[str, Any]:
    """The final parameters' digest and loss of a simulated run."""
    options: dict[str, Any] = {"clients": "by_size(6, sigma=0.7)", "seed": SEED, "steps": rounds, "job": job()} | more
    result = pt.simulate(options.pop("job"), strategy, workers=workers, **options)
    return {"loss": result.loss, "hash": result.parameters_sha256}


def trained(strategy: Strategy, rounds: int, **more: Any) -> list[Tensor]:
    """The final parameters of a run in this process."""
    options: dict[str, Any] = {"clients": "by_size(6, sigma=0.7)", "seed": SEED, "steps": rounds} | more
    trainer = pt.Trainer(options.pop("job", job()), strategy, **options)
    trainer.fit()
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def first(make: Callable[[], nn.Module] = model) -> nn.Module:
    torch.manual_seed(SEED)
    return make()


def plain(
    rounds: int,
    cohort: int,
    epochs: int,
    batch_size: int | None,
    update: Callable[[list[Tensor], list[list[Tensor]], list[int], list[int]], None],
    mu: float = 0.0,
    rate: Callable[[int], float] = lambda number: LR,
) -> list[Tensor]:
    """Rounds as a plain loop. `update(θ, movements, sizes, steps)` moves θ."""
    inputs, labels = data().tensors
    clients, net = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED), first()
    theta = [parameter.detach().clone() for parameter in net.parameters()]
    draw = Cohorts(clients, cohort, SEED)
    for number in range(rounds):
        movements, sizes, steps = [], [], []
        for client in draw.order(number).tolist():
            for parameter, value in zip(net.parameters(), theta, strict=True):
                parameter.data.copy_(value)
            own, taken = clients.parts[client], 0
            for epoch in range(epochs):
                order = np.random.default_rng((SEED, number, client, epoch)).permutation(len(own))
                for chosen in own[torch.from_numpy(order)].split(batch_size or len(own)):
                    net.zero_grad()
                    nn.functional.cross_entropy(net(inputs[chosen]), labels[chosen]).backward()
                    with torch.no_grad():
                        for parameter, value in zip(net.parameters(), theta, strict=True):
                            assert parameter.grad is not None
                            parameter -= rate(number) * (parameter.grad + mu * (parameter - value))
                    taken += 1
            movements.append([v - p.detach() for v, p in zip(theta, net.parameters(), strict=True)])
            sizes.append(len(own))
            steps.append(taken)
        update(theta, movements, sizes, steps)
    return theta


def averaged(theta: list[Tensor], movements: list[list[Tensor]], sizes: list[int], steps: list[int]) -> None:
    """θ ← θ - Σ n/Σn Δ."""
    for i, value in enumerate(theta):
        value -= sum((size / sum(sizes) * each[i] for size, each in zip(sizes, movements, strict=True)), 0 * value)


def close(left: list[Tensor], right: list[Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_all_clients_by_one_whole_step_are_sgd_on_the_joined_batch() -> None:
    inputs, labels = data().tensors
    net = first()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    close(trained(fed.fed_avg(cohort=CLIENTS, batch_size=None), 4), [p.detach() for p in net.parameters()])


@pytest.mark.parametrize(("cohort", "epochs", "batch_size"), [(3, 2, 4), (1, 1, 3), (6, 3, None)])
def test_fed_avg_is_its_plain_loop(cohort: int, epochs: int, batch_size: int | None) -> None:
    expected = plain(3, cohort, epochs, batch_size, averaged)
    close(trained(fed.fed_avg(cohort, epochs, batch_size), 3), expected)


def test_fed_prox_is_its_plain_loop() -> None:
    close(trained(fed.fed_prox(3, mu=0.3, epochs=2, batch_size=4), 3), plain(3, 3, 2, 4, averaged, mu=0.3))


def test_fed_nova_is_its_plain_loop() -> None:
    def update(theta: list[Tensor], movements: list[list[Tensor]], sizes: list[int], steps: list[int]) -> None:
        part = [size / sum(sizes) for size in sizes]
        effective = sum(p * tau for p, tau in zip(part, steps, strict=True))
        for i, value in enumerate(theta):
            for p, tau, each in zip(part, steps, movements, strict=True):
                value -= effective * p / tau * each[i]

    close(trained(fed.fed_nova(4, epochs=2, batch_size=4), 3), plain(3, 4, 2, 4, update))


def plain_scaffold(rounds: int, cohort: int, epochs: int, batch_size: int | None) -> list[Tensor]:
    """Algorithm 1, option II of the paper, weighed by samples."""
    inputs, labels = data().tensors
    clients, net = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED), first()
    theta = [parameter.detach().clone() for parameter in net.parameters()]
    zeros = [torch.zeros_like(value) for value in theta]
    server, own = [value.clone() for value in zeros], dict.fromkeys(range(CLIENTS), zeros)
    for number in range(rounds):
        chosen = Cohorts(clients, cohort, SEED).order(number).tolist()
        samples, moved, changed = sum(clients.sizes[k] for k in chosen), zeros, zeros
        for k in chosen:
            x = [value.clone().requires_grad_() for value in theta]
            steps = 0
            for epoch in range(epochs):
                order = np.random.default_rng((SEED, number, k, epoch)).permutation(clients.sizes[k])
                for batch in clients.parts[k][torch.from_numpy(order)].split(batch_size or len(order)):
                    named = dict(zip(dict(net.named_parameters()), x, strict=True))
                    output = torch.func.functional_call(net, named, (inputs[batch],))
                    gradients = torch.autograd.grad(nn.functional.cross_entropy(output, labels[batch]), x)
                    with torch.no_grad():
                        for value, g, mine, c in zip(x, gradients, own[k], server, strict=True):
                            value -= LR * (g - mine + c)
                    steps += 1
            y = [value.detach() for value in x]
            new = [mine - c + (t - v) / (steps * LR) for mine, c, t, v in zip(own[k], server, theta, y, strict=True)]
            part = clients.sizes[k] / sum(clients.sizes)
            changed = [s + part * (n - o) for s, n, o in zip(changed, new, own[k], strict=True)]
            moved = [m + clients.sizes[k] / samples * (t - v) for m, t, v in zip(moved, theta, y, strict=True)]
            own[k] = new
        theta = [value - 0.8 * m for value, m in zip(theta, moved, strict=True)]
        server = [c + s for c, s in zip(server, changed, strict=True)]
    return theta


def test_scaffold_is_its_plain_loop() -> None:
    close(trained(fed.scaffold(3, epochs=2, batch_size=4, server_lr=0.8), 5), plain_scaffold(5, 3, 2, 4))


class Point(nn.Module):
    """x, beside the steepness of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, steepness: Tensor) -> Tensor:
        return torch.cat([self.x.expand(len(steepness), 1), steepness], dim=1)


def test_scaffold_finds_the_common_minimum_where_fed_avg_drifts() -> None:
    """Clients k have the loss (x - aₖ)² hₖ of one sample each, and the minimum of the mean is Σ hₖ aₖ / Σ hₖ."""
    curves = TensorDataset(torch.tensor([[1.0], [3.0]]).double(), torch.tensor([[2.0], [-1.0]]).double())

    own = job(
        model=Point,
        data=lambda path: pt.Data(curves, None),
        loss=lambda output, target: (output[:, 1:] * (output[:, :1] - target) ** 2).mean(),
        correct=None,
    )
    best = torch.tensor([(1 * 2.0 + 3 * -1.0) / 4], dtype=torch.float64)
    [drifted] = trained(fed.fed_avg(2, epochs=5), 200, job=own, clients="iid(2)")
    [found] = trained(fed.scaffold(2, epochs=5), 200, job=own, clients="iid(2)")
    assert (drifted - best).abs() > 0.1
    torch.testing.assert_close(found, best, rtol=1e-12, atol=1e-12)


_RULES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "fed_adam": lambda v, squared, beta: beta * v + (1 - beta) * squared,
    "fed_yogi": lambda v, squared, beta: v - (1 - beta) * squared * torch.sign(v - squared),
    "fed_adagrad": lambda v, squared, beta: v + squared,
}


@pytest.mark.parametrize("name", sorted(_RULES))
def test_adaptive_servers_are_their_plain_loops(name: str) -> None:
    strategy = getattr(fed, name)(3, epochs=2, batch_size=4, server_lr=0.05, beta1=0.8)
    moments: dict[int, tuple[Tensor, Tensor]] = {}

    def update(theta: list[Tensor], movements: list[list[Tensor]], sizes: list[int], steps: list[int]) -> None:
        for i, value in enumerate(theta):
            moved = sum((n / sum(sizes) * each[i] for n, each in zip(sizes, movements, strict=True)), 0 * value)
            m, v = moments.get(i, (0 * value, 0 * value + 1e-6))
            m, v = 0.8 * m + 0.2 * moved, _RULES[name](v, moved**2, 0.99)
            moments[i] = m, v
            value -= 0.05 * m / (v.sqrt() + 1e-3)

    close(trained(strategy, 4), plain(4, 3, 2, 4, update))


def test_momentum_at_the_server_is_its_plain_loop() -> None:
    velocity: dict[int, Tensor] = {}

    def update(theta: list[Tensor], movements: list[list[Tensor]], sizes: list[int], steps: list[int]) -> None:
        for i, value in enumerate(theta):
            moved = sum((n / sum(sizes) * each[i] for n, each in zip(sizes, movements, strict=True)), 0 * value)
            velocity[i] = 0.5 * velocity.get(i, 0 * value) + moved
            value -= 0.8 * velocity[i]

    strategy = fed.fed_avg_m(3, epochs=2, batch_size=4, server_lr=0.8, momentum=0.5)
    close(trained(strategy, 4), plain(4, 3, 2, 4, update))


@pytest.mark.parametrize(
    ("reduced", "clients"),
    [
        ("fed_prox(cohort=3, mu=0.0, batch_size=4)", "by_size(6, sigma=0.7)"),
        ("fed_avg_m(cohort=3, batch_size=4, server_lr=1.0, momentum=0.0)", "by_size(6, sigma=0.7)"),
        ("fed_nova(cohort=3, batch_size=4)", "iid(6)"),
        ("q_fed_avg(cohort=3, q=0.0, batch_size=4)", "by_size(6, sigma=0.7)"),
    ],
)
def test_reduced_to_fed_avg(reduced: str, clients: str) -> None:
    close(
        trained(parse_strategy(reduced), 3, clients=clients), trained(fed.fed_avg(3, batch_size=4), 3, clients=clients)
    )


def test_scaffold_without_drift_is_fed_avg() -> None:
    """The first round has variates of 0; with all clients and one step each they cancel."""
    assert all(map(torch.equal, trained(fed.scaffold(3, 2, 4), 1), trained(fed.fed_avg(3, 2, 4), 1)))
    close(trained(fed.scaffold(CLIENTS, batch_size=None), 4), trained(fed.fed_avg(CLIENTS, batch_size=None), 4))


WRAPPED: dict[str, Callable[[], Strategy]] = {
    "fed_bn": lambda: fed.fed_bn(4, batch_size=None),
    "fed_buff": lambda: fed.fed_buff(4, concurrency=4, batch_size=4),
    "fed_coded": lambda: fed.fed_coded(fed.scaffold(4, batch_size=4), int8(), qsgd(levels=127)),
    "secure": lambda: fed.secure(fed.fed_adam(4, batch_size=4)),
    "fed_robust": lambda: fed.fed_robust(fed.fed_rep(4, batch_size=4), trimmed_mean(1)),
}


@pytest.mark.parametrize("name", fed.strategies.__all__)
def test_the_bits_do_not_depend_on_the_number_of_workers(name: str) -> None:
    strategy = WRAPPED[name]() if name in WRAPPED else getattr(fed, name)(4, batch_size=4)
    make = {"fed_bn": normed, "fed_coded": wide}.get(name, model)
    found = [simulated(strategy, 3, workers, job=job(model=make), clients="iid(8)") for workers in (1, 2, 3)]
    assert len({each["hash"] for each in found}) == 1
    again = simulated(parse_strategy(str(strategy)), 3, 4, job=job(model=make), clients="iid(8)")
    assert found[0]["hash"] == again["hash"]


def test_a_clients_rate_follows_the_jobs_schedule_by_rounds() -> None:
    scheduled = job(schedule=lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, steps, gamma=0.5))
    expected = plain(4, 3, 2, 4, averaged, rate=lambda number: LR * 0.5**number)
    close(trained(fed.fed_avg(3, epochs=2, batch_size=4), 4, job=scheduled), expected)


def test_the_jobs_own_clients_train() -> None:
    own = job(data=lambda path: pt.Data(fed.clients(data(), fed.by_size(6, sigma=0.7), SEED), data()))
    close(trained(fed.fed_avg(3, 2, 4), 3, job=own, clients=None), trained(fed.fed_avg(3, 2, 4), 3))


def test_samples_that_are_collated() -> None:
    """Samples that are read one by one."""

    class Listed(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, number: int) -> Any:
            return tuple(tensor[number] for tensor in data().tensors)

    def collate(samples: list[Any]) -> Any:
        return [torch.stack(column) for column in zip(*samples, strict=True)]

    own = job(data=lambda path: pt.Data(Listed(), None, collate))
    close(trained(fed.fed_avg(3, 2, 4), 2, job=own), trained(fed.fed_avg(3, 2, 4), 2))


@pytest.mark.parametrize(
    ("code", "strategy", "more"),
    [
        ("PT2501", "sync_sgd", {"clients": "iid(6)"}),
        ("PT2515", "sync_sgd", {"sampling": "weighted"}),
        ("PT2519", "sync_sgd", {"client_test": 0.2}),
        ("PT2502", "fed_avg", {"batch_size": 4}),
        ("PT2502", "fed_avg", {"global_batch_size": 40}),
        ("PT2503", "fed_avg", {"accumulate": 2}),
        ("PT2504", "fed_avg", {"job": job(weight=lambda batch: len(batch[0]))}),
        ("PT2505", "fed_avg", {"clip_norm": 1.0}),
        ("PT2506", "fed_avg", {"batch_growth": {1: 2}}),
        ("PT2507", "fed_avg", {"precision": "bf16"}),
        ("PT2542", "fed_avg", {"precision": "autocast"}),
        ("PT2508", "fed_avg", {"min_workers": 1}),
        ("PT1540", "fed_avg", {"balance": "speed"}),
        ("PT2510", "scaffold", {"job": job(optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9))}),
        ("PT2510", "scaffold", {"job": job(optimizer=lambda p, lr: torch.optim.Adam(p, lr))}),
    ],
)
def test_refusals(code: str, strategy: str, more: dict[str, Any]) -> None:
    given_job = more.pop("job", job())
    with pytest.raises(ValueError, match=code):
        pt.run(given_job, strategy, workers=1, steps=1, **more)


@pytest.mark.parametrize(
    ("strategy", "clients", "told"),
    [
        ("fed_avg(cohort=3)", None, "trains clients that have data of their own"),
        ("fed_avg(cohort=7)", "iid(6)", "a round of 7 clients needs that many, and there are 6"),
        ("fed_avg(cohort=1)", "iid(6)", "1 of 2 workers would play none; use workers=1 or fewer"),
        ("fed_avg(cohort=3)", "iid(61)", "60 samples cannot be dealt to 61 clients"),
        ("fed_avg(cohort=3)", "shards(31, per_client=2)", "60 samples are fewer than the pieces"),
        ("fed_avg(cohort=3)", "pieces(3)", "partition of clients"),
    ],
)
def test_mistakes_are_told_before_a_worker_starts(strategy: str, clients: str | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pt.run(job(), strategy, workers=2, steps=1, clients=clients)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**31), st.sampled_from(["iid", "by_size", "shards", "dirichlet"]))
def test_each_sample_belongs_to_one_client(clients: int, seed: int, kind: str) -> None:
    make = {"iid": fed.iid, "by_size": fed.by_size, "shards": fed.shards, "dirichlet": lambda n: fed.dirichlet(n, 5.0)}
    found = fed.clients(data(), make[kind](clients), seed)
    assert sorted(torch.cat(found.parts).tolist()) == list(range(SAMPLES))
    assert len(found.parts) == clients
    again = fed.clients(data(), make[kind](clients), seed)
    assert all(torch.equal(one, other) for one, other in zip(found.parts, again.parts, strict=True))
    assert int(found.counts().sum()) == found.facts().samples == SAMPLES


def test_facts_of_known_partitions() -> None:
    balanced = TensorDataset(torch.zeros(40, 1), torch.arange(4).repeat(10))
    by_class = fed.clients(balanced, fed.by([int(each) for each in balanced.tensors[1]]))
    assert by_class.facts() == (4, 40, (10, 10, 10), 0.0, 0.75)
    halves = fed.clients(balanced, fed.by([int(each) // 2 for each in balanced.tensors[1]]))
    assert halves.facts() == (2, 40, (20, 20, 20), 1.0, 0.5)
    two = fed.clients(balanced, fed.shards(10, per_client=2), seed=3)
    assert all(int((row > 0).sum()) <= 2 for row in two.counts())


def test_a_cohort_has_nobody_twice_and_is_the_same_again() -> None:
    drawn = Cohorts(fed.clients(data(), fed.iid(20)), 7, seed=1)
    for number in range(30):
        assert len(set(drawn.order(number).tolist())) == 7
        assert torch.equal(drawn.order(number), drawn.order(number))
    assert {client for number in range(30) for client in drawn.order(number).tolist()} == set(range(20))


def test_a_picture_of_clients(tmp_path: Path) -> None:
    fed.clients(data(), fed.dirichlet(6, 0.5), seed=2).plot(str(tmp_path / "clients.png"))
    with Image.open(tmp_path / "clients.png") as picture:
        assert picture.size[0] == 1100
    floats = fed.clients(TensorDataset(torch.zeros(4, 1), torch.zeros(4)), fed.iid(2))
    with pytest.raises(ValueError, match="name no class"):
        floats.plot(str(tmp_path / "none.png"))
