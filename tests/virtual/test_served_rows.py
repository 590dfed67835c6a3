"""Training a model with sparse embeddings at a parameter server: only touched rows travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam
from torch.utils.data import TensorDataset

from polytempo import strategies
from polytempo.cluster import Crash, ethernet
from polytempo.core import Strategy
from polytempo.core.rule import Service
from polytempo.data.batches import Batches
from polytempo.runs.simulated.simulate import simulate
from polytempo.runs.simulated.simulate_served import simulate_served
from polytempo.server.rules.synchronous_step import hardsync
from polytempo.server.service import served
from polytempo.spec.job import Data, Job, most_likely
from polytempo.spec.result import parameters_sha256
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.served.shard_rule import parameters_of

WORDS = 60


class Bag(nn.Module):
    """Two tables with a layer between them, so that shards are cut inside and beside of tables."""

    def __init__(self, words: int = WORDS, width: int = 8, sparse: bool = True) -> None:
        super().__init__()
        self.first = nn.Embedding(words, width, sparse=sparse)
        self.middle = nn.Linear(2 * width, 4)
        self.second = nn.EmbeddingBag(words, width, mode="sum", sparse=sparse)

    def forward(self, words: Tensor) -> Tensor:
        both = torch.cat([self.first(words).mean(dim=1), self.second(words)], dim=1)
        scores: Tensor = self.middle(both)
        return scores


class OnlyTables(nn.Module):
    """A model of nothing else, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, 4, mode="mean", sparse=True, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.table(words)
        return scores


def sentences(num: int, words: int) -> TensorDataset:
    """Five words each, all out of one quarter of the vocabulary: which one is the class."""
    generator = torch.Generator().manual_seed(3)
    classes = torch.randint(4, (num,), generator=generator)
    return TensorDataset(torch.randint(words // 4, (num, 5), generator=generator) * 4 + classes[:, None], classes)


def job(
    model: Callable[[], nn.Module] = Bag,
    optimizer: Callable[[Any, float], torch.optim.Optimizer] | None = None,
    words: int = WORDS,
) -> Job:
    data = Data(sentences(256, words), sentences(64, words))
    return Job(
        model=model,
        data=lambda folder: data,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer or sgd,
        lr=0.5,
        batch_size=16,
        epochs=4,
        correct=most_likely,
        name="bag",
    )


def sgd(parameters: Any, lr: float) -> SGD:
    return SGD(parameters, lr=lr)


def adagrad(parameters: Any, lr: float) -> Adagrad:
    return Adagrad(parameters, lr=lr, lr_decay=0.01, initial_accumulator_value=0.1)


def serial(job: Job, steps: int) -> str:
    """Plain torch on the same batches, with rows of gradients summed first, as a push sums them."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer(model.parameters(), job.lr)
    batches = Batches(job.data(None).train, size=1, batch_size=job.batch_size)
    for step in range(steps):
        inputs, targets = batches.at(*divmod(step, len(batches)))
        optimizer.zero_grad()
        job.loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        with torch.sparse.check_sparse_tensor_invariants(False):  # else torch warns of its own tensors
            optimizer.step()
    return parameters_sha256(model.parameters())


def trained(job: Job, strategy: Strategy, workers: int = 1, **options: Any) -> Tensor:
    """All final weights, flat."""
    models: list[nn.Module] = []

    def model() -> nn.Module:
        models.append(job.model())
        return models[-1]

    sha256 = simulate(replace(job, model=model), strategy, workers, **options).parameters_sha256
    final = next(each for each in models if parameters_sha256(each.parameters()) == sha256)
    return torch.cat([parameter.detach().view(-1) for parameter in final.parameters()])


def dense() -> Bag:
    return Bag(sparse=False)


def synchronous(shards: int) -> Strategy:
    return served(f"hardsync, {shards} shards", Service(hardsync(), shards=shards, replicas=0, deals="evenly"))


# --------------------------------------------------------------------------------------------- the same as without rows


@pytest.mark.parametrize("model", [Bag, OnlyTables])
@pytest.mark.parametrize("optimizer", [sgd, adagrad])
def test_one_worker_without_delay_is_plain_torch_to_the_bit(model: Callable[[], nn.Module], optimizer: Any) -> None:
    made = job(model, optimizer)
    for strategy in (strategies.async_sgd(), strategies.async_sgd(shards=3)):
        assert simulate(made, strategy, 1, steps=20).parameters_sha256 == serial(made, 20)


def test_tables_by_rows_are_tables_as_a_whole_under_a_synchronous_schedule() -> None:
    """Rows that only some of the workers touch, summed by rows; one shard, or three with cuts inside of tables."""
    expected = simulate(job(dense), synchronous(1), 3, steps=8).parameters_sha256
    for shards in (1, 3):
        assert simulate(job(), synchronous(shards), 3, steps=8).parameters_sha256 == expected


@pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
@pytest.mark.parametrize("every", [(3, 2), (2, 5)], ids=["pushes seldom", "pulls seldom"])
def test_what_a_worker_changed_by_itself_goes_when_it_fetches(every: tuple[int, int], overlap: bool) -> None:
    """Local steps change rows that the server has not changed yet. A fetch brings none of them, but must undo them."""
    strategy = strategies.downpour(*every, shards=2, optimizer="sgd", lr=0.3, overlap=overlap)
    by_rows, whole = trained(job(), strategy, steps=23), trained(job(dense), strategy, steps=23)
    torch.testing.assert_close(by_rows, whole, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_dense_after_all_counts_by_its_rows() -> None:
    """A table with some rows also used directly by the loss."""

    class Scaled(Bag):
        def forward(self, words: Tensor) -> Tensor:
            found: Tensor = super().forward(words)
            return found * self.first.weight[:3].square().mean()

    strategy = strategies.async_sgd(shards=2)
    whole = trained(job(lambda: Scaled(sparse=False)), strategy, steps=6)
    torch.testing.assert_close(trained(job(Scaled), strategy, steps=6), whole, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- it learns


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.async_sgd(shards=3),
        strategies.downpour(push_every=3, pull_every=2, lr=0.05, shards=2),
        strategies.softsync(n=1, shards=2),
    ],
    ids=str,
)
def test_workers_learn_together(strategy: Strategy) -> None:
    result = simulate(job(), strategy, 2)
    assert result.samples == 4 * 256
    assert result.accuracy is not None
    assert result.accuracy >= 0.9


def test_only_touched_rows_travel() -> None:
    """A step touches at most 2 · 80 of 20,000 rows; the first fetch alone brings them all."""

    def sent(steps: int, sparse: bool) -> float:
        made = job(lambda: Bag(20_000, 8, sparse), words=20_000)
        result = simulate_served(
            RunSpec.of(made, strategies.async_sgd(shards=2), 1, RunOptions(steps=steps)), ethernet()
        )
        assert result.server is not None
        bytes_sent: float = result.bytes_sent_per_rank + result.server["bytes_sent"]
        return bytes_sent

    by_rows, whole = (sent(12, sparse) - sent(2, sparse) for sparse in (True, False))
    assert by_rows / 10 < 2 * 160 * (8 + 8 * 4) + 4096
    assert whole / 10 > 2 * 2 * 20_000 * 8 * 4


def test_a_copy_that_takes_over_has_the_tables() -> None:
    made = job()
    cluster = replace(ethernet(), faults=(Crash(rank=1, at_s=2e-3),))  # ranks 1 and 2 hold shard 0
    result = simulate(made, strategies.async_sgd(replicas=1), 1, cluster, steps=20)
    assert result.seconds > 2e-3
    assert result.parameters_sha256 == serial(made, 20)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("optimizer", "strategy", "message"),
    [
        (lambda p, lr: SGD(p, lr=lr, momentum=0.9), strategies.async_sgd(), "here is sgd with momentum 0.9"),
        (lambda p, lr: SGD(p, lr=lr, weight_decay=0.1), strategies.async_sgd(), "and weight decay 0.1; make the"),
        (lambda p, lr: Adam(p, lr=lr), strategies.async_sgd(), "here is adam with momentum 0"),
        (sgd, strategies.downpour(optimizer="adam", lr=0.1), "here is adam with momentum 0"),
        (
            sgd,
            strategies.easgd(),
            "easgd.* exchanges parameters, and of first.weight, which has sparse",
        ),
        (sgd, strategies.flexrr(), "workers that help each other push slices' gradients as whole vectors"),
        (sgd, strategies.dc_asgd(), "compensate.* needs the weights that each gradient was computed on"),
    ],
)
def test_what_cannot_go_by_rows_is_refused_before_it_begins(optimizer: Any, strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(job(optimizer=optimizer), strategy, 2, steps=1)


def test_a_table_knows_its_rows() -> None:
    model = Bag()
    assert [(p.name, p.numel, p.row_width) for p in parameters_of(model, SGD(model.parameters(), lr=0.1))] == [
        ("first.weight", 480, 8),
        ("middle.weight", 64, 0),
        ("middle.bias", 4, 0),
        ("second.weight", 480, 8),
    ]
