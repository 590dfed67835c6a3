"""Forward and backward passes of a model with branches on several workers: one worker's computations and messages.

    forward    values from other places ──▶ task ──▶ to each place that needs a value, once
    backward   their gradients, one from each place ──▶ the task's own graph ──▶ the gradient of another place's value

Every place goes through its tasks in the order of the program, and back in the reverse order; a message waits only for
tasks before it in that order, so no place waits for ever. Each task has a graph of autograd of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add, attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from polytempo.core import Port
from polytempo.core.op import Work
from polytempo.partition.branches.placement import Boundary, PlacedTask, Placement

_FORWARD, _BACKWARD = 1 / 3, 2 / 3
"""The shares of a task's operations."""
_KINDS = 3
"""Kinds of messages about one value: sizes, the value, its gradient."""

Leaf = tuple[fx.Node, int]
"""A tensor: the operation that it comes from, and its number among the leaves of that value."""
Sizes = dict[fx.Node, list[torch.Size]]
"""Sizes of the tensors that other places have sent, for inputs of one kind."""


@dataclass
class TaskRecord:
    """A task's tensors for its backward."""

    leaves: list[tuple[Leaf, Tensor]] = field(default_factory=list)
    """Inputs that have a gradient, and the leaves that backward accumulates it in."""
    answer: list[tuple[Leaf, Tensor]] = field(default_factory=list)
    """Values of the task, with their graph."""


@dataclass
class PlacedPass:
    """One forward pass at one place."""

    known: dict[fx.Node, Any]
    """Values of operations, as far as this place has them."""
    records: dict[int, TaskRecord]
    """Records by the task's number; empty where nothing is learnt."""
    sizes: Sizes


async def forward(
    port: Port, plan: Placement, model: nn.Module, values: Sequence[Any], sizes: Sizes | None, *, learns: bool
) -> PlacedPass:
    """Perform this place's tasks. Afterwards it has all values of the model's answer.

    `sizes`: from an earlier pass with inputs of this kind; None: the first one, which sends them, too.
    """
    done = PlacedPass(dict(zip(plan.inputs, values, strict=True)), {}, {})
    sending: list[Work[None]] = []

    async def fetch(node: fx.Node) -> None:
        if node not in done.known:
            boundary = plan.boundaries[node]
            done.sizes[node] = await _sizes(port, boundary) if sizes is None else sizes[node]
            done.known[node] = await _received(port, boundary, done.sizes[node])

    for number, task in enumerate(plan.tasks):
        if task.place != port.rank:
            continue
        for take in task.code.takes:
            await fetch(take.source)
        record = TaskRecord()
        work = partial(_computed, task, model, done.known, record, learns=learns)
        done.known |= await port.compute(work, _FORWARD * task.code.operations, "forward")
        if learns:
            done.records[number] = record
        for node in task.code.gives:
            if node in plan.boundaries:
                sending += await _sent(port, plan.boundaries[node], done.known[node], with_sizes=sizes is None)
    for take in plan.output.takes:
        await fetch(take.source)
    for each in sending:
        await each
    return done


async def backward(
    port: Port,
    plan: Placement,
    model: nn.Module,
    records: Mapping[int, TaskRecord],
    gradients: Mapping[Leaf, Tensor],
    *,
    keep: bool,
) -> dict[int, Tensor]:
    """The gradients of this place's parameters, by `id`, from the gradients of the model's answer.

    `keep`: the graphs are used again.
    """
    arrived: dict[Leaf, list[Tensor]] = defaultdict(list)
    for leaf, gradient in gradients.items():
        if plan.boundaries.get(leaf[0]) is None or plan.boundaries[leaf[0]].source == port.rank:
            arrived[leaf].append(gradient)
    found: dict[int, Tensor] = {}
    sending: list[Work[None]] = []
    for number in sorted(records, reverse=True):
        task, record = plan.tasks[number], records[number]
        for node in task.code.gives:
            await _returned(port, plan, node, record, arrived)
        work = partial(_derived, task, model, record, arrived, keep=keep)
        of_leaves, of_parameters = await port.compute(work, _BACKWARD * task.code.operations, "backward")
        for leaf, gradient in of_leaves:
            arrived[leaf].append(gradient)
        for key, gradient in of_parameters.items():
            found[key] = found[key] + gradient if key in found else gradient
        for node in plan.returns.get(number, ()):
            sending += await _sent_back(port, plan.boundaries[node], node, record, arrived)
    for each in sending:
        await each
    return found


# ---------------------------------------------------------------------- computing


def _computed(
    task: PlacedTask, model: nn.Module, known: Mapping[fx.Node, Any], record: TaskRecord, *, learns: bool
) -> dict[fx.Node, Any]:
    with torch.set_grad_enabled(learns):
        given = [_aliased(take.source, known[take.source], record) for take in task.code.takes]
        answer = dict(zip(task.code.gives, task.code(model, given), strict=True))
    record.answer = [
        ((node, number), leaf)
        for node, value in answer.items()
        for number, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return answer


def _aliased(node: fx.Node, value: Any, record: TaskRecord) -> Any:
    leaves, structure = tree_flatten(value)
    for number, tensor in enumerate(leaves):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            leaf = tensor.detach().requires_grad_()
            record.leaves.append(((node, number), leaf))
            leaves[number] = leaf.view_as(leaf)
    return tree_unflatten(leaves, structure)


def _derived(
    task: PlacedTask,
    model: nn.Module,
    record: TaskRecord,
    arrived: dict[Leaf, list[Tensor]],
    *,
    keep: bool,
) -> tuple[list[tuple[Leaf, Tensor]], dict[int, Tensor]]:
    """The gradients of a task's inputs, and of its parameters."""
    roots = [(leaf, tensor) for leaf, tensor in record.answer if arrived.get(leaf)]
    parameters = parameters_of(model, task)
    if not roots or not (record.leaves or parameters):
        return [], {}
    sums = [reduce(add, arrived[leaf]) for leaf, _ in roots]
    asked = [*(tensor for _, tensor in record.leaves), *parameters]
    found = torch.autograd.grad([t for _, t in roots], asked, sums, retain_graph=keep, allow_unused=True)
    of_leaves = [(leaf, each) for (leaf, _), each in zip(record.leaves, found, strict=False) if each is not None]
    own = zip(parameters, found[len(record.leaves) :], strict=True)
    return of_leaves, {id(parameter): each for parameter, each in own if each is not None}


def parameters_of(model: nn.Module, task: PlacedTask) -> list[Tensor]:
    """Trained parameters that a task uses, each once."""
    found: dict[int, Tensor] = {}
    for name, _ in task.code.modules:
        used = attrgetter(name)(model)
        for each in used.parameters() if isinstance(used, nn.Module) else [used]:
            if each.requires_grad:
                found[id(each)] = each
    return list(found.values())


# ---------------------------------------------------------------------- sending


def _pieces(value: Any) -> list[tuple[int, Tensor]]:
    """The sent leaves of a value, with their places: tensors, and numbers as tensors of one."""
    leaves = enumerate(map(_sendable, tree_leaves(value)))
    return [(number, leaf) for number, leaf in leaves if leaf is not None]


def _sendable(leaf: Any) -> Tensor | None:
    if isinstance(leaf, bool | int | float):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    return leaf if isinstance(leaf, Tensor) else None


def _tag(boundary: Boundary, kind: int) -> int:
    return _KINDS * boundary.number + kind


async def _sent(port: Port, boundary: Boundary, value: Any, *, with_sizes: bool) -> list[Work[None]]:
    tensors = [tensor for _, tensor in _pieces(value)]
    sending = []
    for place in boundary.targets:
        if with_sizes:
            told = torch.tensor([size for tensor in tensors for size in tensor.shape], dtype=torch.int64)
            sending.append(await port.start(port.send(told, place, _tag(boundary, 0))))
        for tensor in tensors:
            sending.append(await port.start(port.send(tensor.detach().contiguous(), place, _tag(boundary, 1))))
    return sending


async def _sizes(port: Port, boundary: Boundary) -> list[torch.Size]:
    dims = [tensor.dim() for _, tensor in _pieces(boundary.example)]
    told = await port.recv(torch.empty(sum(dims), dtype=torch.int64), boundary.source, _tag(boundary, 0))
    return [torch.Size(each.tolist()) for each in told.split(dims)]


async def _received(port: Port, boundary: Boundary, sizes: Sequence[torch.Size]) -> Any:
    leaves, structure = tree_flatten(boundary.example)
    for (number, like), shape in zip(_pieces(boundary.example), sizes, strict=True):
        room = torch.empty(shape, dtype=like.dtype)
        tensor = await port.recv(room, boundary.source, _tag(boundary, 1))
        example = leaves[number]
        if not isinstance(example, Tensor):
            leaves[number] = type(example)(tensor.item())
        else:
            leaves[number] = tensor.requires_grad_() if like.requires_grad else tensor
    return tree_unflatten(leaves, structure)


async def _returned(
    port: Port, plan: Placement, node: fx.Node, record: TaskRecord, arrived: dict[Leaf, list[Tensor]]
) -> None:
    boundary = plan.boundaries.get(node)
    if boundary is None:
        return
    made = dict(record.answer)
    for place in boundary.users:
        for number, like in _pieces(boundary.example):
            if like.requires_grad:
                tensor = made[node, number]
                room = torch.empty(tensor.shape, dtype=tensor.dtype)
                arrived[node, number].append(await port.recv(room, place, _tag(boundary, 2)))


async def _sent_back(
    port: Port, boundary: Boundary, node: fx.Node, record: TaskRecord, arrived: dict[Leaf, list[Tensor]]
) -> list[Work[None]]:
    """The sum over this place's uses; zeros where there are none."""
    given = {leaf: tensor for leaf, tensor in record.leaves if leaf[0] is node}
    sending = []
    for number, like in _pieces(boundary.example):
        if like.requires_grad:
            own = arrived[node, number]
            total = reduce(add, own) if own else torch.zeros_like(given[node, number])
            sending.append(await port.start(port.send(total.contiguous(), boundary.source, _tag(boundary, 2))))
    return sending
