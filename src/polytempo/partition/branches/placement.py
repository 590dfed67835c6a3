"""`Placement`: the worker of each branch of a model, and the messages between workers.

    place 0   tower a ──────────▶ scores ──▶ answer       tower b's value goes to place 0 once, and its gradient back;
    place 1   tower b ──────────────▲                     the answer goes to place 1

The branches of a region go, the longest way first, where they end the soonest. Operations between regions go to the
place of the first value that they take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import fx, nn

from polytempo.partition.branches.parts import BranchedModel, Code, Region
from polytempo.partition.branches.units import Facts


class PlacedTask(NamedTuple):
    """Operations that one place performs, one after the other."""

    code: Code
    place: int


class Boundary(NamedTuple):
    """A value that other places need. It is sent once to each of them."""

    number: int
    source: int
    """The place that computes it."""
    targets: tuple[int, ...]
    """Places that need it, ascending."""
    users: tuple[int, ...]
    """Places that compute with it, and send a gradient back; the others only need the model's answer."""
    example: Any
    """The value for the sample: its structure, dtypes, and parts with a gradient."""


class Placement(NamedTuple):
    """A model on several places."""

    inputs: tuple[fx.Node, ...]
    tasks: tuple[PlacedTask, ...]
    """Tasks in an order that puts each behind the ones before it. All places go through them in this order."""
    output: Code
    """Puts the model's answer together, at every place."""
    boundaries: Mapping[fx.Node, Boundary]
    returns: Mapping[int, tuple[fx.Node, ...]]
    """(number of a task) -> values of other places with gradients that are complete at its place behind its backward.
    """
    owners: Mapping[int, int]
    """(`id` of a parameter, or of a layer's buffer) -> the place. A parameter that no task uses is at place 0."""


def placement(model: nn.Module, parts: BranchedModel, facts: Facts, places: int) -> Placement:
    """Place the parts of a model. ValueError where two places would need one parameter."""
    placing = _Placing(model, places)
    for part in parts.parts:
        if isinstance(part, Region):
            placing.region(part)
        else:
            placing.stretch(part)
    tasks = tuple(placing.tasks)
    boundaries = dict(_boundaries(tasks, parts.output, facts, places))
    returns: dict[int, list[fx.Node]] = defaultdict(list)
    for node, boundary in boundaries.items():
        for place in boundary.users:
            uses = [number for number, task in enumerate(tasks) if task.place == place and _takes(task.code, node)]
            returns[uses[0]].append(node)
    behind = {number: tuple(nodes) for number, nodes in returns.items()}
    return Placement(parts.inputs, tasks, parts.output, boundaries, behind, placing.owners)


class _Placing:
    def __init__(self, model: nn.Module, places: int) -> None:
        self._model, self._places = model, places
        self.tasks: list[PlacedTask] = []
        self.owners: dict[int, int] = {}
        self._place_of: dict[fx.Node, int] = {}

    def region(self, region: Region) -> None:
        """Put each task where it ends the soonest, if messages took no time."""
        free, end, chosen = [0.0] * self._places, dict[int, float](), dict[int, int]()
        remaining = region.remaining()
        for number in sorted(range(len(remaining)), key=lambda number: -remaining[number]):
            task = region.tasks[number]
            ready = max((end[need] for need in task.needs), default=0.0)
            held = self._held(task.code)
            place = held if held is not None else min(range(self._places), key=lambda each: max(free[each], ready))
            chosen[number] = place
            end[number] = free[place] = max(free[place], ready) + task.operations
            self._own(task.code, place)
        for number, task in enumerate(region.tasks):
            self._add(task.code, chosen[number])

    def stretch(self, code: Code) -> None:
        """Put operations at the place of their first value."""
        first = next((self._place_of[take.source] for take in code.takes if take.source in self._place_of), 0)
        held = self._held(code)
        place = first if held is None else held
        self._own(code, place)
        self._add(code, place)

    def _add(self, code: Code, place: int) -> None:
        self.tasks.append(PlacedTask(code, place))
        self._place_of |= dict.fromkeys(code.gives, place)

    def _held(self, code: Code) -> int | None:
        """The place that has parameters of these operations already."""
        found = {self.owners[key]: name for key, name in _tensors_of(self._model, code) if key in self.owners}
        if len(found) > 1:
            raise ValueError(
                f"{' and '.join(found.values())} would be needed at two places, as parameters that other branches "
                "share; use fewer workers, or a model without such parameters"
            )
        return next(iter(found), None)

    def _own(self, code: Code, place: int) -> None:
        self.owners |= dict.fromkeys((key for key, _ in _tensors_of(self._model, code)), place)


def _tensors_of(model: nn.Module, code: Code) -> Iterator[tuple[int, str]]:
    """Parameters and layers' buffers that operations use, by `id`, with the name. Other buffers are everywhere."""
    for name, _ in code.modules:
        used = attrgetter(name)(model)
        if isinstance(used, nn.Module):
            yield from ((id(each), name) for each in (*used.parameters(), *used.buffers()))
        elif isinstance(used, nn.Parameter):
            yield id(used), name


def _takes(code: Code, node: fx.Node) -> bool:
    return any(take.source is node for take in code.takes)


def _boundaries(
    tasks: Sequence[PlacedTask], output: Code, facts: Facts, places: int
) -> Iterator[tuple[fx.Node, Boundary]]:
    number = 0
    for task in tasks:
        for node in task.code.gives:
            users = sorted({each.place for each in tasks if _takes(each.code, node)} - {task.place})
            everywhere = set(range(places)) if _takes(output, node) else set()
            targets = sorted({*users, *everywhere} - {task.place})
            if targets:
                yield node, Boundary(number, task.place, tuple(targets), tuple(users), facts[node].value)
                number += 1
