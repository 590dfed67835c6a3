"""`score`: a loop's own scores of a data set, exact over ranks.

21 samples on 4 ranks     rank 0: 0 … 4 │ rank 1: 5 … 9 │ rank 2: 10 … 14 │ rank 3: 15 … 20     each once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polytempo.core import Port
from polytempo.spec.job_calls import described
from polytempo.training.job.job_metrics import Metrics, sum_up
from polytempo.training.job.sample_batches import SampleBatches
from polytempo.training.model.agree import gather_json
from polytempo.training.model.randomness import kept_random_states
from polytempo.worlds.process.process_world import current


def score(
    function: Callable[[Any], Any],
    data: Any,
    metrics: Mapping[str, Any] | None = None,
    *,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Score `data` with all ranks, each on a part of its own; the numbers of one process, the same on all ranks.

        found = pt.score(lambda batch: {"accuracy": model(batch[0]).argmax(-1) == batch[1]}, test)
        found = pt.score(lambda batch: (model(batch[0]), batch[1]), test, {"f1": f1_score})

    `function` is called with each batch, without gradients. Without `metrics` it returns a dict: a tensor is averaged
    over all its elements, a pair (sum, count) over the counts. With `metrics` it returns the pair (predictions,
    targets); each metric gets the predictions and targets of all samples in the order of the data, as a job's `metrics`
    do.

    `data` has a length and is the same on all ranks: a data set, or a loader (its order and sampler do not count).
    `batch_size`: the loader's, or 512. All ranks must call it; `Handle.evaluate` scores the ranks' common model.

    Cost: 1/N of the data on each of N ranks; without `metrics` 16 bytes a name and rank, with metrics the predictions
    and targets, or torchmetrics' states, to rank 0. Sums are of float64.

    Errors: ValueError for data without a length, or another answer of `function`.
    """
    world = current()
    with kept_random_states(), torch.no_grad():
        return world.drive(scored(world.port, function, data, metrics, batch_size))


async def scored(
    port: Port,
    function: Callable[[Any], Any],
    data: Any,
    metrics: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
) -> dict[str, float]:
    """`score` over the ranks of `port`."""
    samples = SampleBatches(data, None, "data to score")
    size = batch_size or (data.batch_size if isinstance(data, DataLoader) else None) or 512
    start, stop = (samples.length * rank // port.size for rank in (port.rank, port.rank + 1))
    batches = (batch for batch, _ in samples.between(start, stop, size))
    if metrics is None:
        return sum_up(await gather_json(port, _sums(function, batches)))
    seen = Metrics(metrics)
    for batch in batches:
        answer = function(batch)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ValueError(f"with metrics the function returns (predictions, targets), and not {described(answer)}")
        seen.add(*answer)
    return await seen.gathered(port)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model's modules are in the mode of evaluation, without gradients; random states are as before
    afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with kept_random_states(), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _sums(function: Callable[[Any], Any], batches: Iterator[Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for batch in batches:
        answer = function(batch)
        if not isinstance(answer, Mapping):
            raise ValueError(
                f"without metrics the function returns a dict of tensors or pairs (sum, count), and not "
                f"{described(answer)}; write {{'accuracy': …}} around it, or give metrics"
            )
        for name, value in answer.items():
            total, count = _sum(name, value)
            before = found.setdefault(name, [0.0, 0.0])
            found[name] = [before[0] + total, before[1] + count]
    return found


def _sum(name: str, value: Any) -> tuple[float, float]:
    if isinstance(value, Tensor):
        return float(value.sum(dtype=torch.float64)), float(value.numel())
    if isinstance(value, tuple) and len(value) == 2:
        return float(value[0]), float(value[1])
    raise ValueError(
        f"{name} is {described(value)}; expected a tensor with a number for each sample, which are averaged, or a pair "
        "(sum, count)"
    )
