"""The user's own numbers in runs on processes: each kind of run, and loops of one's own, also resumed."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
import warm
from polytempo.core.system.folder_lock import FolderTaken
from polytempo.jobs import find
from polytempo.report.status.profile_trace import profiled_ranks
from polytempo.report.status.records import ExchangeRow, Logged, LoggedImage, LoggedText, RunFinished, RunStarted
from polytempo.report.status.stream import stream
from polytempo.worlds import ProcessWorld
from process.crew import together
from silent_tracker import SilentTracker

s = pt.strategies
KINDS: dict[str, tuple[pt.Strategy, dict[str, Any]]] = {
    "collective": (s.sync_sgd(), {}),
    "elastic": (s.sync_sgd(), {"min_workers": 1}),
    "served": (s.async_sgd(), {}),
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss, logged in each step with a picture and a text."""
    found = nn.functional.cross_entropy(output, target)
    pt.log(own=found)
    pt.training.log_image("output", output.detach().sigmoid())
    pt.training.log_text("first", str(int(target[0])))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_logs_in_each_kind_of_run(kind: str, tmp_path: Path) -> None:
    strategy, more = KINDS[kind]
    quiet = pt.run(find("digits"), strategy, 2, steps=4, **more)
    result = pt.run(replace(find("digits"), loss=loss), strategy, 2, steps=4, out=tmp_path, **more)
    assert kind == "served" or result.parameters_sha256 == quiet.parameters_sha256
    records = stream(tmp_path)
    logged = [record for record in records if isinstance(record, Logged)]
    if kind == "served":
        assert {record.worker for record in logged} <= {0, 1}
        assert len(logged) == 8, "four steps of two workers"
    else:
        assert [(record.step, record.worker) for record in logged] == [(step, None) for step in range(1, 5)]
    pictures = [record for record in records if isinstance(record, LoggedImage)]
    texts = [record for record in records if isinstance(record, LoggedText)]
    assert len(pictures) == len(texts) == len(logged)
    assert all((tmp_path / record.path).is_file() for record in pictures)
    exchanged = [record for record in records if isinstance(record, ExchangeRow)]
    assert {record.worker for record in exchanged} == ({0, 1} if kind == "served" else {None})
    assert ({"post", "take"} if kind == "served" else {"all_reduce"}) <= exchanged[0].ops.keys()
    assert exchanged[0].step <= 4


def test_a_stage_that_does_not_write_says_so_once_in_its_log(tmp_path: Path) -> None:
    """The loss's numbers are on the last stage's rank, and rank 0 writes."""
    pt.run(replace(find("digits"), loss=loss), s.ddg(stages=2), 2, steps=3, out=tmp_path)
    assert [record for record in stream(tmp_path) if isinstance(record, Logged)] == []
    said = (tmp_path / "logs/rank-1.log").read_text()
    assert said.count("pt.log on stage 1 is not written") == 1


def test_a_loop_logs_into_its_folder_and_goes_on(tmp_path: Path) -> None:
    """Rank 0's values are written. A loop that loads a state keeps the rows up to its step."""

    def work(world: ProcessWorld) -> None:
        state: Any = None
        for part in (1, 2):
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = pt.attach(model, optimizer, s.sync_sgd(), world=world, out=tmp_path)
            if state is not None:
                handle.load_state_dict(state)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
                handle.log(rank=world.rank, part=part)
                pt.log(also=1.0)
                state = handle.state_dict() if handle.step == 2 else state
            handle.log_text("end", f"part {part}")
            handle.detach()
            handle.log(late=1.0)

    together(2, work)
    records = stream(tmp_path)
    values = [(record.step, record.values) for record in records if isinstance(record, Logged)]
    own = [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert values == [
        each for step, part in own for each in ((step, {"rank": 0.0, "part": part}), (step, {"also": 1.0}))
    ]
    starts = [record for record in records if isinstance(record, RunStarted)]
    assert [(start.job, start.workers, start.strategy) for start in starts] == [("Linear", 2, str(s.sync_sgd()))] * 2
    assert [record for record in records if isinstance(record, RunFinished)] == [RunFinished(state="finished")] * 2
    assert [record.text for record in records if isinstance(record, LoggedText)] == ["part 2"]
    exchanged = [record for record in records if isinstance(record, ExchangeRow)]
    later = [record for record in exchanged if record.since_step >= 2]
    assert {record.step for record in exchanged if record not in later} <= {1, 2}, "others are of dropped rows"
    assert [record.since_step for record in later] == [2, *(record.step for record in later[:-1])]
    assert later[-1].step == 5
    assert sum(record.ops["all_reduce"].count for record in later if "all_reduce" in record.ops) >= 3, "one a step"


def test_a_loop_that_is_shown_has_the_bits_and_the_exchanges_of_another(tmp_path: Path) -> None:
    def trained(world: ProcessWorld, **shown: Any) -> tuple[list[float], dict[str, int]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = pt.attach(model, optimizer, s.local_sgd(period=2), world=world, on_drift="ignore", **shown)
        before = world.trace.exchanged(world.rank)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
            if shown:
                handle.log(step=step, own=1.0)
        handle.detach()
        after = world.trace.exchanged(world.rank)
        sent = {op: each.sent_bytes - (before[op].sent_bytes if op in before else 0) for op, each in after.items()}
        return [p.sum().item() for p in model.parameters()], sent

    for shown, quiet in together(2, lambda world: [trained(world, out=tmp_path), trained(world)]):
        assert shown == quiet


@pytest.mark.parametrize("schedule", [s.gpipe(2, 2), s.gpipe(2, 2, inner=s.ssp(bound=1))], ids=["gpipe", "served"])
def test_a_pipeline_logs_where_its_loss_is_and_goes_on(schedule: pt.Strategy, tmp_path: Path) -> None:
    """A shown pipeline has the bits of another one."""

    def trained(world: ProcessWorld, steps: int, state: Any = None, **shown: Any) -> tuple[list[float], Any, Any]:
        torch.manual_seed(0)
        if schedule.server is None and world.port.mesh is None:
            pt.init(mesh={"data": 1, "stage": 2})
        x, y = torch.randn(8, 3), torch.randn(8, 1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        make = functools.partial(torch.optim.SGD, lr=0.1)
        pipe = pt.pipeline(model, make, nn.functional.mse_loss, schedule, sample=x[:4], **shown)
        if state is not None:
            pipe.load_training_state(state)
        shard, losses = pt.shard(torch.utils.data.TensorDataset(x, y), batch_size=4, seed=1), []
        while pipe.steps < steps:
            for batch in shard:
                if (loss := pipe.step(*batch)) is not None:
                    losses.append(loss.item())
                    if shown:
                        pipe.log(loss=loss)
        end = pipe.training_state(), pipe.state_dict()
        pipe.detach()
        return losses, *end

    def work(world: ProcessWorld) -> list[Any]:
        shown: dict[str, Any] = {"out": tmp_path, "trackers": [SilentTracker()]}
        shown |= {} if schedule.server else {"profile": "1:3"}
        quiet, (losses, state, model) = trained(world, 4), trained(world, 4, **shown)
        later, *_ = trained(world, 6, state, **shown)
        return [losses + later, quiet[0], all(torch.equal(quiet[2][name], model[name]) for name in model)]

    first, last = together(2, work)
    assert first[2]
    assert last[2]
    losses, quiet, _ = first if schedule.server else last
    assert losses[:4] == quiet
    records = stream(tmp_path)
    written = [(record.step, record.values) for record in records if isinstance(record, Logged)]
    assert written == [(step, {"loss": loss}) for step, loss in enumerate(losses, 1)]
    assert len(profiled_ranks(tmp_path)) == (0 if schedule.server else 2)
    ops = {op for record in records if isinstance(record, ExchangeRow) for op in record.ops}
    assert ({"post", "take"} if schedule.server else {"send", "recv"}) <= ops


def test_a_loop_without_a_folder_names_the_argument_and_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    def work(world: ProcessWorld) -> None:
        models = [nn.Linear(3, 1), nn.Linear(3, 1)]
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
        handle = pt.attach(models[0], first, world=world)
        with pytest.raises(ValueError, match="out='runs/mine'"):
            handle.log(own=1.0)
        handle.detach()
        handle = pt.attach(models[0], first, world=world, out=tmp_path)
        with pytest.raises(FolderTaken):
            pt.attach(models[1], second, world=world, out=tmp_path)
        handle.detach()

    together(1, work)


PROGRAM = """
import torch
import polytempo as pt

net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
handle = pt.attach(net, optimizer, "sync_sgd", out="run")
net(torch.ones(1, 2)).sum().backward()
optimizer.step()
handle.log(first=1.0)
"""


@pytest.mark.parametrize(("ending", "state", "why"), [("", "finished", ""), ("raise KeyError('x')", "failed", "'x'")])
def test_a_loop_that_nobody_has_detached_ends_with_its_program(
    ending: str, state: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(PROGRAM + ending)
    done = warm.run(["loop.py"], tmp_path)
    assert (done.returncode != 0) == bool(ending)
    assert "Exception ignored" not in done.stderr
    started, logged, finished = stream(tmp_path / "run")
    assert isinstance(started, RunStarted)
    assert logged == Logged(step=1, values={"first": 1.0})
    assert finished == RunFinished(state=state, why=why)  # type: ignore[arg-type]
    assert not list((tmp_path / "run").glob(".lock*"))
