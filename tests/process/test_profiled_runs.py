"""A profiled run has the bits and the trace of an unprofiled one, and leaves a trace of its ranks' steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import polytempo as pt
from polytempo.report.status.profile_trace import read_profiles, write_merged
from polytempo.worlds import ProcessWorld
from process.crew import together
from unit.test_profiles import checked
from warm import run

pytestmark = pytest.mark.process


@pytest.mark.parametrize("strategy", ["sync_sgd()", "one_f_one_b(stages=2, micro_batches=2)"])
def test_a_profiled_run_has_the_same_bits(strategy: str, tmp_path: Path) -> None:
    plain = pt.run("digits", strategy, 2, steps=12, out=tmp_path / "plain")
    found = pt.run("digits", strategy, 2, steps=12, out=tmp_path / "profiled", profile="4:7")
    assert (found.loss, found.trace_hash, found.bytes_sent_per_rank) == (
        plain.loss,
        plain.trace_hash,
        plain.bytes_sent_per_rank,
    )
    profiles = read_profiles(tmp_path / "profiled")
    assert [(each.rank, each.first, each.last) for each in profiles] == [(0, 4, 7), (1, 4, 7)]
    assert all(any("aten::" in part.name for part in each.slices) for each in profiles)
    assert {line[1] for each in profiles for line in each.events} == {4, 5, 6}
    ended = run(["-m", "polytempo", "profile", "profiled"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^0 .* 4 to 6 ", ended.stdout, re.MULTILINE)
    checked(json.loads((tmp_path / "profiled" / "profile.json").read_text()))
    assert "trace: profiled/profile.json (open it at ui.perfetto.dev)" in ended.stdout


def trained(world: ProcessWorld, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = pt.attach(model, optimizer, world=world, **more)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.full((4, 8), float(step + world.rank))).square().mean().backward()
        optimizer.step()
    handle.detach()
    return model.weight.detach().flatten().tolist()


def test_steps_of_an_own_loop_are_recorded(tmp_path: Path) -> None:
    plain = together(2, trained)
    assert together(2, lambda world: trained(world, out=tmp_path / "run", profile="2:4@1")) == plain
    [found] = read_profiles(tmp_path / "run")
    assert (found.rank, found.first, found.last) == (1, 2, 4)
    checked(json.loads(write_merged(tmp_path / "run", "own loop").read_text()))


def test_a_loop_that_ends_within_the_steps_leaves_them(tmp_path: Path) -> None:
    together(2, lambda world: trained(world, out=tmp_path / "run", profile="6:100"))
    assert [each.first for each in read_profiles(tmp_path / "run")] == [6, 6]


def test_a_run_that_ends_within_the_steps_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pt.run("digits", "sync_sgd()", 2, steps=12, out=tmp_path / "run", profile="10:20")
    said = "note: profile=10:20 recorded 2 of 10 steps, because the run has made the steps 0 to 11"
    assert said in capfd.readouterr().err


def test_a_loop_without_a_folder_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="profile=1:2 needs a folder"):
        pt.attach(model, SGD(model.parameters(), lr=0.1), profile="1:2")
