"""A run over agents is asked to leave, by its launcher or by one of its hosts: all ranks save and leave."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import polytempo as pt
from polytempo.core.system.notice import Preempted
from polytempo.engines.engine import EngineProcess
from polytempo.engines.remote.remote_engine import RemoteEngine
from polytempo.training.checkpoint.checkpoint_folders import latest
from process.test_remote_engine import DIGITS, agent_pids, agents, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.usefixtures(private.__name__)]


@pytest.mark.parametrize("to", ["launcher", "agent"])
def test_sigterm_to_any_process_of_a_run_saves_it(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, sent, polled = tmp_path / "run", list[int](), RemoteEngine.poll

    def poll(engine: RemoteEngine, wait_s: float = 0.0) -> list[EngineProcess]:
        metrics = out / "metrics.jsonl"
        if not sent and metrics.exists() and metrics.stat().st_size:
            sent.append(os.getpid() if to == "launcher" else agent_pids(os.getpid())[1])
            os.kill(sent[0], signal.SIGTERM)
        return polled(engine, wait_s)

    monkeypatch.setattr(RemoteEngine, "poll", poll)
    with pytest.raises(Preempted) as left:
        pt.run(DIGITS, pt.strategies.sync_sgd(), 2, epochs=10_000, threads=1, out=out, engine=agents("a", "b"))
    newest = latest(out / "checkpoint")
    assert newest is not None
    assert newest.name == f"step-{left.value.step:08d}"
    assert str(left.value) == f"preempted after step {left.value.step}, which is saved in {out}: go on with resume"
