"""Loss, accuracy and a job's metrics on a test set: each rank on its part of it, or one rank on all of it.

Only scoring uses the scored copy of a model: it has modes, buffers and modules' attributes of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from polytempo.collectives import tree
from polytempo.core import Port
from polytempo.core.calls.refusals import refuse
from polytempo.data.mover import BatchMover
from polytempo.federated.client_tests import ClientTests, spread
from polytempo.large_batch.weight_average import WeightAverage
from polytempo.spec.job import Data, Job
from polytempo.spec.objective import judged, part_weight
from polytempo.spec.precision import Precision
from polytempo.spec.rates.plateau import Plateau
from polytempo.spec.run_options import RunOptions, goals_met
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.job_metrics import Metrics
from polytempo.training.job.sample_batches import SampleBatches
from polytempo.training.precision.quantised_weights import kept_float32, lowered
from polytempo.training.precision.reduced_forward import dtype_of, install

_FEWEST = 8
"""Samples that are worth a rank's while: many ranks leave a small test set to the first few."""


class StandardizedTarget(NamedTuple):
    """A column of numbers that a model learns less its mean, over its deviation."""

    name: str
    mean: float
    deviation: float


class Score(NamedTuple):
    """Means over the test set."""

    loss: float
    accuracy: float | None
    metrics: Mapping[str, float] = MappingProxyType({})
    """The job's `metrics`, by name."""
    target: StandardizedTarget | None = None
    """The unit of loss and metrics, where `score` of a trained model knows it."""

    def row(self) -> dict[str, float | None]:
        """Entries of a row about the test set."""
        return {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}


class OwnTensors(Protocol):
    """Tensors that clients keep."""

    def holder(self, client: int, size: int) -> int:
        """The rank of `size` that has a client's."""

    def get(self, client: int) -> Mapping[str, Tensor]:
        """A client's, by the model's names; none for a client that keeps none."""


class Evaluation:
    """A job's test set, and a model to score with. Raises ValueError for a test set without a length.

    Memory: the model's modules once more; parameters are lent for the time of a score, buffers copied. So a module
    must allow `copy.deepcopy`; attributes that are neither parameters nor buffers stay as they are when this is made.
    With a `precision` a score is computed in its bits.
    """

    def __init__(self, job: Job, model: nn.Module, data: Data, precision: Precision | None = None) -> None:
        assert data.test is not None
        self._job = job
        self._test = SampleBatches(data.test, data.collate, "a test set")
        self.length = self._test.length
        self._clients = data.test if isinstance(data.test, ClientTests) else None
        self._numbers = 4 + 2 * (0 if self._clients is None else self._clients.num_clients)
        self._model = copied_modules(model).eval()
        self._mover = BatchMover(next((p.device for p in model.parameters()), None))
        self.metrics = Metrics(job.metrics)
        own = replace(job, metrics={})
        self.more = {
            name: Evaluation(own, model, Data(data.train, test, data.collate), precision)
            for name, test in data.more.items()
        }
        """Evaluations of further test sets."""
        self._lowered: dict[str, Precision] = {}
        if precision is not None and precision.is_quantised:
            exact = kept_float32(model, precision)
            self._lowered = {name: precision for name, p in model.named_parameters() if id(p) not in exact}
        elif precision is not None:
            install(self._model, dtype_of(precision))

    def sums(self, tensors: Mapping[str, Tensor], rank: int, size: int, own: OwnTensors | None = None) -> Tensor:
        """[the loss's divisor, its sum, right ones, predictions] of `rank`'s part of the test set, float64; then right
        ones of each client and predictions of each, where the test set is clients'.

        `tensors`: the parameters and buffers to score, by name. They are not written to. `own`: tensors of clients in
        the place of some of them, on their own samples. `metrics` have seen that part then, and nothing else.
        """
        self.metrics.begin()
        return self._sums(tensors, rank, size, own)

    def score(self, tensors: Mapping[str, Tensor], parts: int = 1, own: OwnTensors | None = None) -> Score:
        """Score `tensors` on the whole test set, in as many parts as ranks would: so it is the same to the bit."""
        sums = torch.zeros(parts, self._numbers, dtype=torch.float64)
        self.metrics.begin()
        for part in range(parts):
            sums[part] = self._sums(tensors, part, parts, own)
        score = means(sums.sum(0))
        score = score._replace(metrics={**score.metrics, **self.metrics.of([self.metrics.seen])})
        return joined(score, {name: each.score(tensors, parts) for name, each in self.more.items()})

    @property
    def measures(self) -> bool:
        """True if the job has metrics."""
        return bool(self._job.metrics)

    def _scorers(self, size: int) -> int:
        return min(size, -(-self.length // _FEWEST))

    def _sums(self, tensors: Mapping[str, Tensor], rank: int, size: int, own: OwnTensors | None) -> Tensor:
        sums = torch.zeros(self._numbers, dtype=torch.float64)
        if own is not None and self._clients is not None:
            for client, (start, stop) in enumerate(self._clients.ranges):
                if start < stop and own.holder(client, size) == rank:
                    with self._lent({**tensors, **own.get(client)}):
                        sums += self._between(start, stop)
            return sums
        scorers = self._scorers(size)
        if rank >= scorers:
            return sums
        with self._lent(tensors):
            return self._between(*(self.length * r // scorers for r in (rank, rank + 1)))

    def _between(self, start: int, stop: int) -> Tensor:
        sums = torch.zeros(self._numbers, dtype=torch.float64)
        with torch.no_grad():
            for samples, batch in self._mover.ahead((n, batch) for batch, n in self._test.between(start, stop)):
                loss, right, seen = judged(self._job, self._model, batch, samples)
                if seen is not None:
                    self.metrics.add(*seen)
                counts = (0.0, 0.0) if right is None else (float(right.sum()), float(right.numel()))
                weight = part_weight(self._job, batch, samples)
                total = float(loss) * weight if weight else 0.0
                sums[:4] += torch.tensor([weight, total, *counts], dtype=torch.float64)
                if self._clients is not None and right is not None:
                    sums[4:] += self._clients.counts(start, right, samples).flatten()
                start += samples
        return sums

    @contextmanager
    def _lent(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the model has these parameters, and copies of the buffers, which it may write to."""
        own = [*self._model.named_parameters(), *self._model.named_buffers()]
        for name, tensor in own:
            lent = tensors[name].detach()
            if name in self._lowered:
                lent = lowered(lent, self._lowered[name])
            tensor.data = lent if isinstance(tensor, nn.Parameter) else lent.clone()
        try:
            yield
        finally:
            for _, tensor in own:
                tensor.data = tensor.new_empty(0)


async def evaluate(
    port: Port, evaluation: Evaluation, tensors: Mapping[str, Tensor], own: OwnTensors | None = None
) -> Score:
    """Score `tensors` with all ranks, each on its part of the test set, and add up. A virtual world charges nothing."""
    sums = await port.compute(lambda: evaluation.sums(tensors, port.rank, port.size, own), 0.0)
    score = means(await tree(port, sums))
    if evaluation.measures:
        score = score._replace(metrics={**score.metrics, **await evaluation.metrics.gathered(port)})
    return joined(score, {name: await evaluate(port, each, tensors) for name, each in evaluation.more.items()})


def joined(score: Score, more: Mapping[str, Score]) -> Score:
    """The score with the scores of further test sets among its metrics: `noisy/loss`, `noisy/accuracy`."""
    found = {f"{name}/{key}": value for name, each in more.items() for key, value in each.row().items()}
    return score._replace(metrics={**score.metrics, **{k: v for k, v in found.items() if v is not None}})


async def of_first_part(model: Port, score: Score) -> Score:
    """The score that the rank of the model's first part has, on all ranks of `model`."""
    if model.size == 1:
        return score
    accuracy = torch.nan if score.accuracy is None else score.accuracy
    names = sorted(score.metrics)  # the same on all ranks: parts are scored by the ranks of the first one
    mine = [score.loss, accuracy, *(score.metrics[name] for name in names)]
    loss, accuracy, *others = (await model.broadcast(torch.tensor(mine, dtype=torch.float64))).tolist()
    return Score(loss, None if math.isnan(accuracy) else accuracy, dict(zip(names, others, strict=True)))


def means(sums: Tensor) -> Score:
    """The score from `Evaluation.sums`, added up over all parts."""
    divisor, total_loss, num_correct, num_predictions = sums[:4].tolist()
    accuracy = num_correct / num_predictions if num_predictions else None
    return Score(total_loss / (divisor or 1), accuracy, spread(sums[4:].reshape(2, len(sums[4:]) // 2)))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own parameters and buffers by name."""
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def copied_modules(model: nn.Module) -> nn.Module:
    """The model's modules once more, around the same memory of parameters and buffers."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): buffer.detach() for buffer in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"a model is scored in a copy of its own, and {type(model).__name__} cannot be copied: {error}; give the "
            "module that holds this a __deepcopy__, or make it when forward needs it"
        ) from error


def evaluation_of(spec: RunSpec, model: nn.Module, data: Data) -> Evaluation | None:
    """Scores of a run's model, in the run's precision; None where there is no test set."""
    return None if data.test is None else Evaluation(spec.job, model, data, spec.options.precision)


def check_goals(job: Job, options: RunOptions, *, has_test: bool, more: Iterable[str] = ()) -> None:
    """Raises ValueError for goals and callbacks that need a number that no score has. `more`: further test sets."""
    if options.until and not has_test:
        raise ValueError("until needs a test set, and this job has none; use epochs or steps")
    if options.eval_every is not None and not has_test:
        raise ValueError("eval_every needs a test set, and this job has none; leave it out")
    check_measures(job, options.until, more)
    for callback in options.callbacks:
        for metric in getattr(callback, "measures", ()):
            if not has_test:
                raise ValueError(f"{callback} needs a test set, and job {job.name} has none; leave it out")
            _check_measure(job, metric, f"callback {callback}", more)


def check_plateau(spec: RunSpec, schedule: LRScheduler | None, *, has_test: bool, more: Iterable[str] = ()) -> None:
    """Refuse a learning rate that falls by scores where ranks have none together, and metrics that no score has."""
    if not isinstance(schedule, Plateau):
        return
    missing = {"plateau"} | (set() if has_test else {"no test set"})
    missing |= set() if spec.strategy.rounds is None else {"client rounds"}
    refuse(spec.strategy.features | missing, strategy=spec.strategy)
    _check_measure(spec.job, schedule.metric, f"plateau(metric={schedule.metric})", more)


def check_measures(job: Job, until: Mapping[str, float], more: Iterable[str] = ()) -> None:
    """Raises ValueError for a goal of a number that the job's scores do not have."""
    for name in until:
        _check_measure(job, name, f"until {name}=…", more)


def measured(job: Job, more: Iterable[str] = ()) -> list[str]:
    """Names of a score's numbers; a metric `f1` may make several, such as `f1/0`. `more`: further test sets."""
    own = [*(["accuracy"] if job.correct is not None else []), "loss"]
    return [*own, *job.metrics, *(f"{test}/{name}" for test in more for name in own)]


def _check_measure(job: Job, name: str, asks: str, more: Iterable[str]) -> None:
    known = measured(job, more)
    if name in known or name.partition("/")[0] in job.metrics:
        return
    shown = ", ".join(known)
    if name == "accuracy":
        lacks = f"needs a job with an accuracy, and job {job.name} has none"
        raise ValueError(f"{asks} {lacks}; give it `correct`, or take one of {shown}")
    raise ValueError(
        f"{asks}: scores of job {job.name} have {shown}; give one of these, or add {name} to the job's metrics"
    )


def meets(score: Score | None, options: RunOptions) -> bool | None:
    """True if a score reaches the goals of `until`; None without goals."""
    if not options.until:
        return None
    assert score is not None
    return goals_met(score.row(), options.until)


AVERAGE, AVERAGED_STEPS = "average/", "averaged steps"


def average_of(model: nn.Module, options: RunOptions) -> WeightAverage | None:
    """The average of `model`, which has its first weights; None for options without it."""
    return None if options.ema is None else WeightAverage(model, options.ema)
