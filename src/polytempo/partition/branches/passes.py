"""A region's forward and backward pass: each task has a graph of autograd of its own, which its own thread runs.

    forward    task on aliases of its inputs ──▶ its values           autograd sees one operation, `_Region`, with one
    backward   autograd.grad of its values, into the aliases          input for each use of each tensor and parameter

A tensor's gradient is the sum over its uses. Those within the region are added here, from the last to the first; the
others by autograd, which takes the inputs of an operation in their order, so these also go from the last use to the
first. That is the order of plain execution, to the bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from polytempo.partition.branches.parts import BranchTask, Region
from polytempo.partition.branches.pool import Pool, PoolWork
from polytempo.partition.graph.profile import tensors_in

Values = dict[fx.Node, Any]


class _Use(NamedTuple):
    tensor: Tensor
    """The tensor outside of the task."""
    position: int
    leaf: Tensor
    """The tensor that the task's backward leaves its gradient in: an alias, or the parameter itself."""
    outside: bool
    """True if the tensor comes from outside of the region."""


@dataclass
class _Record:
    """A task's tensors for its backward."""

    task: BranchTask
    uses: list[_Use] = field(default_factory=list)
    answer: list[Tensor] = field(default_factory=list)
    """The task's values that need gradients."""


def run_region(region: Region, model: nn.Module, known: Mapping[fx.Node, Any], pool: Pool) -> Values:
    """The values that a region gives, from the values that are known before."""
    made: Values = {}
    records = [_Record(task) for task in region.tasks]
    gradients = torch.is_grad_enabled()

    def call(record: _Record) -> None:
        task = record.task
        given = []
        for source, position in task.code.takes:
            inside = source in made
            value = made[source] if inside else known[source]
            given.append(_aliased(value, record, position, outside=not inside) if gradients else value)
        answer = task.code(model, given)
        made.update(zip(task.code.gives, answer, strict=True))
        if gradients:
            record.answer = _distinct(each for each in tensors_in(answer) if each.requires_grad)
            record.uses += _parameters(model, task)

    remaining = region.remaining()
    pool.perform(
        [
            PoolWork(partial(_named, partial(call, record), record.task), record.task.needs, remaining[number])
            for number, record in enumerate(records)
        ]
    )
    values = {node: made[node] for node in region.gives}
    leaving = _distinct(each for each in tensors_in(list(values.values())) if each.requires_grad) if gradients else []
    if not leaving:
        return values
    done = _Pass(region, pool, records, leaving)
    answers = _Region.apply(done, *(use.tensor for use in done.inputs))  # type: ignore[no-untyped-call]
    place = {id(each): answer for each, answer in zip(leaving, answers, strict=True)}
    return {
        node: tree_map_only(Tensor, lambda each: place.get(id(each), each), value) for node, value in values.items()
    }


def _aliased(value: Any, record: _Record, position: int, *, outside: bool) -> Any:
    """The value with aliases in the places of tensors that need gradients. Autocast keeps copies of leaves only."""

    def alias(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        record.uses.append(_Use(tensor, position, leaf, outside))
        return leaf.view_as(leaf)

    return tree_map_only(Tensor, alias, value)


def _parameters(model: nn.Module, task: BranchTask) -> list[_Use]:
    """The parameters that a task uses, each once, at the position of its last use."""
    found: dict[int, _Use] = {}
    for name, position in task.code.modules:
        for each in _owned(attrgetter(name)(model)):
            if isinstance(each, Tensor) and each.requires_grad:
                before = found.get(id(each))
                at = position if before is None else max(position, before.position)
                found[id(each)] = _Use(each, at, each, outside=True)
    return list(found.values())


def _owned(used: nn.Module | Tensor) -> Iterable[Tensor | None]:
    """A module's parameters, or the parameter that it is. Most modules have no submodules, which is faster to read."""
    if not isinstance(used, nn.Module):
        return (used,)
    return used.parameters() if used._modules else used._parameters.values()


class _Pass:
    """One forward pass of a region, and the backward passes that follow it."""

    def __init__(self, region: Region, pool: Pool, records: list[_Record], leaving: list[Tensor]) -> None:
        self._region, self._pool, self._records, self.leaving = region, pool, records, leaving
        self.inputs = sorted(
            (use for record in records for use in record.uses if use.outside), key=lambda use: -use.position
        )
        """Uses from the last to the first."""

    def backward(self, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """The gradients of the inputs, from the gradients of leaving tensors."""
        if not self._records:
            raise RuntimeError(
                "Trying to backward through a model with branches on threads a second time; its tensors were freed "
                "by the first time; call the first backward with retain_graph=True"
            )
        arrived: dict[int, list[tuple[float, Tensor]]] = defaultdict(list)
        for tensor, gradient in zip(self.leaving, gradients, strict=True):
            if gradient is not None:
                arrived[id(tensor)].append((inf, gradient))
        found: dict[int, Tensor | None] = {}

        def call(record: _Record) -> None:
            answered = [each for each in record.answer if id(each) in arrived]
            if not answered or not record.uses:
                return
            leaves = [use.leaf for use in record.uses]
            sums = [_summed(arrived.pop(id(each))) for each in answered]
            own = torch.autograd.grad(answered, leaves, sums, retain_graph=keep, allow_unused=True)
            for use, gradient in zip(record.uses, own, strict=True):
                if use.outside:
                    found[id(use)] = gradient
                elif gradient is not None:
                    arrived[id(use.tensor)].append((use.position, gradient))
            if not keep:
                record.uses, record.answer = [], []

        needs: list[list[int]] = [[] for _ in self._records]
        for number, record in enumerate(self._records):
            for need in record.task.needs:
                needs[need].append(number)
        remaining = self._region.remaining(backward=True)
        self._pool.perform(
            [
                PoolWork(partial(_named, partial(call, record), record.task), needs[number], remaining[number])
                for number, record in enumerate(self._records)
            ]
        )
        answer = [found.get(id(use)) for use in self.inputs]
        if not keep:
            self._records, self.leaving, self.inputs = [], [], []
        return answer


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, done: _Pass, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in done.leaving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True: the second derivative of a model with branches on threads is "
                "not computed; leave out inter, or remove it before"
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, *ctx.done.backward(gradients, keep=keep)


def _named(call: Callable[[], None], task: BranchTask) -> None:
    """Call it; a note on an error names the branch."""
    try:
        call()
    except Exception as error:
        error.add_note(f"raised in the branch {task.name} of a model with branches on threads")
        raise


def _summed(arrived: list[tuple[float, Tensor]]) -> Tensor:
    """The sum, from the last use to the first, as autograd adds."""
    return reduce(_added, (gradient for _, gradient in sorted(arrived, key=lambda each: -each[0])))


def _added(one: Tensor, other: Tensor) -> Tensor:
    """A sparse and a dense tensor can be added in one order only."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def _distinct(tensors: Any) -> list[Tensor]:
    return list({id(each): each for each in tensors}.values())
