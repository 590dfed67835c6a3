"""All strategies of the tests' catalogue: workers that compute together, and ranks that are alike, beside all alone.

PYTHONPATH=tests python benchmarks/virtual/agreement.py
"""

from __future__ import annotations

import pytest
import torch

import polytempo as pt
from laws import test_batched, test_symmetry
from laws.catalogue import ROWS
from polytempo.core import Strategy


def batched(strategy: Strategy) -> str:
    """The distance of the parameters after some steps."""
    if any((strategy.server, strategy.schedule, strategy.slices, strategy.distillation, strategy.one_copy)):
        return "refused"
    (alone, apart), (result, together) = (
        test_batched.final(test_batched.SMALL, strategy, batched=each) for each in (False, True)
    )
    away = float((together - apart).abs().max() / apart.abs().max())
    return f"{away:.1e} away" + ("" if result.trace_hash == alone.trace_hash else ", ANOTHER TRACE")


def alike(strategy: Strategy) -> str:
    """True if four ranks act as nine do."""
    if any((strategy.server, strategy.schedule, strategy.distillation)):
        return "-"
    with pytest.MonkeyPatch.context() as patch:
        four, all_ranks = test_symmetry.priced(strategy, pt.cluster.one_host(test_symmetry.RANKS), patch)
    if four is None:
        return "not alike"
    same = four.seconds == all_ranks.seconds and four.trace.bytes_sent == all_ranks.trace.bytes_sent
    return "alike" if same else f"DIFFERENT: {four.seconds} and {all_ranks.seconds} s"


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("| strategy | batched | priced by four ranks |\n|---|---|---|")
    for row in ROWS:
        strategy = row.make()
        print(f"| {strategy} | {batched(strategy)} | {alike(strategy)} |", flush=True)


if __name__ == "__main__":
    main()
