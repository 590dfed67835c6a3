"""Metrics of a test set, exact over ranks: each rank sees a part, and rank 0 computes from all parts.

rank 0   its part ─▶ predictions, targets ─┐
rank 1   its part ─▶ predictions, targets ─┴─▶ in the order of the data ─▶ metric(predictions, targets) on rank 0

An object of torchmetrics brings its states in place of the predictions, where sums, extremes or joined lists make the
states of parts the state of the whole. Metrics of scores take a batch for logits where a value is outside of 0 to 1, so
they depend on the batches: they see the whole set together.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from polytempo.core import Port
from polytempo.training.model.agree import gather_json

_EXACT = {"dim_zero_sum": torch.sum, "dim_zero_max": torch.amax, "dim_zero_min": torch.amin, "dim_zero_cat": None}
"""Reductions of torchmetrics, by name, that make the state of the whole from the states of parts."""
_BY_LARGEST = {"MulticlassStatScores", "MulticlassConfusionMatrix", "MulticlassExactMatch"}
"""Bases in torchmetrics of metrics that take the largest score of a sample, which logits and probabilities share."""


class Seen(NamedTuple):
    """A part's predictions and targets, and the states of metrics that have seen them; None: none of it was needed."""

    pair: Any
    states: Mapping[str, Mapping[str, Any]]


class Metrics:
    """The `metrics` of one part of a test set, or of all of it. Metrics that are objects are copied.

    A metric is a function `metric(predictions, targets)`, or an object with `reset()`, `update(predictions, targets)`
    and `compute()`, as an object of torchmetrics. Its answer is a number, a tensor, or a dict of these.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._given = {name: _own(metric) for name, metric in _flat(metrics).items()}
        self._add_up = {name for name, metric in self._given.items() if _adds_up(metric)}
        self._adding, self._pairs = self._add_up, list[Any]()
        self.begin()

    def begin(self) -> None:
        """Begin another evaluation: forget all batches."""
        self._adding, self._pairs = self._add_up, []
        for name in self._adding:
            self._given[name].reset()

    def add(self, predictions: Any, targets: Any) -> None:
        """See one more batch. Memory: its predictions and targets, on the host, if a metric needs them all."""
        pair = (_on_host(predictions), _on_host(targets))
        if isinstance(predictions, Tensor) and predictions.is_floating_point():
            self._adding = {name for name in self._adding if not _looks_for_logits(self._given[name])}
        for name in self._adding:
            self._given[name].update(*pair)
        if len(self._adding) < len(self._given):
            self._pairs.append(pair)

    @property
    def seen(self) -> Seen:
        """This part's predictions, targets and states since `begin`."""
        states = {name: {state: getattr(metric, state) for state in metric._reductions} for name, metric in self._added}
        return Seen(_joined(self._pairs) if self._pairs else None, states)

    @property
    def _added(self) -> list[tuple[str, Any]]:
        return [(name, self._given[name]) for name in sorted(self._adding)]

    def of(self, parts: Sequence[Seen]) -> dict[str, float]:
        """The numbers of all parts together, which are in the order of the data; the first part is this one's."""
        for name, metric in self._added:
            for state, reduction in metric._reductions.items():
                setattr(metric, state, _reduced(reduction.__name__, [part.states[name][state] for part in parts]))
        pairs = [part.pair for part in parts if part.pair is not None]
        pair = _joined(pairs) if pairs else None
        found: dict[str, float] = {}
        with torch.no_grad():
            for name, metric in self._given.items():
                found |= _numbers(name, self._computed(name, metric, pair))
        return found

    def _computed(self, name: str, metric: Any, pair: Any) -> Any:
        if not _is_object(metric):
            return metric(*pair)
        if name not in self._adding:
            metric.reset()
            metric.update(*pair)
        return metric.compute()

    async def gathered(self, port: Port) -> dict[str, float]:
        """The numbers of all ranks' parts, on all ranks.

        Cost: the other ranks' predictions and targets, or states, go to rank 0, and its memory holds them all.
        """
        parts = await gather_seen(port, self.seen)
        return dict((await gather_json(port, self.of(parts) if port.rank == 0 else None))[0])


async def gather_seen(port: Port, own: Seen) -> list[Seen]:
    """All ranks' parts on rank 0, in the order of ranks; on the others their own."""
    form, tensors = _form([own.pair, own.states])
    content = torch.frombuffer(
        bytearray(save({str(i): t.contiguous() for i, t in enumerate(tensors)})), dtype=torch.uint8
    )
    told = await gather_json(port, [form, content.numel()])
    if port.rank:
        await port.send(content, 0)
        return [own]
    parts = [own]
    for rank, (other, num_bytes) in enumerate(told[1:], start=1):
        received = await port.recv(torch.empty(num_bytes, dtype=torch.uint8), rank)
        loaded = load(bytes(received.numpy()))
        parts.append(Seen(*_value(other, [loaded[str(i)] for i in range(len(loaded))])))
    return parts


def sum_up(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Each name's mean over all parts, from its [sum, count] in each part that has it."""
    names = dict.fromkeys(name for part in parts for name in part)
    columns = {name: list(zip(*(part[name] for part in parts if name in part), strict=True)) for name in names}
    return {name: math.fsum(sums) / (math.fsum(counts) or 1.0) for name, (sums, counts) in columns.items()}


# ---------------------------------------------------------------------- metrics that are objects


def _is_object(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("reset", "update", "compute"))


def _flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Collections of metrics as their metrics, each by its own name."""
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        members = dict(metric.items()) if _is_object(metric) and hasattr(metric, "items") else None
        found |= {name: metric} if members is None else {f"{name}/{key}": each for key, each in members.items()}
    return found


def _own(metric: Any) -> Any:
    if not _is_object(metric):
        return metric
    own = copy.deepcopy(metric)
    for each in own.modules() if hasattr(own, "modules") else [own]:
        for name in ("sync_on_compute", "_to_sync"):  # ranks meet here, and not in torch.distributed
            if hasattr(each, name):
                setattr(each, name, False)
    own.reset()
    return own


def _adds_up(metric: Any) -> bool:
    """True if the metric's states of parts make its state of the whole."""
    reductions = getattr(metric, "_reductions", None)
    if not reductions or any(True for _ in getattr(metric, "children", list)()):
        return False
    return all(getattr(reduction, "__name__", "") in _EXACT for reduction in reductions.values())


def _looks_for_logits(metric: Any) -> bool:
    """True if torchmetrics decides for each batch whether these are logits or probabilities."""
    bases = type(metric).__mro__
    theirs = any(base.__module__.startswith("torchmetrics.classification.") for base in bases)
    return theirs and not _BY_LARGEST & {base.__name__ for base in bases}


def _reduced(reduction: str, parts: list[Any]) -> Any:
    """The state of the whole from the states of parts."""
    function: Callable[..., Tensor] | None = _EXACT[reduction]
    if function is None:
        rows = [row for part in parts for row in (part if isinstance(part, list) else [part])]
        return rows if isinstance(parts[0], list) else torch.cat(rows)
    return function(torch.stack(parts), dim=0)


def _numbers(name: str, answer: Any) -> dict[str, float]:
    """A metric's answer as numbers, by name. ValueError for anything else."""
    if isinstance(answer, Mapping):
        return {key: value for part, each in answer.items() for key, value in _numbers(f"{name}/{part}", each).items()}
    if hasattr(answer, "tolist"):  # a tensor, or an array or a number of NumPy
        answer = answer.tolist()
    if isinstance(answer, list | tuple):
        return {key: value for i, each in enumerate(answer) for key, value in _numbers(f"{name}/{i}", each).items()}
    if isinstance(answer, bool | int | float):
        return {name: float(answer)}
    raise ValueError(
        f"the metric {name} returned {answer!r}, a {type(answer).__name__}; expected a number, a tensor or a "
        "dict of numbers"
    )


# ---------------------------------------------------------------------- trees of tensors


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_host(each) for key, each in value.items()}
    return tuple(_on_host(each) for each in value) if isinstance(value, tuple) else value


def _joined(parts: Sequence[Any]) -> Any:
    """Parts of a tree of tensors and lists as one: tensors along their first dim, lists one after the other."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in parts])
    if isinstance(first, Mapping):
        return {key: _joined([each[key] for each in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(_joined(column) for column in zip(*parts, strict=True))
    if isinstance(first, list):
        return [value for each in parts for value in each]
    raise ValueError(
        f"predictions and targets are tensors, lists, or tuples and dicts of these, got a {type(first).__name__}; let "
        "`predictions` make them so"
    )


def _form(value: Any) -> tuple[Any, list[Tensor]]:
    """The tree without its tensors, for JSON, and its tensors."""
    tensors: list[Tensor] = []

    def formed(each: Any) -> Any:
        if isinstance(each, Tensor):
            tensors.append(each.detach().clone())  # tensors that share memory cannot be written together
            return {"tensor": len(tensors) - 1}
        if isinstance(each, Mapping):
            return {"dict": {key: formed(part) for key, part in each.items()}}
        if isinstance(each, tuple | list):
            return {"tuple" if isinstance(each, tuple) else "list": [formed(part) for part in each]}
        return {"plain": each}

    form = formed(value)
    json.dumps(form)  # before any rank waits for another
    return form, tensors


def _value(form: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree again."""
    [(kind, told)] = form.items()
    if kind == "tensor":
        return tensors[told]
    if kind == "dict":
        return {key: _value(part, tensors) for key, part in told.items()}
    if kind == "plain":
        return told
    parts = [_value(part, tensors) for part in told]
    return tuple(parts) if kind == "tuple" else parts
