"""`bench collectives`: every operation at every size, ours beside gloo, Open MPI and the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from polytempo.bench import limit, mpi
from polytempo.bench.machine import memory_bytes, written
from polytempo.bench.operations import MOVES_NOTHING, OPERATIONS, Prepared, checked, elements
from polytempo.bench.rank import BenchRank, crewed
from polytempo.bench.turns import Contender, Measurement, ratio, slowest, timed, turns
from polytempo.native.arena import own_arena
from polytempo.native.library import why_not

RATIOS = ("gloo/ours", "mpi/ours", "ours/limit")
_COPIES = 8
"""Tensors of the largest size in a worker's memory: its own, one in the arena, MPI's, and buffers of peers."""


class Case(NamedTuple):
    """The subject of one row, or of two if tensors in the arena are a case of their own."""

    operation: str
    num_bytes: int


class CollectivesPlan(NamedTuple):
    """The plan of the benchmark. `turn_s`: how long a contender's turn lasts, at least three calls."""

    ranks: Sequence[int]
    sizes: Sequence[int]
    operations: Sequence[str]
    rounds: int
    turn_s: float


def collectives(plan: CollectivesPlan) -> dict[str, Any]:
    """Measure; the result as `written` lays it out. Times in µs a call.

    A row: operation, tensors ("any", or "arena": in shared memory), ranks, bytes, a figure or null for each of ours,
    gloo, mpi and limit, and the ratios gloo / ours, mpi / ours and ours / limit, each with its quartiles over rounds.
    Errors: ValueError for an impossible plan, before anything is started.
    """
    _check(plan)
    reasons = {"ours": why_not(), "mpi": mpi.missing(), "limit": limit.missing()}
    missing = {name: reason for name, reason in reasons.items() if reason}
    rows = [row for size in dict.fromkeys(plan.ranks) for row in _rows(plan, size, with_mpi="mpi" not in missing)]
    return written("collectives", plan._asdict(), missing, rows)


def cases(plan: CollectivesPlan) -> list[Case]:
    """Every operation at every size; a barrier has none."""
    found = []
    for name in plan.operations:
        found += [Case(name, 0)] if name == MOVES_NOTHING else [Case(name, num_bytes) for num_bytes in plan.sizes]
    return found


def _rows(plan: CollectivesPlan, size: int, *, with_mpi: bool) -> list[dict[str, Any]]:
    """The rows of `size` ranks, measured by one crew."""
    with mpi.peers(size) if with_mpi else nullcontext() as peers:

        def work(crew: BenchRank) -> list[dict[str, list[list[float]]]]:
            with peers.partner(crew.rank) if peers else nullcontext() as partner:
                return [_taken(plan, crew, case, partner.run(*case) if partner else None) for case in cases(plan)]

        by_rank = crewed(work, size, peers.check if peers else None)
    by_case = zip(cases(plan), zip(*by_rank, strict=True), strict=True)
    return [
        row
        for case, seconds in by_case
        for row in _rows_of(case, size, slowest(seconds, "median"), slowest(seconds, "mean"))
    ]


def _taken(
    plan: CollectivesPlan, crew: BenchRank, case: Case, mpi_run: Callable[[int], list[float]] | None
) -> dict[str, list[list[float]]]:
    """One case's turns on this rank. The tensors go when it ends."""
    crew.say(f"{crew.size} ranks: {case.operation}" + (f", {case.num_bytes:,} bytes" if case.num_bytes else ""))
    return turns(_contenders(crew, case, mpi_run), crew, rounds=plan.rounds, turn_s=plan.turn_s)


def _contenders(crew: BenchRank, case: Case, mpi_run: Callable[[int], list[float]] | None) -> list[Contender]:
    """All contenders that can do it, on the same tensor where they can share one."""
    make, size = OPERATIONS[case.operation], crew.size
    count = max(elements(case.num_bytes, size), size)
    tensor = torch.zeros(count)
    found = [_contender("gloo", checked(make(crew.gloo, tensor), crew.rank, "gloo"))]
    if mpi_run:
        found.append(Contender("mpi", mpi_run))
    if crew.ours is not None:
        found.insert(0, _contender("ours", checked(make(crew.ours, tensor), crew.rank, "polytempo")))
        if case.operation == "all_reduce":
            shared = own_arena().empty(count)
            found.insert(1, _contender("ours_arena", checked(make(crew.ours, shared), crew.rank, "polytempo")))
    if not limit.missing():
        found += _limits(crew, case, tensor)
    return found


def _contender(name: str, prepared: Prepared) -> Contender:
    run = timed(prepared.call)
    return Contender(name, lambda calls: [seconds / prepared.steps for seconds in run(calls)])


def _limits(crew: BenchRank, case: Case, tensor: torch.Tensor) -> list[Contender]:
    if case.operation == "barrier":
        return [Contender("limit", limit.Limit(crew.gloo, tensor.numel()).barrier)]
    if case.operation != "all_reduce":
        return []
    program = limit.Limit(crew.gloo, tensor.numel())
    staged = program.staged(tensor)
    total = [crew.size * (crew.size + 1) / 2]
    for call, filled in ((staged, tensor), (program.direct, program.data)):
        checked(Prepared(partial(call, 1), filled, filled, total), crew.rank, "the limit")
    return [Contender("limit", staged), Contender("limit_arena", program.direct)]


def _rows_of(
    case: Case, ranks: int, found: dict[str, Measurement], means: dict[str, Measurement]
) -> list[dict[str, Any]]:
    rows = []
    for tensors, suffix in {"any": "", "arena": "_arena"}.items():
        names = {"ours": f"ours{suffix}", "gloo": "gloo", "mpi": "mpi", "limit": f"limit{suffix}"}
        if suffix and not {names["ours"], names["limit"]} & set(found):
            continue
        row: dict[str, Any] = {"operation": case.operation, "tensors": tensors, "ranks": ranks, "bytes": case.num_bytes}
        row |= {key: _in_us(found[name], means[name]) if name in found else None for key, name in names.items()}
        row["ratios"] = {pair: _ratio(pair, names, found) for pair in RATIOS}
        rows.append(row)
    return rows


def _ratio(pair: str, names: dict[str, str], found: dict[str, Measurement]) -> dict[str, float] | None:
    numerator, denominator = (names[key] for key in pair.split("/"))
    if not {numerator, denominator} <= set(found):
        return None
    return ratio(found[numerator], found[denominator])._asdict()


def _in_us(figure: Measurement, mean: Measurement) -> dict[str, Any]:
    return {
        "median_us": 1e6 * figure.median,
        "low_us": 1e6 * figure.low,
        "high_us": 1e6 * figure.high,
        "mean_us": 1e6 * mean.median,
        "rounds_us": [1e6 * seconds for seconds in figure.rounds],
    }


def _check(plan: CollectivesPlan) -> None:
    """Refuse an impossible plan."""
    unknown = [name for name in plan.operations if name not in OPERATIONS]
    if unknown or not plan.operations:
        raise ValueError(
            f"--operations: there is no {unknown[0] if unknown else 'name'!r}; there are: {', '.join(OPERATIONS)}"
        )
    if not plan.ranks or not all(2 <= size <= limit.MAX_RANKS for size in plan.ranks):
        raise ValueError(
            f"--ranks {_joined(plan.ranks)}: numbers from 2 to {limit.MAX_RANKS}, with commas between them"
        )
    least = 4 * max(plan.ranks)
    if not plan.sizes or min(plan.sizes) < least:
        raise ValueError(f"--sizes {_joined(plan.sizes)}: at least {least} bytes, an f32 number for each rank")
    needed, free = _COPIES * max(plan.sizes) * max(plan.ranks), memory_bytes("MemAvailable")
    if free is not None and needed > free:
        raise ValueError(
            f"--sizes: {max(plan.sizes):,} bytes on {max(plan.ranks)} ranks need about {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; leave the largest out"
        )


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
