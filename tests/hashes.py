"""Hashes of runs, which a change of the code's structure must leave unchanged.

    python tests/hashes.py runs before.json          # every row of the catalogue, in both worlds
    python tests/hashes.py chaos before.json 1000    # the outcome of so many seeds of `polytempo chaos`
    python tests/hashes.py differ before.json after.json

Parameters depend on the instruction set and on torch, so lists are compared on one machine. Strategies with results
that depend on the order of real processes are run with one worker there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

import polytempo as pt
from laws.catalogue import HELPED, ROWS, SERVED, Row, label
from polytempo.chaos import scenario
from polytempo.jobs import find

STEPS, WORKERS = 12, 3


def hashes(result: pt.Result) -> list[Any]:
    """The hashes of parameters, operations and messages."""
    return [result.parameters_sha256, result.trace_hash, result.bytes_sent_per_rank]


def attempt(world: str, row: Row) -> list[Any]:
    """One run of one row. A refusal is an answer, too."""
    strategy = row.make()
    try:
        if world == "virtual":
            return hashes(pt.simulate(find("digits"), strategy, WORKERS, steps=STEPS, threads=1))
        by_pace = strategy.one_copy is not None or (strategy.server is not None and row.name != "backup_workers")
        by_pace = by_pace or row.drops
        result = pt.run(find("digits"), strategy, 1 if by_pace else WORKERS, steps=STEPS, threads=1)
        return hashes(result) if strategy.server is None else [result.parameters_sha256]
    except (ValueError, pt.errors.PolytempoError) as error:
        return [type(error).__name__]


def runs() -> dict[str, list[Any]]:
    """World and strategy -> hashes."""
    return {
        f"{world} {label(row)}": attempt(world, row)
        for world in ("virtual", "process")
        for row in [*ROWS, *SERVED, *HELPED]
    }


def chaos(seeds: int) -> dict[str, list[Any]]:
    """Seed -> the outcome, in numbers."""
    found = {}
    for seed in range(seeds):
        outcome = scenario.run(seed)
        found[f"chaos {seed}"] = [outcome.violation, outcome.num_events, outcome.virtual_s, outcome.trace]
    return found


def differ(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each entry that is not the same in both."""
    return [
        f"{name}: {before.get(name)} | {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def main(what: str, *arguments: str) -> int:
    """One of the commands above."""
    if what == "differ":
        lines = differ(*(json.loads(Path(path).read_text()) for path in arguments))
        print(*lines, f"{len(lines)} differ", sep="\n")
        return bool(lines)
    torch.set_num_threads(1)
    found = runs() if what == "runs" else chaos(int(arguments[1]))
    Path(arguments[0]).write_text(json.dumps(found, indent=1))
    print(len(found), "entries,", hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
