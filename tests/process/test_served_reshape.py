"""Shards come and go on real processes while workers train."""

from __future__ import annotations

from pathlib import Path

from polytempo import strategies
from polytempo.jobs import find
from polytempo.runs.served.run_served import run_served
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec


def test_two_shards_three_and_one_make_the_weights_that_two_make(tmp_path: Path) -> None:
    strategy = strategies.backup_workers(backups=0, shards=2)
    fixed = RunOptions(epochs=3, batch_size=120, threads=1)
    changing = RunOptions(epochs=3, batch_size=120, threads=1, reshape={1: 3, 2: 1}, out=tmp_path)
    stayed, went = (run_served(RunSpec.of(find("digits"), strategy, 3, options)) for options in (fixed, changing))
    assert stayed.parameters_sha256 == went.parameters_sha256
    server = went.server
    assert server is not None
    assert sum(worker["samples"] for worker in server["workers"]) == went.samples == 3 * 1437
    assert server["updates"] == 3 * 4
    assert server["dropped"] == server["refused"] == 0
    assert sum(count for _, count in server["staleness"]["histogram"]) == 3 * 4 * (2 + 3 + 1)  # once a shard
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir() if path.name != "evaluator.log")
    assert logs == [*(f"shard-{s}-node-{s + 3}.log" for s in range(3)), *(f"worker-{w}.log" for w in range(3))]
    assert not list((tmp_path / "checkpoint").glob("*"))
