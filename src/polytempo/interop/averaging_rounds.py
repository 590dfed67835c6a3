"""`map_reduce`: parameter averaging over partitions that another system holds: Spark's, dask's, or plain lists.

    broadcast W_i ──▶ map: partition k trains a copy ──▶ n_k, n_k W_k ──▶ reduce: a tree of sums ──▶ Σ n_k W_k / Σ n_k

Messages are safetensors in `bytes`: the state of training to the partitions, and weighted sums in float64 back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial, reduce
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import default_collate

from polytempo.core.calls.refusals import refuse
from polytempo.core.state import Saved
from polytempo.spec.job import Job, check_job
from polytempo.spec.job_calls import called, model_of, optimizer_of
from polytempo.spec.objective import loss_of
from polytempo.training.checkpoint.optimizer_state import (
    begin_states,
    moments,
    optimizer_restore,
    optimizer_saved,
    steps_each_by_itself,
)
from polytempo.training.checkpoint.packed_state import packed, unpacked
from polytempo.training.model.randomness import kept_random_states, seed_step
from polytempo.training.step.buffers import ModelBuffers
from polytempo.training.step.guard import check_final, unfinite_names

Collate = Callable[[list[Any]], Any]

_ONE_AT_A_TIME = threading.Lock()
"""Held while a partition trains: threads of a dask worker share torch's global generator."""


class Averaged(NamedTuple):
    """The result of `map_reduce`."""

    model: nn.Module
    """The model with the last round's means, in training mode."""
    optimizer: Optimizer
    """The optimizer of its parameters, with the averaged moments where they were averaged."""
    samples: int
    """Samples of a round, over all partitions."""
    losses: tuple[float, ...]
    """Mean training loss of each round, over its samples."""


class _Recipe(NamedTuple):
    """The settings that each partition trains by."""

    job: Job
    lr: float
    batch_size: int
    optimizer_state: bool
    seed: int
    collate: Collate


def map_reduce(
    job: Job,
    partitions: Any,
    *,
    rounds: int = 1,
    lr: float | None = None,
    batch_size: int | None = None,
    optimizer_state: bool = True,
    seed: int = 0,
    collate: Collate | None = None,
) -> Averaged:
    """Train `job` by parameter averaging as map and reduce, `rounds` times, on `partitions` of samples.

        from polytempo.interop import map_reduce

        averaged = map_reduce(job, session.sparkContext.parallelize(samples, 4), rounds=10)

    W_{i+1} = Σ_k n_k W_{i,k} / Σ_k n_k, where W_{i,k} is W_i after one pass over the n_k samples of partition k, batch
    after batch in their order. The sum is associative, in float64. Equal partitions give the parameters of
    `parameter_averaging(period)` with as many workers and the steps of a partition as `period`; one plain SGD step of
    rate α on K equal parts gives W_{i+1} = W_i - (α/nm) Σ ∂e/∂W, one step on all nm samples.

    `partitions`: an RDD of Spark, a Bag of dask, or an iterable of partitions, each an iterable of samples. `collate`
    makes a batch of a list of samples (None: torch's `default_collate`); the job's `data` is not called. Empty
    partitions count nothing. Running statistics of norms are averaged too, and, with `optimizer_state`, the
    optimizer's moments. Counts (Adam's steps) and other buffers are taken from the partition with the most samples.
    Without `optimizer_state` each round begins with a new optimizer; under `parameter_averaging` workers keep theirs.

    Cost of a round: the parameters (and moments) to each partition; 8 bytes for each of their numbers from each
    partition, in a tree of sums. Tasks of an executor or worker need Polytempo.

    Errors: ValueError for other partitions, partitions without a sample, and optimizers or models without a mean;
    Incompatible for a job with a schedule; NotFinite where a mean is not finite.

    Source: M. Zinkevich et al., "Parallelized Stochastic Gradient Descent", 2010, one round; P. Moritz et al.,
    "SparkNet", 2016, rounds on Spark. Both take equal parts; the weights n_k are for unequal ones.
    """
    refuse({"map and reduce"} | ({"schedule"} if check_job(job).schedule is not None else set()), job=job.name)
    if rounds < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"rounds and batch_size must be at least 1, got {rounds} and {batch_size}")
    performed = _performer(partitions)
    recipe = _Recipe(job, lr or job.lr, batch_size or job.batch_size, optimizer_state, seed, collate or default_collate)
    with kept_random_states():
        model, optimizer = _made(recipe)
        unchecked = unfinite_names(model)
        state, losses, samples = _packed(*_state(recipe, model, optimizer)), list[float](), 0
        for number in range(rounds):
            total = performed(partial(_trained, recipe, number), state)
            if not total:
                raise ValueError("no partition has a sample")
            state, samples, loss = _mean(total)
            losses.append(loss)
        _restore(recipe, model, optimizer, state)
    check_final(dict(model.named_parameters()), unchecked, rounds)
    return Averaged(model, optimizer, samples, tuple(losses))


# --- map


def _trained(recipe: _Recipe, number: int, state: bytes, index: int, samples: Iterable[Any]) -> bytes:
    """Train a copy on a partition in round `number`; the message of its weighted state, empty without samples."""
    with _ONE_AT_A_TIME, kept_random_states():
        model, optimizer = _made(recipe)
        _restore(recipe, model, optimizer, state)
        rest, num_samples, loss = iter(samples), 0, 0.0
        for step, part in enumerate(iter(lambda: list(islice(rest, recipe.batch_size)), [])):
            batch = called(recipe.job, "collate(samples)", recipe.collate, part)
            seed_step(recipe.seed, index, step, f"round {number}")
            optimizer.zero_grad()
            value = loss_of(recipe.job, model, batch)
            value.backward()
            optimizer.step()
            num_samples += len(part)
            loss += len(part) * float(value.detach())
        if not num_samples:
            return b""
        means, others = _state(recipe, model, optimizer)
        about = {"samples": num_samples, "loss": loss, "from": [num_samples, -index]}
        about["dtypes"] = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in means.items()}
        sums = {f"sum/{name}": num_samples * tensor.double() for name, tensor in means.items()}
        return _packed(
            sums, Saved({f"rest/{name}": each for name, each in others.tensors.items()}, others.scalars), about
        )


def _made(recipe: _Recipe) -> tuple[nn.Module, Optimizer]:
    torch.default_generator.manual_seed(recipe.seed)
    model = model_of(recipe.job).train()
    optimizer = optimizer_of(recipe.job, model, recipe.lr)
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS keeps a history of its own directions, which have no mean; use SGD or Adam")
    if any(parameter.is_complex() for parameter in model.parameters()):
        raise ValueError("map_reduce sums in float64, and this model has complex parameters; use parameter_averaging()")
    return model, optimizer


def _state(recipe: _Recipe, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], Saved]:
    """The tensors that partitions average, and the rest of the model and the optimizer."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = {f"model/{name}": p.detach() for name, p in [*model.named_parameters(), *model.named_buffers()]}
    averaged = {f"model/{name}" for name in [*trained, *ModelBuffers(model, "average").averaged()]}
    scalars = {}
    if recipe.optimizer_state:
        fresh = {p: torch.strided for p in trained.values() if p not in optimizer.state}
        if fresh and optimizer.state and steps_each_by_itself(optimizer):
            begin_states(optimizer, fresh, nullcontext)
        saved = optimizer_saved(optimizer)
        shared = {id(moment) for moment in moments(trained, optimizer).values()}
        averaged |= {name for name, tensor in saved.tensors.items() if id(tensor) in shared}
        tensors |= saved.tensors
        scalars = saved.scalars
    return (
        {name: tensor for name, tensor in tensors.items() if name in averaged},
        Saved({name: tensor for name, tensor in tensors.items() if name not in averaged}, scalars),
    )


@torch.no_grad()
def _restore(recipe: _Recipe, model: nn.Module, optimizer: Optimizer, state: bytes) -> None:
    tensors, about = unpacked(state)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.copy_(tensors[f"model/{name}"])
    if recipe.optimizer_state:
        optimizer_restore(optimizer, Saved(tensors, about["scalars"]))


# --- reduce


def _added(first: bytes, second: bytes) -> bytes:
    """The sum of two partitions' messages: associative up to float64's rounding. Empty messages are zeros."""
    if not first or not second:
        return first or second
    (one, about), (two, other) = unpacked(first), unpacked(second)
    if about["from"] < other["from"]:
        one, about, two, other = two, other, one, about
    for name, tensor in two.items():
        if name.startswith("sum/") and name in one:
            one[name] += tensor
        else:
            one.setdefault(name, tensor)
    about |= {key: about[key] + other[key] for key in ("samples", "loss")}
    about["dtypes"] = other["dtypes"] | about["dtypes"]
    return _packed(one, Saved({}, about["scalars"]), about)


def _mean(total: bytes) -> tuple[bytes, int, float]:
    """The state that the next round begins with, the samples, and their mean loss."""
    tensors, about = unpacked(total)
    samples = about["samples"]
    state = {name.removeprefix("rest/"): tensor for name, tensor in tensors.items() if name.startswith("rest/")}
    for name, dtype in about["dtypes"].items():
        state[name] = (tensors[f"sum/{name}"] / samples).to(getattr(torch, dtype))
    return _packed(state, Saved({}, about["scalars"])), samples, about["loss"] / samples


def _packed(tensors: Mapping[str, Tensor], rest: Saved, about: Mapping[str, Any] | None = None) -> bytes:
    return packed({**tensors, **rest.tensors}, {**(about or {}), "scalars": rest.scalars})


# --- systems

Train = Callable[[bytes, int, Iterable[Any]], bytes]


def _performer(partitions: Any) -> Callable[[Train, bytes], bytes]:
    """The map and the reduce of a round on these partitions."""
    module = type(partitions).__module__
    kind = module.partition(".")[0]
    if module.startswith("dask.bag"):
        return partial(_by_dask, partitions)
    if kind != "dask" and hasattr(partitions, "mapPartitionsWithIndex"):
        return partial(_by_spark, partitions)
    if kind in ("pyspark", "dask") or not isinstance(partitions, Iterable):
        raise ValueError(
            f"partitions are an RDD of Spark, a Bag of dask or an iterable of iterables, not a {type(partitions)}; "
            "of a Spark DataFrame give frame.rdd.map(sample_of_row), of a dask DataFrame frame.to_bag()"
        )
    held = list(partitions)
    return lambda train, state: reduce(_added, (train(state, index, each) for index, each in enumerate(held)), b"")


def _by_spark(rdd: Any, train: Train, state: bytes) -> bytes:
    held = rdd.context.broadcast(state)

    def mapped(index: int, samples: Iterator[Any]) -> Iterator[bytes]:
        yield train(held.value, index, samples)

    try:
        total: bytes = rdd.mapPartitionsWithIndex(mapped).treeReduce(_added)
    finally:
        held.destroy()
    return total


def _by_dask(bag: Any, train: Train, state: bytes) -> bytes:
    """Pairs, and pairs of pairs, on the current client, or on dask's threads without one."""
    from dask import delayed

    held = delayed(state)
    found = [delayed(train)(held, index, samples) for index, samples in enumerate(bag.to_delayed())]
    while len(found) > 1:
        found = [delayed(_added)(*pair) if len(pair) > 1 else pair[0] for pair in _pairs(found)]
    total: bytes = found[0].compute()
    return total


def _pairs(given: list[Any]) -> Iterator[list[Any]]:
    return (given[first : first + 2] for first in range(0, len(given), 2))
