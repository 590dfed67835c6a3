"""Codistillation by hand: the teacher of each group, the age of its model, and the training without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import polytempo as pt
from polytempo.large_batch import churn
from polytempo.strategies import adasum, async_sgd, codistillation, gossip, hogwild
from polytempo.training.elastic.elastic_strategies import check_elastic
from polytempo.training.job.distillation import data_of_group, grouped
from polytempo.worlds import VirtualWorld

SAMPLES, BATCH, LR = 24, 6, 0.5


def batches() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, generator=random, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def job(models: list[nn.Module]) -> pt.Job:
    """A linear classifier; `models` gets all that are made."""

    def model() -> nn.Module:
        models.append(nn.Linear(4, 2).double())
        return models[-1]

    return pt.Job(
        model=model,
        data=lambda path: pt.Data(batches()),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=LR,
        batch_size=BATCH,
    )


def ends(strategy: Any, workers: int, steps: int, seed: int = 0) -> list[Tensor]:
    """Each worker's parameters at the end."""
    models: list[nn.Module] = []
    pt.simulate(job(models), strategy, workers, steps=steps, seed=seed)
    return [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models[-workers:]]


def alone(group: int, steps: int) -> Tensor:
    """A group alone, as one worker trains on its half, from the same begin."""
    models: list[nn.Module] = []
    images, labels = (tensor[group::2] for tensor in batches().tensors)
    half = replace(job(models), data=lambda path: pt.Data(TensorDataset(images, labels)))
    shard = pt.data.DataShard(TensorDataset(images, labels), rank=0, size=1, batch_size=BATCH, seed=0)
    torch.manual_seed(7919 * group)
    model = half.model()
    step = 0
    while step < steps:
        for inputs, target in shard:
            loss = nn.functional.cross_entropy(model(inputs), target)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=LR)
            step += 1
            if step == steps:
                break
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("strategy", [codistillation(period=2, burn_in=0, weight=0.0), codistillation(burn_in=9)])
def test_without_a_weight_or_before_the_burn_in_groups_train_by_themselves(strategy: Any) -> None:
    for group, found in enumerate(ends(strategy, 2, steps=5)):
        torch.testing.assert_close(found, alone(group, 5), rtol=0, atol=1e-15)


def test_a_step_after_an_exchange_is_on_both_losses() -> None:
    """Exchange after step 3; step 4 by hand, with the other group's model of step 3 as a constant."""
    before = ends(codistillation(period=3, burn_in=0, weight=0.7), 2, steps=3)
    after = ends(codistillation(period=3, burn_in=0, weight=0.7), 2, steps=4)
    for group in (0, 1):
        torch.testing.assert_close(before[group], alone(group, 3), rtol=0, atol=1e-15)
        images, labels = (tensor[group::2] for tensor in batches().tensors)
        shard = pt.data.DataShard(TensorDataset(images, labels), rank=0, size=1, batch_size=BATCH, seed=0)
        taken = [batch for _ in range(2) for batch in shard][3]
        student, teacher = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
        nn.utils.vector_to_parameters(before[group].clone(), student.parameters())
        nn.utils.vector_to_parameters(before[1 - group].clone(), teacher.parameters())
        output, soft = student(taken[0]), teacher(taken[0]).softmax(-1).detach()
        loss = nn.functional.cross_entropy(output, taken[1]) + 0.7 * nn.functional.cross_entropy(output, soft)
        gradients = torch.autograd.grad(loss, list(student.parameters()))
        moved = before[group] - LR * nn.utils.parameters_to_vector(gradients)
        torch.testing.assert_close(after[group], moved, rtol=0, atol=1e-14)


def test_what_groups_learn_from_is_as_old_as_the_last_exchange() -> None:
    often, seldom = (ends(codistillation(period=period, burn_in=0), 2, steps=9) for period in (1, 8))
    assert (often[0] - seldom[0]).abs().max() > 1e-6
    late = ends(codistillation(period=2, burn_in=8), 2, steps=9)
    torch.testing.assert_close(late[0], seldom[0], rtol=0, atol=1e-14)


def test_workers_of_a_group_hold_one_model_and_groups_another() -> None:
    found = ends(codistillation(groups=2, period=2, burn_in=0), 4, steps=6)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_groups_have_equal_parts_of_the_samples_and_share_none() -> None:
    data = pt.Data(TensorDataset(torch.arange(11)))
    parts: list[list[int]] = [[], [], []]

    async def program(port: pt.core.Port) -> None:
        placed = grouped(port, 3)
        train = data_of_group(data, placed).train
        parts[placed.coordinates["group"]] = [int(train[i][0]) for i in range(len(train))]  # type: ignore[arg-type]

    VirtualWorld(pt.cluster.ethernet(), 3).run(program)
    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize("inner", [async_sgd(), hogwild(), adasum(), codistillation()], ids=str)
def test_what_cannot_be_within_a_group_is_refused(inner: Any) -> None:
    with pytest.raises(ValueError, match="codistillation takes an inner strategy that exchanges gradients or param"):
        codistillation(inner=inner)


def test_what_groups_cannot_do_is_refused() -> None:
    strategy, models = codistillation(), list[nn.Module]()
    with pytest.raises(ValueError, match="at least 2 groups, got groups=1"):
        codistillation(groups=1)
    with pytest.raises(ValueError, match="weight >= 0 and burn_in >= 0, got -1 and 100"):
        codistillation(weight=-1)
    with pytest.raises(ValueError, match="workers=3 cannot be that many of one size; use workers=4"):
        pt.simulate(job(models), strategy, 3, steps=1)
    with pytest.raises(ValueError, match="PT1205"):
        check_elastic(strategy)
    normed = replace(job(models), model=lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).double())
    with pytest.raises(ValueError, match="BatchNorm1d '1' has running statistics"):
        pt.simulate(normed, strategy, 2, steps=1)
    whole = replace(job(models), loss=pt.of_batch(lambda model, batch: model(batch[0]).sum()))
    with pytest.raises(ValueError, match=r"of_batch.* hides"):
        pt.simulate(whole, strategy, 2, steps=1)
    loader = replace(job(models), data=lambda path: pt.Data(DataLoader(batches())))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"give pt\.Data a map-style data set"):
        pt.simulate(loader, strategy, 2, steps=1)
    net = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="PT1102"):
        pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), strategy)


def test_explain_says_what_groups_send() -> None:
    """Four workers, two groups, a vector of 1000: sums in pairs, and a model from each to its counterpart."""
    found = pt.explain(codistillation(period=5, burn_in=0, inner=gossip()), workers=4, parameters=1000)
    assert (found.at(1).parameter_bytes, found.at(5).parameter_bytes) == (4 * 4000, 8 * 4000)
    assert found.memory_bytes == 4000


def test_churn_is_the_part_of_probability_that_moves() -> None:
    one, other = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    assert churn(one, other) == pytest.approx(0.1)
    assert churn(one, one) == 0
    with pytest.raises(ValueError, match=r"got \(2, 2\) and \(2,\)"):
        churn(one, other[:, 0])
