"""Laws of kept tensors, fair weights, merges and codes, arrivals and sampling in rounds of clients.

Float64 against plain loops. Seeds are literals.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.test_federated import CLIENTS, LR, SEED, close, data, first, job, model, normed, plain, trained, wide
from polytempo import federated as fed
from polytempo.aggregation import krum
from polytempo.compression import feedback, int8, one_bit, qsgd
from polytempo.core import Codec, EncodeContext, Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.federated.clients import Cohorts
from polytempo.training.federated.client_movements import fair_weights


def plain_kept(
    make: Callable[[], nn.Module], kept: list[str], rounds: int, head_epochs: int, epochs: int, batch_size: int | None
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """The server's tensors and the clients' own after rounds of three of six clients."""
    inputs, labels = data().tensors
    clients, net = fed.clients(data(), fed.iid(CLIENTS), SEED), first(make)
    theta = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    own: dict[int, dict[str, Tensor]] = {}
    for number in range(rounds):
        moved = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters() if name not in kept}
        for k in Cohorts(clients, 3, SEED).order(number).tolist():
            net.load_state_dict(theta | own.get(k, {}))
            for epoch in range(head_epochs + epochs):
                order = np.random.default_rng((SEED, number, k, epoch)).permutation(clients.sizes[k])
                for batch in clients.parts[k][torch.from_numpy(order)].split(batch_size or len(order)):
                    net.zero_grad()
                    nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
                    for name, parameter in net.named_parameters():
                        if not head_epochs or (name in kept) is (epoch < head_epochs):
                            assert parameter.grad is not None
                            parameter.data -= LR * parameter.grad
            after = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            own[k] = {name: after[name] for name in kept}
            for name, each in moved.items():
                each += ((theta[name] - after[name]) / 3).detach()
        theta |= {name: theta[name] - each for name, each in moved.items()}
    return theta, own


@pytest.mark.parametrize(
    ("strategy", "make", "kept", "passes"),
    [
        (fed.fed_rep(3, 2, 4), model, ["2.weight", "2.bias"], (1, 2, 4)),
        (fed.fed_rep(3, 2, 4, head_epochs=0, head="0"), model, ["0.weight", "0.bias"], (0, 2, 4)),
        (
            fed.fed_bn(3, 2, None),
            normed,
            [f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")],
            (0, 2, None),
        ),
    ],
    ids=["fed_rep", "fed_per", "fed_bn"],
)
def test_clients_with_tensors_of_their_own_are_the_plain_loop(
    strategy: Strategy, make: Callable[[], nn.Module], kept: list[str], passes: Any, tmp_path: Path
) -> None:
    server, own = plain_kept(make, kept, 4, *passes)
    trainer = pt.Trainer(job(model=make), strategy, clients="iid(6)", seed=SEED, steps=4, out=tmp_path)
    trainer.fit()
    for client in range(CLIENTS):
        found = pt.training.client_model(tmp_path, client)
        for name, tensor in (server | own.get(client, {})).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_q_fed_avg_is_its_plain_loop() -> None:
    inputs, labels = data().tensors
    clients, q, number, net = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED), 1.5, 0, first()

    def update(theta: list[Tensor], movements: list[list[Tensor]], sizes: list[int], steps: list[int]) -> None:
        nonlocal number
        for parameter, value in zip(net.parameters(), theta, strict=True):
            parameter.data.copy_(value)
        chosen = [clients.parts[k] for k in Cohorts(clients, 3, SEED).order(number).tolist()]
        losses = [nn.functional.cross_entropy(net(inputs[part]), labels[part]).item() for part in chosen]
        norms = [sum(float(m.square().sum()) for m in each) for each in movements]
        weights = [n * loss**q for n, loss in zip(sizes, losses, strict=True)]
        bottom = sum(w * (1 + q / loss * norm / LR) for w, loss, norm in zip(weights, losses, norms, strict=True))
        for i, value in enumerate(theta):
            value -= sum((w / bottom * each[i] for w, each in zip(weights, movements, strict=True)), 0 * value)
        number += 1

    close(trained(fed.q_fed_avg(3, q, 2, 4), 3), plain(3, 3, 2, 4, update))


def test_q_fed_avg_divides_each_parameters_movement_by_its_own_rate() -> None:
    """pₖ = 1/2, Fₖ = 2, q = 3: pₖ Fₖ^q = 4, and pₖ q Fₖ^(q-1) = 6."""
    movement = [torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([7.0])]
    assert fair_weights(0.5, 2.0, movement, 3.0, [0.5, 0.25, 0.0]) == (4.0, 4.0 + 6 * (5 / 0.5 + 9 / 0.25))


@pytest.mark.parametrize("order", [1, -1])
def test_a_group_at_a_rate_of_0_has_no_part_in_q_fed_avg(order: int) -> None:
    """The bits of an optimizer of the other group alone."""

    def two(parameters: Any, lr: float) -> torch.optim.Optimizer:
        every = list(parameters)
        groups = [{"params": every[:2], "lr": 0.0}, {"params": every[2:], "lr": lr}]
        return torch.optim.SGD(groups[::order], lr=lr)

    strategy = fed.q_fed_avg(3, 1.0, 2, 4)
    alone = job(optimizer=lambda parameters, lr: torch.optim.SGD(list(parameters)[2:], lr=lr))
    assert all(map(torch.equal, trained(strategy, 3, job=job(optimizer=two)), trained(strategy, 3, job=alone)))


def test_a_robust_merge_is_its_plain_loop() -> None:
    def update(theta: list[Tensor], movements: list[list[Tensor]], sizes: list[int], steps: list[int]) -> None:
        flat = krum(1)([torch.cat([m.flatten() for m in each]) for each in movements])
        for value, moved in zip(theta, flat.split([value.numel() for value in theta]), strict=True):
            value -= moved.view(value.shape)

    close(trained(fed.fed_robust(fed.fed_avg(5, 2, 4), krum(1)), 3), plain(3, 5, 2, 4, update))


def test_codes_up_and_down() -> None:
    """The model moves by C(C'(θ) - θ₁), where θ₁ is a round of `fed_avg` from C'(θ)."""
    up, down = int8(), qsgd(levels=127)

    def code(codec: Codec, tensor: Tensor, rank: int) -> Tensor:
        when = EncodeContext(step=1, rank=rank, tensor=zlib.crc32(b"0.weight"))
        return codec.decode(codec.encode(tensor, None, when)[0], tensor, when)

    def received() -> nn.Module:
        net = wide()
        net.get_parameter("0.weight").data.copy_(code(down, net.get_parameter("0.weight").detach(), 0))
        return net

    [client] = Cohorts(fed.clients(data(), fed.iid(CLIENTS), SEED), 1, SEED).order(0).tolist()
    found = trained(fed.fed_coded(fed.fed_avg(1), up, down), 1, job=job(model=wide), clients="iid(6)")
    there = trained(fed.fed_avg(1), 1, job=job(model=received), clients="iid(6)")
    sent, whole = [p.detach() for p in first(received).parameters()], [p.detach() for p in first(wide).parameters()]
    moved = [one - other for one, other in zip(sent, there, strict=True)]
    decoded = [code(up, each, client) if each.numel() >= 1024 else each for each in moved]
    assert not torch.equal(decoded[0], moved[0])
    close(found, [value - each for value, each in zip(whole, decoded, strict=True)])


def test_fed_buff_is_its_plain_loop() -> None:
    inputs, labels = data().tensors
    clients, net = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED), first()
    arrivals = fed.Arrivals(clients.sizes, 2, 4, 2, 1.0, SEED)
    models = [[parameter.detach().clone() for parameter in net.parameters()]]
    for number in range(6):
        buffer = arrivals.buffer(number)
        samples, after = sum(clients.sizes[each.client] for each in buffer), models[-1]
        for client, age, _ in buffer:
            begin = models[number - age]
            for parameter, value in zip(net.parameters(), begin, strict=True):
                parameter.data.copy_(value)
            order = np.random.default_rng((SEED, number - age, client, 0)).permutation(clients.sizes[client])
            for batch in clients.parts[client][torch.from_numpy(order)].split(4):
                net.zero_grad()
                nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.data -= LR * parameter.grad
            weight = 0.8 * clients.sizes[client] / samples / (1 + age) ** 0.5
            after = [
                value - weight * (b - p.detach()) for value, b, p in zip(after, begin, net.parameters(), strict=True)
            ]
        models.append(after)
    assert any(each.age for number in range(6) for each in arrivals.buffer(number))
    strategy = fed.fed_buff(2, 4, 1, 4, server_lr=0.8, oldest=2)
    close(trained(strategy, 6), models[-1])


def test_fed_buff_goes_on_to_the_bit(tmp_path: Path) -> None:
    strategy = fed.fed_buff(2, 4, 1, 4, oldest=2)
    trained(strategy, 3, out=tmp_path)
    assert all(map(torch.equal, trained(strategy, 6, out=tmp_path, resume=True), trained(strategy, 6)))


def test_arrivals() -> None:
    sizes, oldest = list(range(1, 31)), 3
    arrivals = fed.Arrivals(sizes, 4, 9, oldest, 1.0, seed=2)
    found = [arrivals.buffer(number) for number in range(60)]
    times = [each.at for buffer in found for each in buffer]
    assert times == sorted(times)
    assert all(len({each.client for each in buffer}) == 4 for buffer in found)
    assert {each.age for buffer in found for each in buffer} == {0, 1, 2, 3}
    again = fed.Arrivals(sizes, 4, 9, oldest, 1.0, seed=2)
    assert again.buffer(59) == found[59]
    alone = fed.Arrivals(sizes, 4, 1, oldest, 1.0, seed=2)
    assert {each.age for number in range(20) for each in alone.buffer(number)} == {0}
    with pytest.raises(ValueError, match="smaller cohort"):
        fed.Arrivals(sizes, 20, 11, oldest, 1.0, seed=2)
    times = [fed.Arrivals(sizes, 4, 9, oldest, 1.0, 2, lost).buffer(40)[-1].at for lost in (0.0, 0.5)]
    assert 1.4 < times[1] / times[0] < 2.8


def test_sampling_of_clients() -> None:
    sizes = [10] * 40
    day = fed.day_and_night(day=10, awake=0.3)
    [there] = day.presences
    hours = np.stack([there(40, number, SEED) for number in range(20)])
    assert (hours.sum(0) == 6).all()
    assert (hours[:10] == hours[10:]).all()
    for sampling in (day, fed.drop_outs(0.5), fed.over_selected(0.5), fed.both(day, fed.over_selected(0.5))):
        for number in range(10):
            drawn = sampling.drawn(sizes, 4, SEED, number)
            assert len(set(drawn.tolist())) == 4
            assert (drawn == sampling.drawn(sizes, 4, SEED, number)).all()
    assert all(hours[number][day.drawn(sizes, 4, SEED, number)].all() for number in range(20))
    [home] = fed.drop_outs(0.25).presences
    assert 0.7 < np.mean([home(40, number, SEED).mean() for number in range(100)]) < 0.8
    uneven = [1] * 20 + [100] * 20
    first_ones = [fed.over_selected(1.0, sigma=0.0).drawn(uneven, 10, SEED, number) for number in range(50)]
    assert np.mean(np.concatenate(first_ones) < 20) > 0.8
    quick, slow = (
        np.mean([rule.duration(sizes, 10, SEED, number) for number in range(50)])
        for rule in (fed.over_selected(0.5), fed.Sampling())
    )
    assert quick < 0.8 * slow
    with pytest.raises(ValueError, match="smaller cohort"):
        fed.drop_outs(0.99).drawn([1] * 4, 4, SEED, 0)


def test_sampling_of_a_run() -> None:
    """A run's clients have their sampling."""
    dealt = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED, fed.day_and_night(day=3))
    own = job(data=lambda path: pt.Data(dealt, None))
    drawn = [Cohorts(dealt, 2, SEED).order(number).tolist() for number in range(3)]
    plainly = [Cohorts(fed.Clients(dealt.dataset, dealt.parts), 2, SEED).order(number).tolist() for number in range(3)]
    assert drawn != plainly
    with pytest.raises(ValueError, match="draws its clients itself"):
        trained(fed.fed_buff(2, 2), 1, job=own, clients=None)
    one, other = (trained(fed.fed_avg(2, 1, 4), 3, job=own, clients=None) for _ in range(2))
    assert all(map(torch.equal, one, other))
    assert not all(map(torch.equal, one, trained(fed.fed_avg(2, 1, 4), 3)))


def test_clients_drawn_by_their_samples_count_alike() -> None:
    sizes = [1] * 20 + [9] * 20
    drawn = np.concatenate([fed.weighted().drawn(sizes, 2, SEED, number) for number in range(200)])
    assert 0.86 < (drawn >= 20).mean() < 0.94
    rule = "both(weighted, drop_outs(0.2))"
    dealt = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED, fed.both(fed.weighted(), fed.drop_outs(0.2)))
    theta, weights = first(model), [each.detach() for each in first(model).parameters()]
    inputs, labels = data().tensors
    for number in range(3):
        moved = [torch.zeros_like(each) for each in weights]
        for k in Cohorts(dealt, 2, SEED).order(number).tolist():
            loss = nn.functional.cross_entropy(theta(inputs[dealt.parts[k]]), labels[dealt.parts[k]])
            for each, gradient in zip(moved, torch.autograd.grad(loss, list(theta.parameters())), strict=True):
                each += LR * gradient / 2
        for each, more, own in zip(weights, moved, theta.parameters(), strict=True):
            each -= more
            own.data.copy_(each)
    close(trained(fed.fed_avg(2, 1, None), 3, sampling=rule), weights)
    with pytest.raises(ValueError, match="count alike"):
        trained(fed.fed_nova(2), 1, sampling="weighted")
    with pytest.raises(ValueError, match="a rule already"):
        trained(fed.fed_avg(2), 1, job=job(data=lambda path: pt.Data(dealt, None)), clients=None, sampling=rule)


@pytest.mark.parametrize("workers", [1, 2])
def test_scores_have_the_spread_of_clients_and_who_took_part(workers: int, tmp_path: Path) -> None:
    dealt = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED, test=0.4)
    assert dealt.test is not None
    assert len(dealt.test) + len(dealt) == len(data())
    assert torch.equal(
        torch.stack([dealt[i][0] for i in range(len(dealt))]), data()[torch.cat(dealt.parts).sort()[0]][0]
    )
    own = job(data=lambda path: pt.Data(dealt, dealt.test), correct=lambda output, target: output.argmax(1) == target)
    trainer = pt.Trainer(own, fed.fed_avg(2, 1, 4), seed=SEED, steps=3)
    trainer.fit()
    held_out = [
        np.setdiff1d(whole.numpy(), kept.numpy())
        for whole, kept in zip(fed.by_size(CLIENTS, sigma=0.7)(data().tensors[1], SEED), dealt.parts, strict=True)
    ]
    inputs, labels = data().tensors
    right = (trainer.model(inputs).argmax(1) == labels).double().numpy()
    expected = [right[rows].mean() for rows in held_out if len(rows)]
    drawn = {k for number in range(3) for k in Cohorts(dealt, 2, SEED).order(number).tolist()}
    found = pt.simulate(
        own, fed.fed_avg(2, 1, 4), workers=workers, seed=SEED, steps=3, eval_every=1, out=tmp_path
    ).metrics
    assert found is not None
    assert found["clients/took_part"] == len(drawn)
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    logged = [row for row in rows if row["kind"] == "log"]
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert logged[-1]["values"] == found
    for name, value in {
        "min": np.min(expected),
        "p10": np.quantile(expected, 0.1),
        "median": np.median(expected),
        "max": np.max(expected),
        "mean": np.mean(expected),
        "std": np.std(expected),
    }.items():
        assert found[f"clients/{name}"] == pytest.approx(value, abs=1e-12)


def test_tests_of_clients_are_refused_where_no_sample_has_an_answer() -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        fed.clients(data(), fed.iid(CLIENTS), test=1.0)
    with pytest.raises(ValueError, match="no client has a test sample"):
        fed.clients(data(), fed.iid(60), test=0.4)
    tests = fed.clients(data(), fed.iid(CLIENTS), test=0.4).test
    assert tests is not None
    with pytest.raises(ValueError, match="first dimension"):
        tests.counts(0, torch.tensor(True), 2)


def test_refusals_of_strategies_around_rounds() -> None:
    for inner in (fed.scaffold(), fed.fed_nova(), fed.q_fed_avg()):
        with pytest.raises(Incompatible, match="PT2511"):
            fed.fed_robust(inner)
    with pytest.raises(Incompatible, match="PT2512"):
        fed.fed_coded(codec=feedback(one_bit()))
    for wrap in (fed.fed_robust, fed.fed_coded):
        with pytest.raises(ValueError, match="has none"):
            wrap(pt.strategies.sync_sgd())
    for wrong, told in ((fed.fed_rep(3, head="9"), "no module"), (fed.fed_bn(3), "normalisation")):
        with pytest.raises(ValueError, match=told):
            trained(wrong, 1)


def test_a_round_at_a_rate_of_0_changes_nothing() -> None:
    """Control variates, too, although (θ - θₖ) / (τₖ ηₖ) is 0 / 0 there."""
    paused = job(schedule=lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s != 1))
    for strategy in (fed.scaffold(CLIENTS, 2, None), fed.q_fed_avg(CLIENTS, 1.0, 2, None)):
        close(trained(strategy, 4, job=paused), trained(strategy, 3))


@pytest.mark.parametrize("strategy", [fed.scaffold(3, 2, 4), fed.q_fed_avg(3, 1.0, 2, 4)], ids=str)
def test_an_optimizer_of_a_part_of_the_model_leaves_the_rest_as_it_is(strategy: Strategy) -> None:
    last = job(optimizer=lambda parameters, lr: torch.optim.SGD(list(parameters)[2:], lr=lr))
    begun, found = [each.detach() for each in first().parameters()], trained(strategy, 3, job=last)
    assert all(map(torch.equal, begun[:2], found[:2]))
    assert not any(map(torch.equal, begun[2:], found[2:]))


def test_rates_by_scores_closures_and_buffers_of_batches_are_refused() -> None:
    """Clients could honour none of them."""

    def spectral() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 3)).double()

    with pytest.raises(Incompatible, match=r"PT2535.*_u changes"):
        trained(fed.fed_avg(3), 1, job=job(model=spectral))
    searches = job(optimizer=lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr))
    with pytest.raises(Incompatible, match="PT2536"):
        trained(fed.fed_avg(3), 1, job=searches)
    scores = job(schedule=lambda optimizer, steps: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(Incompatible, match="PT1554"):
        trained(fed.fed_avg(3), 2, job=scores)


class Table(nn.Module):
    """Multiplies by a buffer, written in each forward pass: with ones, and from pass `changes` on with other values."""

    table: Tensor

    def __init__(self, changes: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.changes, self.passes = changes, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.table.copy_(torch.full((4,), 1.0 if self.passes < self.changes else 2.0))
        self.passes += self.training
        return inputs * self.table


def test_a_buffer_may_be_written_with_its_own_values() -> None:
    """Such as a table of rotations."""

    def made(changes: float) -> pt.Job:
        return job(model=lambda: nn.Sequential(Table(changes), *model()).double())

    strategy = fed.fed_avg(3, 2, 4)
    assert all(map(torch.equal, trained(strategy, 2, job=made(np.inf)), trained(strategy, 2)))
    with pytest.raises(Incompatible, match=r"PT2535.*table changes"):
        trained(strategy, 2, job=made(3))


def test_a_buffer_that_changes_is_refused_after_the_first_step() -> None:
    losses = list[Tensor]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        losses.append(output)
        return nn.functional.cross_entropy(output, target)

    changing = job(model=lambda: nn.Sequential(Table(0), *model()).double(), loss=loss)
    with pytest.raises(Incompatible, match="PT2535"):
        trained(fed.fed_avg(3, 2, 4), 1, job=changing)
    assert len(losses) == 1
