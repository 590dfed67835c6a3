"""Places of the places where a graph can be cut: modules, or operations between them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise

from torch import fx

from polytempo.partition.chain import Chain


class Places:
    """The positions of a chain by name: "blocks.1" is where the first operation of that module stands."""

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
        """A name for what begins at the position: the outermost module, or the operation."""
        node = self._chain.nodes[position]
        own = self._own[node]
        return next((name for name in (*_modules(node), own) if self._first[name] == position), own)

    def ends(self, begins: Sequence[str], stages: int | None) -> tuple[int, ...]:
        """Where the stages end that begin at these names. ValueError for names that cannot begin one."""
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
                    "layers in the order in which the model computes them"
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
        """What the positions `first … end - 1` are, by the largest modules that lie within."""
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
    """A name for each node: of a module's second call "blocks.1#2", of an operation that of the graph: "add_1"."""
    calls: Counter[str] = Counter()
    for node in nodes:
        name = str(node.target) if node.op == "call_module" else node.name
        calls[name] += 1
        yield name if calls[name] == 1 else f"{name}#{calls[name]}"


def _modules(node: fx.Node) -> list[str]:
    """The modules that a node belongs to, from the outermost, without the model itself."""
    stack = [name for name, _ in node.meta.get("nn_module_stack", {}).values() if name]
    return list(dict.fromkeys([*stack, str(node.target)] if node.op == "call_module" else stack))
