"""Runs in a folder named by a URL leave the same files as in a folder, and go on from it to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from object_store import bucket
from polytempo.core.system.url_path import UrlPath
from polytempo.report.status.rows import read_metrics
from polytempo.server.snapshots.snapshot import newest_whole
from polytempo.training.checkpoint.checkpoint_folders import latest
from process.test_resume import job
from process.test_served_resume import EPOCHS, SHARDS, WORKERS, counted, counting, killed, strategy

pytestmark = pytest.mark.process

s = pt.strategies


def rows(out: Path | UrlPath) -> list[dict[str, Any]]:
    """Rows of metrics without times."""
    timed = ("seconds", "samples_per_s")
    return [{k: v for k, v in row.items() if k not in timed} for row in read_metrics(out)]


@pytest.mark.parametrize("how", [s.local_sgd(period=4)], ids=str)
def test_a_collective_run_goes_on_to_the_same_bits(how: pt.Strategy, tmp_path: Path) -> None:
    local, url = tmp_path / "local", UrlPath(bucket(tmp_path))
    for out in (local, url):
        pt.run(job(), how, 2, steps=10, checkpoint_every=5, out=out, threads=1)
        resumed = pt.run(job(), how, 2, steps=20, out=str(out), resume=True, threads=1)
        assert resumed.report == str(out / "report.html")
        assert latest(out / "checkpoint") == out / "checkpoint" / "step-00000020"
    results = [json.loads((out / "result.json").read(1 << 20)) for out in (url,)]
    results.append(json.loads((local / "result.json").read_text()))
    straight = pt.run(job(), how, 2, steps=20, threads=1)
    assert {result["parameters_sha256"] for result in results} == {straight.parameters_sha256}
    assert results[0]["trace_hash"] == results[1]["trace_hash"]
    assert rows(url) == rows(local) != []
    assert url.names() == sorted(path.name for path in local.iterdir())
    assert (url / "logs").names() == ["rank-0.log", "rank-1.log"]


def test_ranks_that_wait_for_none_save_at_a_url_too(tmp_path: Path) -> None:
    url = UrlPath(bucket(tmp_path))
    pt.run(job(), s.hogwild(), 2, steps=10, checkpoint_every=5, out=url, threads=1)
    assert (url / "checkpoint").names() == ["step-00000005", "step-00000010"]
    assert pt.run(job(), s.hogwild(), 2, steps=12, out=url, resume=True, threads=1).steps == 12


def test_every_ticket_counts_once_over_a_killed_run_and_its_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = UrlPath(bucket(tmp_path))
    killed(url, 1, strategy())  # type: ignore[arg-type]  # a URL serves as well
    number = newest_whole(url / "checkpoint", SHARDS)
    assert number is not None
    result = pt.run(counting(), strategy(), WORKERS, epochs=EPOCHS, out=url, resume=True, threads=1)
    assert result.parameters_sha256 == counted(EPOCHS)
    assert "no record" in capfd.readouterr().err
    assert {"checkpoint", "events.jsonl", "logs", "metrics.jsonl", "report.html", "result.json", "trace.json"} <= set(
        url.names()
    )
    with pytest.raises(ValueError, match="has done its 360 batches already"):
        pt.run(counting(), strategy(), WORKERS, epochs=EPOCHS, out=url, resume=True, threads=1)


def test_a_store_that_cannot_be_reached_is_said_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/run: no filesystem is known for s3://"):
        pt.run(job(), s.sync_sgd(), 1, steps=1, out="s3://bucket/run")


def test_a_simulation_leaves_its_files_at_a_url(tmp_path: Path) -> None:
    out = UrlPath(f"memory://{tmp_path.name}")
    result = pt.simulate(job(), s.sync_sgd(), workers=2, steps=4, out=out, checkpoint_every=2)
    assert result.report == str(out / "report.html")
    assert out.names() == ["checkpoint", "events.jsonl", "metrics.jsonl", "report.html", "result.json", "trace.json"]
    assert latest(out / "checkpoint") == out / "checkpoint" / "step-00000004"
