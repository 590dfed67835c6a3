"""`cut`: a model into stages, by hand, by balance or by the smallest traffic.

| by | minimized; among equal cuts the least traffic is taken | the same on all ranks |
|---|---|---|
| `"operations"` | the most operations of a stage, counted (`profile.counted`) | yes |
| `"memory"` | the most memory of a stage, counted | yes |
| `"traffic"` | bytes of all values and of the gradients that come back | yes |
| `"time"` | the longest time of a stage, measured here on one thread | no: give `begins` to the others |
| names | nothing: each layer or operation named begins a stage | yes |
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from torch import Tensor, fx, nn

from polytempo.partition.chain import Chain, chain_of, has_parameters, prefix, slowest_least, total_least
from polytempo.partition.cut import Cut, Stage, StageCost, Value
from polytempo.partition.graph.exported_graph import exported
from polytempo.partition.graph.modes import attributes_kept
from polytempo.partition.graph.profile import counted, measured
from polytempo.partition.graph.trace import Inputs, Traced, Untraceable, inputs_of, trace
from polytempo.partition.graph_stages import split

By = Literal["operations", "time", "memory", "traffic"]
_WITHIN = 1.5
"""The most operations of a stage with less traffic, in times of the balanced cut's."""
_CHOICES = ("operations", "time", "memory", "traffic")


def cut(
    model: nn.Module,
    stages: int | None = None,
    *,
    sample: Any,
    by: By | Sequence[str] = "operations",
    within: float | None = None,
    memory_bytes: float | None = None,
    state_per_parameter: float = 2.0,
    tied: Literal["shared", "together"] = "shared",
    measure: bool = False,
) -> Cut:
    """Cut `model` into `stages`, each a module of its own with the model's parameters.

        cut(model, 4, sample=x)                                # the slowest stage has the fewest operations
        cut(model, sample=x, by=["blocks.1", "scores"])  # three stages, by hand

    `sample` has the model's inputs: a tensor, a tuple of inputs, or a mapping of keywords. Its values do not matter,
    but sizes do: operations, bytes and times are counted for the sample.

    `by`: the cost with the least maximum over stages (the module's table), or the names of layers that begin stages.
    `within` lets the chosen stages have so many times the least possible maximum, and among these cuts the one with the
    least traffic is taken: 1 if `by` is a cost. If it is the traffic, no stage has more than 1.5 times the operations
    of the balanced cut's largest stage, or less than its smallest has over 1.5 (`math.inf`: any). `memory_bytes` bounds
    parameters, gradients, the optimizer's state (`state_per_parameter` numbers each; Adam has 2) and kept tensors of a
    stage. Every chosen stage has a parameter. `tied="together"` keeps uses of one parameter in one stage. `measure`
    measures times for `costs`, for any `by`.

    The cut is the best for chains; for other graphs the best with stages that are contiguous in the order of the
    model's computation. Cost: two traces, a pass over fake tensors, and O(K n²) for n operations; six forward and
    backward passes where times are measured.

    Errors: ValueError for more stages than parts, for a model that cannot be traced or cut, for names that are not
    there.
    """
    _check(stages, by, within)
    inputs = inputs_of(model, sample)
    asked = _Asked(stages, by, within, memory_bytes, state_per_parameter, tied, measure)
    with attributes_kept(model):
        try:
            return asked.of(model, inputs, trace(model, inputs))
        except Untraceable as error:
            other = exported(model, inputs, error)
            try:
                return asked.of(model, inputs, other)
            except ValueError:
                raise error from None


class _Asked(NamedTuple):
    stages: int | None
    by: By | Sequence[str]
    within: float | None
    memory_bytes: float | None
    state_per_parameter: float
    tied: Literal["shared", "together"]
    measure: bool

    def of(self, model: nn.Module, inputs: Inputs, traced: Traced) -> Cut:
        """The cut of a graph. `Untraceable` where a stage would have to begin within a module that stays whole."""
        facts = counted(model, traced, inputs)
        together = self.tied == "together"
        chain = chain_of(model, traced, facts, keep_tied=together, state_per_parameter=self.state_per_parameter)
        places = Places(chain)
        seconds = None
        if self.measure or self.by == "time":
            seconds = prefix(_of_units(chain, measured(model, traced, inputs)))
        if isinstance(self.by, str):
            assert self.stages is not None
            _check_parts(chain, self.stages, traced.whole)
            bounds = {"within": self.within, "memory_bytes": self.memory_bytes}
            ends = _chosen(chain, self.stages, self.by, seconds, **bounds)
        else:
            ends = _named(places, self.by, self.stages, traced.whole)
        made, sizes = split(model, traced, facts, inputs, chain.stage_of(ends))
        return Cut(
            stages=tuple(made),
            values=tuple(sizes),
            shared=_shared(model, made),
            inputs=inputs.names,
            begins=tuple(places.begin(chain.begins[end]) for end in ends[1:-1]),
            costs=tuple(_costs(chain, places, ends, seconds, sizes)),
            check=traced.check,
        )


def _check(stages: int | None, by: By | Sequence[str], within: float | None) -> None:
    if isinstance(by, str) and by not in _CHOICES:
        raise ValueError(f"by={by!r}: must be one of {', '.join(_CHOICES)}, or a list of names that begin stages")
    if isinstance(by, str) and stages is None:
        raise ValueError(f"by={by!r} needs the number of stages; or give the names of the layers that begin them")
    if stages is not None and stages < 1:
        raise ValueError(f"stages={stages}: must be at least 1")
    if within is not None and not within >= 1:
        raise ValueError(f"within={within:g}: must be at least 1, times the least possible maximum")


def _of_units(chain: Chain, times: Mapping[fx.Node, float]) -> list[float]:
    found = [0.0] * chain.units
    for node, place in chain.positions.items():
        if place is not None and node.op != "output":
            found[bisect_right(chain.begins, place) - 1] += times[node]
    return found


def _check_parts(chain: Chain, stages: int, whole: Mapping[str, str]) -> None:
    allowed = has_parameters(chain)
    most = sum(bool(allowed[unit, unit + 1]) for unit in range(chain.units))
    if stages > most:
        said = f"stages={stages}, and the model can be cut into at most {most} parts that have parameters"
        if whole:
            raise Untraceable(f"{said}; {_kept(whole)}")
        raise ValueError(said)


def _named(places: Places, by: Sequence[str], stages: int | None, whole: Mapping[str, str]) -> tuple[int, ...]:
    """The ends of stages that begin at these names. `Untraceable`, if a name may be within a whole module."""
    try:
        return places.ends(by, stages)
    except ValueError as error:
        if not whole:
            raise
        raise Untraceable(f"{error}; {_kept(whole)}") from None


def _kept(whole: Mapping[str, str]) -> str:
    return "; ".join(f"{name} stays whole: {reason}" for name, reason in whole.items())


def _chosen(
    chain: Chain, stages: int, by: str, seconds: Tensor | None, *, within: float | None, memory_bytes: float | None
) -> tuple[int, ...]:
    """Units that end the stages. ValueError where there is no such cut."""
    cost = chain.memory if by == "memory" else seconds if by == "time" and seconds is not None else chain.operations
    allowed = has_parameters(chain)
    if memory_bytes is not None:
        allowed &= chain.memory <= memory_bytes
    ends = slowest_least(cost, chain.traffic, allowed, stages)
    if ends is None:
        least = slowest_least(chain.memory, chain.traffic, has_parameters(chain), stages)
        assert least is not None, "there are as many parts"
        raise ValueError(
            f"memory_bytes={memory_bytes:,.0f}: no cut into {stages} stages fits, for the least that the largest stage "
            f"can have is {_most(chain.memory, least):,.0f} bytes; take more stages or smaller micro-batches"
        )
    within = within or (_WITHIN if by == "traffic" else 1.0)
    allowed &= cost <= within * _most(cost, ends)
    if by == "traffic":
        allowed &= cost >= min(float(cost[a, b]) for a, b in pairwise(ends)) / within
    found = total_least(chain.traffic, cost, allowed, stages)
    assert found is not None, "the balanced cut is one of them"
    return found


def _most(cost: Tensor, ends: Sequence[int]) -> float:
    return max(float(cost[a, b]) for a, b in pairwise(ends))


def _shared(model: nn.Module, stages: Sequence[Stage]) -> dict[str, dict[int, str]]:
    """Parameters that several stages have: the stages, and the name that each has for it."""
    found: dict[str, dict[int, str]] = {}
    own = [{id(each): name for name, each in stage.module.named_parameters()} for stage in stages]
    for name, each in model.named_parameters():
        there = {index: names[id(each)] for index, names in enumerate(own) if id(each) in names}
        if len(there) > 1:
            found[name] = there
    return found


def _costs(
    chain: Chain, places: Places, ends: Sequence[int], seconds: Tensor | None, sizes: Mapping[Value, int]
) -> Iterator[StageCost]:
    """The costs of each stage. `sizes`: bytes of each value."""
    positions = [*chain.begins, len(chain.nodes)]
    for stage, (a, b) in enumerate(pairwise(ends)):
        yield StageCost(
            layers=places.layers(positions[a], positions[b]),
            parameters=int(chain.numbers[a, b]),
            parameter_bytes=int(chain.parameter_bytes[a, b]),
            saved_bytes=int(chain.saved_bytes[a, b]),
            operations=float(chain.operations[a, b]),
            seconds=None if seconds is None else float(seconds[a, b]),
            bytes_in=sum(size for value, size in sizes.items() if stage in value.targets),
            bytes_out=sum(size * len(value.targets) for value, size in sizes.items() if stage == value.source),
        )


class Places:
    """The positions of a chain by name: "blocks.1" is the place of that module's first operation."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._first: dict[str, int] = {}
        for position, node in enumerate(chain.nodes):
            for name in _modules(node):
                self._first.setdefault(name, position)
        self._own = dict(zip(chain.nodes, labels(chain.nodes), strict=True))
        for position, node in enumerate(chain.nodes):
            self._first.setdefault(self._own[node], position)

    def begin(self, position: int) -> str:
        """A name for the module or operation that begins at the position: the outermost."""
        node = self._chain.nodes[position]
        own = self._own[node]
        return next((name for name in (*_modules(node), own) if self._first[name] == position), own)

    def ends(self, begins: Sequence[str], stages: int | None) -> tuple[int, ...]:
        """The ends of stages that begin at these names. ValueError for names that cannot begin one."""
        if stages is not None and stages != len(begins) + 1:
            raise ValueError(
                f"stages={stages}, and {len(begins)} names begin stages behind the first: {len(begins) + 1} stages"
            )
        found = [0, *(self._unit(name) for name in begins), self._chain.units]
        for number, (one, other) in enumerate(pairwise(found)):
            if one >= other:
                before = "the model" if number == 0 else begins[number - 1]
                after = begins[number] if number < len(begins) else "the end"
                raise ValueError(
                    f"stage {number} would be empty: {after} does not come behind the beginning of {before}; name the "
                    "layers in the order of the model's computation"
                )
        return tuple(found)

    def _unit(self, name: str) -> int:
        if name not in self._first:
            close = get_close_matches(name, self._first, n=3)
            meant = f"did you mean {', '.join(close)}?" if close else f"there are: {', '.join(list(self._first)[:20])}"
            raise ValueError(f"no layer or operation of the model is called {name}; {meant}")
        position = self._first[name]
        for joint in self._chain.joints:
            if joint.first < position <= joint.last:
                raise ValueError(
                    f"no stage can begin at {name}: {joint.reason}, and {self.begin(joint.first)} … "
                    f"{self.begin(joint.last)} stay together"
                )
        return bisect_right(self._chain.begins, position) - 1

    def layers(self, first: int, end: int) -> tuple[str, ...]:
        """The positions `first … end - 1` by the largest modules that are within."""
        found: dict[str, None] = {}
        outside = {
            name
            for position, node in enumerate(self._chain.nodes)
            if not first <= position < end
            for name in _modules(node)
        }
        for node in self._chain.nodes[first:end]:
            found.setdefault(next((name for name in _modules(node) if name not in outside), self._own[node]))
        return tuple(found)


def labels(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """A name for each node: of a module's second call "blocks.1#2", of an operation the graph's: "add_1"."""
    calls: Counter[str] = Counter()
    for node in nodes:
        name = str(node.target) if node.op == "call_module" else node.name
        calls[name] += 1
        yield name if calls[name] == 1 else f"{name}#{calls[name]}"


def _modules(node: fx.Node) -> list[str]:
    """The modules that a node belongs to, from the outermost, without the model itself."""
    stack = [name for name, _ in node.meta.get("nn_module_stack", {}).values() if name]
    return list(dict.fromkeys([*stack, str(node.target)] if node.op == "call_module" else stack))
