"""Runs over agents that do not see the launcher's folder: all that is in it in the end came through the launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.report.status.rows import read_metrics
from polytempo.runs.frame.launcher_files import FileServer
from polytempo.training.checkpoint.checkpoint_folders import latest
from process.test_remote_engine import DIGITS, agents, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.usefixtures(private.__name__)]

s = pt.strategies


@pytest.fixture(autouse=True)
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents are on this host; they look for a mark that is not there, and take the folder for another host's."""
    plain = FileServer.to_plain
    monkeypatch.setattr(FileServer, "to_plain", lambda server: plain(server) | {"mark": ""})


def test_a_collective_run_leaves_everything_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for steps, resume in ((20, False), (30, True)):
        more: dict[str, Any] = {"steps": steps, "out": out, "resume": resume, "threads": 1}
        result = pt.run(DIGITS, s.local_sgd(period=4), 2, engine=agents("a", "b"), **more)
    assert result.parameters_sha256 == pt.run(DIGITS, s.local_sgd(period=4), 2, steps=30, threads=1).parameters_sha256
    newest = latest(out / "checkpoint")
    assert newest == out / "checkpoint" / "step-00000030"
    assert [path.name.count(".") for path in sorted(newest.glob("rank-*"))] == [2, 2], "named by their content"
    assert [row["step"] for row in read_metrics(out) if row["kind"] == "test"] == [20, 30]
    assert json.loads((out / "result.json").read_text())["report"] == str(out / "report.html")
    assert {path.name for path in out.iterdir()} == {
        *(
            "checkpoint",
            "events.jsonl",
            "live.json",
            "logs",
            "metrics.jsonl",
            "report.html",
            "result.json",
            "trace.json",
        )
    }


def test_shards_write_their_snapshots_through_the_launcher(tmp_path: Path) -> None:
    out, how = tmp_path / "run", s.async_sgd(shards=2)
    for epochs, resume in ((1, False), (2, True)):
        more: dict[str, Any] = {"epochs": epochs, "out": out, "resume": resume, "threads": 1}
        result = pt.run(DIGITS, how, 2, engine=agents("a", "b"), **more)
    assert result.samples == 2 * 1437
    assert not list(out.rglob("*.part"))
    assert len(list((out / "checkpoint").glob("snapshot-*-shard-*.safetensors"))) == 2 * 2
