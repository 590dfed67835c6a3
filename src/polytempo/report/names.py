"""Names of runs: the strategy's call in full, and as short as tells the runs apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from polytempo.report.runs import RunRecord


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A different name for every run: its strategy in full, and only where needed the workers and a number."""
    return _different([str(run.result["strategy"]) for run in runs], runs)


def short_labels(runs: Sequence[RunRecord]) -> list[str]:
    """As `labels`, but of the arguments only those that tell strategies of one name apart.

    `local_sgd(period=8, route=native)` alone is `local_sgd`; beside `local_sgd(period=16, route=native)` it is
    `local_sgd(period=8)`.
    """
    calls = [str(run.result["strategy"]) for run in runs]
    return _different([short_call(call, calls) for call in calls], runs)


def arguments(call: str) -> tuple[str, list[str]]:
    """The name and the arguments of a call as text: `f(a=1, b=g(2, 3))` is `("f", ["a=1", "b=g(2, 3)"])`."""
    name, opened, rest = call.partition("(")
    if not opened or not rest.endswith(")"):
        return call, []
    found, depth = [""], 0
    for letter in rest[:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return call, []
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return name, [argument.strip() for argument in found if argument.strip()]


def short_call(call: str, calls: Sequence[str]) -> str:
    """The name of a call, with those of its arguments that tell it from the other `calls` of that name."""
    name, own = arguments(call)
    others = [given for other, given in map(arguments, calls) if other == name]
    telling = [argument for argument in own if not all(argument in given for given in others)]
    return f"{name}({', '.join(telling)})" if telling else name


def _different(names: list[str], runs: Sequence[RunRecord]) -> list[str]:
    names = [name + (" (simulated)" if run.simulated else "") for name, run in zip(names, runs, strict=True)]
    sizes = [int(run.result["workers"]) for run in runs]
    sizes_of = {name: {size for other, size in zip(names, sizes, strict=True) if other == name} for name in names}
    names = [
        f"{name}, {plural(size, 'worker')}" if len(sizes_of[name]) > 1 else name
        for name, size in zip(names, sizes, strict=True)
    ]
    counts, seen, different = Counter(names), Counter[str](), []
    for name in names:
        seen[name] += 1
        different.append(name if counts[name] == 1 else f"{name} #{seen[name]}")
    return different


def plural(count: int, noun: str) -> str:
    """`plural(1, "worker")` is `1 worker`, `plural(2, "worker")` is `2 workers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
