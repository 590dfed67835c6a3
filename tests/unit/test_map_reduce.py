"""Parameter averaging as map and reduce: equal to the strategy, to the survey's equation, and to a definition."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

import polytempo as pt
from helpers import CLUSTER
from polytempo.core import Port
from polytempo.core.calls.refusals import Incompatible
from polytempo.errors import NotFinite
from polytempo.interop import map_reduce
from polytempo.strategies import parameter_averaging
from polytempo.training.step.replica import Replica
from polytempo.worlds import VirtualWorld

BATCH, BATCHES, ROUNDS, RATE = 4, 3, 3, 0.05
EXACT: dict[str, float] = {"rtol": 0, "atol": 1e-12}

Sample = tuple[Tensor, Tensor]


def net() -> nn.Module:
    """Without a bias before the norm: its gradient is rounding alone, which Adam makes larger."""
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def no_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], Optimizer]] = {
    "sgd": lambda parameters, lr: SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-2),
    "adam": lambda parameters, lr: Adam(parameters, lr=lr, amsgrad=True),
}


def job_of(optimizer: str = "sgd", model: Callable[[], nn.Module] = net) -> pt.Job:
    return pt.Job(
        model=model,
        data=lambda path: pt.Data(torch.utils.data.TensorDataset(torch.zeros(1, 5))),
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        lr=RATE,
        batch_size=BATCH,
    )


def samples(count: int, seed: int = 1) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return list(zip(inputs, torch.randint(3, (count,), generator=generator), strict=True))


def parts(sizes: Sequence[int]) -> list[list[Sample]]:
    rest = iter(samples(sum(sizes)))
    return [list(islice(rest, size)) for size in sizes]


def made(job: pt.Job, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return job.model()


def stacked(part: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])


def passed(job: pt.Job, model: nn.Module, optimizer: Optimizer, part: Sequence[Sample]) -> Iterator[None]:
    """One pass over a partition, in plain torch; stops after each step."""
    for first in range(0, len(part), job.batch_size):
        inputs, targets = stacked(part[first : first + job.batch_size])
        optimizer.zero_grad()
        job.loss(model(inputs), targets).backward()
        optimizer.step()
        yield


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(dict(found.state_dict()), dict(expected.state_dict()), **EXACT)


# --- laws


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_equals_the_strategy_with_the_same_partitions(optimizer: str, workers: int) -> None:
    """Parameters, running statistics and moments, after three rounds of three steps."""
    job, partitions = job_of(optimizer), parts([BATCH * BATCHES] * workers)
    nets = [made(job) for _ in range(workers)]
    replicas = [
        Replica(each, job.optimizer(each.parameters(), RATE), parameter_averaging(period=BATCHES), workers)
        for each in nets
    ]

    async def program(port: Port) -> None:
        replica = replicas[port.rank]
        for _ in range(ROUNDS):
            for _ in passed(job, nets[port.rank], replica.optimizer, partitions[port.rank]):
                await replica.finish_step(port)

    VirtualWorld(CLUSTER, workers).run(program)
    found = map_reduce(job, partitions, rounds=ROUNDS)
    assert_equal(found.model, nets[0])
    for mine, other in zip(found.model.parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(found.optimizer.state[mine], replicas[0].optimizer.state[other], **EXACT)
    assert (found.samples, len(found.losses)) == (workers * BATCH * BATCHES, ROUNDS)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_one_plain_step_of_equal_parts_is_one_step_on_all_samples(workers: int) -> None:
    """The survey's W_{i+1} = (1/K) Σ W_{i+1,k} = W_i - (α/nm) Σ ∂e/∂W, for K = n workers with m samples each."""
    job, partitions = replace(job_of(model=no_norm), batch_size=6), parts([6] * workers)
    expected = made(job)
    for _ in range(ROUNDS):
        gradients = [torch.zeros_like(p) for p in expected.parameters()]
        for x, y in (sample for part in partitions for sample in part):  # Σ ∂e/∂W, sample by sample
            found = torch.autograd.grad(job.loss(expected(x[None]), y[None]), list(expected.parameters()))
            gradients = [total + each for total, each in zip(gradients, found, strict=True)]
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter -= RATE / (workers * 6) * gradient
    assert_equal(map_reduce(job, partitions, rounds=ROUNDS).model, expected)


@pytest.mark.parametrize("optimizer_state", [True, False])
def test_unequal_partitions_weigh_their_samples(optimizer_state: bool) -> None:
    """W ← Σ n_k W_k / Σ n_k and so the momentum, or momentum from 0 in each round; empty partitions count nothing."""
    job, sizes = job_of("momentum", no_norm), [9, 0, 4, 1]
    partitions = parts(sizes)
    expected = made(job)
    momenta = [torch.zeros_like(p) for p in expected.parameters()]
    for _ in range(ROUNDS):
        weighed: list[list[Tensor]] = []
        for part in partitions:
            copy = deepcopy(expected)
            optimizer = job.optimizer(copy.parameters(), RATE)
            for parameter, momentum in zip(copy.parameters(), momenta, strict=True):
                optimizer.state[parameter]["momentum_buffer"] = momentum.clone()
            for _ in passed(job, copy, optimizer, part):
                pass
            both = [*copy.parameters(), *(optimizer.state[p]["momentum_buffer"] for p in copy.parameters())]
            weighed.append([len(part) / sum(sizes) * each.detach() for each in both])
        means = [torch.stack(each).sum(0) for each in zip(*weighed, strict=True)]
        with torch.no_grad():
            for parameter, value in zip(expected.parameters(), means, strict=False):
                parameter.copy_(value)
        if optimizer_state:
            momenta = means[len(means) // 2 :]
    found = map_reduce(job, partitions, rounds=ROUNDS, optimizer_state=optimizer_state)
    assert_equal(found.model, expected)
    assert found.samples == sum(sizes)


class Rdd:
    """The four calls of a Spark RDD that are used. It sums in a random tree, and looks at values on the wire."""

    def __init__(self, partitions: Sequence[Sequence[Any]], seed: int) -> None:
        self.partitions, self.random, self.context = partitions, random.Random(seed), self
        self.mapped: Any = None
        self.destroyed = 0

    def broadcast(self, value: object) -> Any:
        assert type(value) is bytes
        self.value = value
        return self

    def destroy(self) -> None:
        self.destroyed += 1

    def mapPartitionsWithIndex(self, function: Any) -> Rdd:
        self.mapped = [element for i, part in enumerate(self.partitions) for element in function(i, iter(part))]
        return self

    def treeReduce(self, function: Any) -> Any:
        rest = list(self.mapped)
        assert {type(each) for each in rest} == {bytes}
        while len(rest) > 1:
            first = rest.pop(self.random.randrange(len(rest)))
            second = rest.pop(self.random.randrange(len(rest)))
            rest.append(function(first, second))
        return rest[0]


@pytest.mark.parametrize("seed", range(4))
def test_any_tree_of_sums_gives_the_same(seed: int) -> None:
    """Only bytes travel, and each round's broadcast is given up."""
    job, partitions = job_of("adam"), parts([8, 3, 0, 12, 6])
    rdd = Rdd(partitions, seed)
    found, expected = map_reduce(job, rdd, rounds=ROUNDS), map_reduce(job, partitions, rounds=ROUNDS)
    assert_equal(found.model, expected.model)
    torch.testing.assert_close(found.optimizer.state_dict()["state"], expected.optimizer.state_dict()["state"], **EXACT)
    assert found.losses == pytest.approx(expected.losses, abs=1e-12)
    assert rdd.destroyed == ROUNDS


def test_counts_are_those_of_the_partition_with_the_most_samples() -> None:
    found = map_reduce(job_of("adam"), parts([2, 12, 6]), rounds=2)
    assert {int(state["step"]) for state in found.optimizer.state.values()} == {6}
    assert found.model.get_buffer("1.num_batches_tracked").item() == 6


class OneOfTwo(nn.Module):
    """Uses its second layer only for batches with a positive number in front."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if x[0, 0] > 0 else out


def test_a_parameter_that_a_partition_does_not_use_has_moments_of_zero_there() -> None:
    job = job_of("adam", lambda: OneOfTwo().double())
    [x, y] = stacked(samples(8))
    x[:4, 0], x[4:, 0] = -1, 1
    halves = [list(zip(x[:4], y[:4], strict=True)), list(zip(x[4:], y[4:], strict=True))]
    alone, both = map_reduce(job, halves[1:]), map_reduce(job, halves)
    mine, other = both.model.get_parameter("second.weight"), alone.model.get_parameter("second.weight")
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(both.optimizer.state[mine][key], alone.optimizer.state[other][key] / 2, **EXACT)


def test_it_repeats_and_leaves_the_random_states_alone() -> None:
    job = job_of(model=lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)))
    job = replace(job, loss=lambda output, target: nn.functional.cross_entropy(output.double(), target))
    partitions = [[(x.float(), y) for x, y in part] for part in parts([8, 8])]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again = map_reduce(job, partitions, rounds=2), map_reduce(job, partitions, rounds=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(again.model, first.model)
    other = map_reduce(job, partitions, rounds=2, seed=1)
    assert not torch.equal(other.model.get_parameter("1.weight"), first.model.get_parameter("1.weight"))
    assert {p.dtype for p in first.model.parameters()} == {torch.float32}


def test_digits_are_learned() -> None:
    train, test = pt.data.digits()
    rows = [train[i] for i in range(len(train))]
    found = map_reduce(pt.jobs.find("digits"), [rows[i::4] for i in range(4)], rounds=5)
    with torch.no_grad():
        right = found.model.eval()(test.tensors[0]).argmax(1) == test.tensors[1]
    assert right.double().mean() > 0.9
    assert found.losses[-1] < found.losses[0] / 2


# --- refusals


def test_a_schedule_is_refused() -> None:
    job = replace(job_of(), schedule=lambda optimizer, steps: StepLR(optimizer, steps))
    with pytest.raises(Incompatible, match=r"^PT1801"):
        map_reduce(job, parts([4]))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.complex128))


class DataFrame:
    __module__ = "pyspark.sql.dataframe"


class Delayed:
    """A value of dask, which answers to every name."""

    __module__ = "dask.delayed"

    def __getattr__(self, name: str) -> Any:
        return self


WRONG = [
    (partial(map_reduce, job_of(), [[], []]), "no partition has a sample"),
    (partial(map_reduce, job_of(), []), "no partition has a sample"),
    (partial(map_reduce, job_of(), DataFrame()), r"frame\.rdd"),
    (partial(map_reduce, job_of(), Delayed()), "to_bag"),
    (partial(map_reduce, job_of(), 3), "not a <class 'int'>"),
    (partial(map_reduce, job_of(), parts([4]), rounds=0), "at least 1"),
    (partial(map_reduce, job_of(), parts([4]), batch_size=0), "at least 1"),
    (partial(map_reduce, replace(job_of(), optimizer=lambda p, lr: LBFGS(p, lr=lr)), parts([4])), "no mean"),
    (partial(map_reduce, job_of(model=Spectrum), parts([4])), "complex"),
    (partial(map_reduce, "digits", parts([4])), "a job is"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_call_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NotFinite):
        map_reduce(job_of(), parts([8, 8]), lr=float("inf"))
