"""Whole runs of pipelines: both worlds, resumed, in other stages, after a stage was killed or asked to leave."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import polytempo as pt
from laws.catalogue import STAGED, Row, label
from polytempo.core.system.notice import Preempted
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.worlds import ProcessWorld
from process.crew import together
from staged_job import job, model

pytestmark = pytest.mark.process

STEPS, SAVED = 12, 5


def straight(row: Row, workers: int) -> pt.Result:
    return pt.simulate(job(), row.make(), workers, steps=STEPS, threads=1)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_run_that_goes_on_in_the_other_world_ends_with_the_same_bits(stages: int, tmp_path: Path) -> None:
    """So both worlds compute the same, a checkpoint has all messages under way, and random draws are repeated."""
    rows = [row for row in STAGED if row.make().stages == stages]
    for number, row in enumerate(rows):
        out = tmp_path / str(number)
        pt.simulate(job(), row.make(), stages, steps=SAVED, threads=1, out=out, checkpoint_every=1)

    def work(world: ProcessWorld) -> Any:
        found = []
        sgd, mse = partial(torch.optim.SGD, lr=0.02), nn.functional.mse_loss
        left = pt.pipeline(model(), sgd, mse, pt.strategies.ddg(stages), sample=torch.zeros(12, 4))
        for _ in range(3):  # messages under way in it stay so
            left.step(torch.zeros(12, 4), torch.zeros(12, 2))
        for number, row in enumerate(rows):
            options: dict[str, Any] = {"steps": STEPS, "out": tmp_path / str(number), "resume": True}
            result = pt.Trainer(job(), row.make(), **options).fit()
            found.append([result.parameters_sha256, result.loss, result.accuracy])
        return found

    first, *_ = together(stages, work, timeout_s=180)
    for row, found in zip(rows, first, strict=True):
        expected = straight(row, stages)
        assert found == [expected.parameters_sha256, expected.loss, expected.accuracy], label(row)


def test_replicas_of_late_stages_that_average_their_parameters_go_on_with_the_same_bits(tmp_path: Path) -> None:
    strategy = pt.strategies.pipedream(2, inner=pt.strategies.local_sgd(period=3))
    expected = pt.run(job(), strategy, 4, steps=STEPS, threads=1)
    pt.run(job(), strategy, 4, steps=SAVED, threads=1, out=tmp_path, checkpoint_every=SAVED)
    resumed = pt.run(job(), strategy, 4, steps=STEPS, threads=1, out=tmp_path, resume=True)
    assert (resumed.parameters_sha256, resumed.loss) == (expected.parameters_sha256, expected.loss)
    assert resumed.parameters_sha256 == pt.simulate(job(), strategy, 4, steps=STEPS, threads=1).parameters_sha256


def test_saving_changes_no_run_of_replicas_with_batch_norm(tmp_path: Path) -> None:
    """Their running statistics differ where the last forward passes of a step come behind its update."""
    s = pt.strategies
    made = [s.pipedream_2bw(2, 2), s.pipelined_backprop(2)]

    def work(world: ProcessWorld) -> Any:
        found = []
        for number, strategy in enumerate(made):
            saved, straight = tmp_path / f"{number} saved", tmp_path / f"{number} straight"
            pt.Trainer(job(), strategy, steps=SAVED, out=saved, checkpoint_every=1).fit()
            results = [
                pt.Trainer(job(), strategy, steps=STEPS, out=out, checkpoint_every=1, resume=out == saved).fit()
                for out in (saved, straight)
            ]
            found.append([[each.parameters_sha256, each.loss, each.accuracy] for each in results])
        return found

    found, *_ = together(4, work, timeout_s=180)
    for number, (strategy, seen) in enumerate(zip(made, found, strict=True)):
        result = pt.simulate(job(), strategy, 4, steps=STEPS, threads=1, out=tmp_path / "virtual")
        assert seen == [[result.parameters_sha256, result.loss, result.accuracy]] * 2, strategy
        assert scores_in(tmp_path / f"{number} straight") == scores_in(tmp_path / "virtual"), strategy


def scores_in(run: Path) -> dict[int, float]:
    """The losses of the test data in the middle of a run, by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "test"}


def test_a_checkpoint_is_the_whole_model_and_goes_on_in_other_stages(tmp_path: Path) -> None:
    """The checkpoint loads into a plain module, and momentum follows the parameters' names."""
    plain = job(dropout=0.0)
    three = pt.strategies.one_f_one_b(3, micro_batches=1)
    pt.simulate(plain, three, 3, steps=SAVED, out=tmp_path, checkpoint_every=SAVED, threads=1)
    folder = latest(tmp_path / "checkpoint")
    assert isinstance(folder, Path)
    state: dict[str, Tensor] = {}
    for part in sorted(folder.glob("rank-*.safetensors")):
        state |= {n.removeprefix("model/"): t for n, t in load_file(part).items() if n.startswith("model/")}
    model().load_state_dict(state)
    other = pt.strategies.gpipe(2, micro_batches=1)
    resumed = pt.run(plain, other, 2, steps=STEPS, threads=1, out=tmp_path, resume=True)
    expected = pt.simulate(plain, three, 3, steps=STEPS, threads=1)
    assert resumed.loss == pytest.approx(expected.loss, rel=1e-5)


def test_a_checkpoint_of_whole_models_is_refused(tmp_path: Path) -> None:
    pt.simulate(job(), pt.strategies.sync_sgd(), 2, steps=4, out=tmp_path, checkpoint_every=4)
    with pytest.raises(pt.errors.WorkerDied, match="with the whole model on each worker, and ddg"):
        pt.run(job(), pt.strategies.ddg(2), 2, steps=8, out=tmp_path, resume=True)


def test_a_loop_of_one_s_own_goes_on_from_its_state_with_the_same_bits() -> None:
    """Messages under way, random draws, replicas' memory; through a file as `torch.save` writes it."""
    s, c = pt.strategies, pt.compression
    made = [
        s.ddg(2, inner=s.top_k_sgd(0.2, exact_below=0), activations=c.qsgd(levels=127), gradients=c.qsgd(levels=127)),
        s.pipelined_backprop(2, inner=s.delayed_sgd()),
        s.pipedream(2, vertical_sync=True, inner=s.local_sgd(period=3)),
        s.pipedream_2bw(2, 2),
        s.synthetic_gradients(2, lr=0.01),
        s.one_f_one_b(2, 2),
    ]
    x, y = torch.randn(8, 12, 4), torch.randn(8, 12, 2)

    def work(world: ProcessWorld) -> Any:
        def pipe(strategy: pt.Strategy) -> Any:
            sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
            return pt.pipeline(model(), sgd, nn.functional.mse_loss, strategy, sample=x[0])

        found = []
        for strategy in made:
            straight, file, again = pipe(strategy), BytesIO(), None
            for step in range(8):
                if step == 3:
                    torch.save(straight.training_state(), file)
                straight.step(x[step] + world.rank // 2, y[step])
            straight.finish()
            file.seek(0)
            again = pipe(strategy)
            again.load_training_state(torch.load(file))
            for step in range(3, 8):
                again.step(x[step] + world.rank // 2, y[step])
            again.finish()
            ends = [{name: t.tolist() for name, t in each.state_dict().items()} for each in (straight, again)]
            found.append(ends[0] == ends[1])
        with pytest.raises(ValueError, match="has made 8 steps, whose messages are under way"):
            again.load_training_state(torch.load(BytesIO(file.getvalue())))
        with pytest.raises(ValueError, match=r"saved by a pipeline with schedule 'one_f_one_b'.*load state_dict\(\)"):
            pipe(made[0]).load_training_state(torch.load(BytesIO(file.getvalue())))
        with pytest.raises(ValueError, match="says itself by which codecs"):
            pt.pipeline(model(), torch.optim.SGD, lambda a, b: a, made[0], sample=x[0], gradients=c.bf16())
        return found

    assert together(4, work, timeout_s=180) == [[True] * len(made)] * 4


def ending(at: int, by: signal.Signals, once: Path) -> pt.Job:
    """The job; its last stage gets a signal in its loss at the `at`-th batch, once."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at and os.environ.get("POLYTEMPO_RANK") == "1" and not once.exists():
            once.touch()
            os.kill(os.getpid(), by)
        return nn.functional.mse_loss(output, target)

    return replace(job(), loss=loss)


def test_a_stage_that_is_killed_ends_the_run_by_name_and_it_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    of, strategy, out = ending(9, signal.SIGKILL, tmp_path / "once"), pt.strategies.ddg(2), tmp_path / "out"
    with pytest.raises(pt.errors.WorkerDied, match="rank 1 of 2 was killed by SIGKILL"):
        pt.run(of, strategy, 2, steps=STEPS, threads=1, out=out, checkpoint_every=3)
    resumed = pt.run(of, strategy, 2, steps=STEPS, threads=1, out=out, resume=True)
    assert resumed.parameters_sha256 == pt.simulate(job(), strategy, 2, steps=STEPS, threads=1).parameters_sha256


def test_stages_that_are_asked_to_leave_save_the_same_step(tmp_path: Path) -> None:
    strategy, out = pt.strategies.pipelined_backprop(2), tmp_path / "out"
    with pytest.raises(Preempted):
        pt.run(ending(4, signal.SIGTERM, tmp_path / "once"), strategy, 2, epochs=10_000, threads=1, out=out)
    folder = latest(out / "checkpoint")
    assert isinstance(folder, Path)
    steps = int(folder.name.removeprefix("step-")) + 3
    resumed = pt.run(job(), strategy, 2, steps=steps, threads=1, out=out, resume=True)
    assert resumed.steps == steps
    assert resumed.parameters_sha256 == pt.simulate(job(), strategy, 2, steps=steps, threads=1).parameters_sha256


@pytest.mark.parametrize("train", [pt.run, pt.simulate])
def test_a_final_model_that_callbacks_have_seen_is_not_scored_again(train: Any, tmp_path: Path) -> None:
    """The last step makes the model final where stages wait for each other. Late gradients still change it."""
    for strategy, rows_at_end in [(pt.strategies.one_f_one_b(2, 2), 1), (pt.strategies.ddg(2), 2)]:
        out = tmp_path / strategy.name
        result = train(job(), strategy, 2, epochs=1, threads=1, out=out, callbacks=[pt.callbacks.Callback()])
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        scores = [(row["step"], row["loss"]) for row in rows if row["kind"] == "test"]
        assert scores[-1] == (result.steps, result.loss)
        assert sum(step == result.steps for step, _ in scores) == rows_at_end, strategy


def test_the_folder_of_a_run_says_what_stages_did(tmp_path: Path) -> None:
    pt.run(job(), pt.strategies.ddg(2), 2, epochs=2, threads=1, out=tmp_path)
    assert [each["most_delay"] for each in json.loads((tmp_path / "result.json").read_text())["stages"]] == [1, 0]
    assert "stages-0" in (tmp_path / "report.html").read_text()
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"forward", "backward", "update"} <= names


def test_what_no_pipeline_can_train_is_refused_before_a_process_starts() -> None:
    def refused(of: pt.Job, strategy: pt.Strategy, workers: int, **options: Any) -> str:
        with pytest.raises(ValueError, match=" ") as raised:
            pt.run(of, strategy, workers, **options)
        return str(raised.value)

    s = pt.strategies
    by_model = replace(job(), loss=pt.of_batch(lambda net, batch: (net(batch[0]) - batch[1]).square().mean()))
    assert "workers=3 cannot be whole models; use workers=4" in refused(job(), s.ddg(2), 3)
    assert "the model can be cut into at most" in refused(job(), s.ddg(20), 20)
    assert "a model can be cut where a batch is a pair (input, target): write the loss" in refused(
        by_model, s.ddg(2), 2
    )
    assert "PT1607" in refused(job(), s.ddg(2), 4, on_drift="restore")
    assert "PT1203" in refused(job(), s.ddg(2), 2, min_workers=1)
    net = model()
    with pytest.raises(ValueError, match="PT1103"):
        pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), s.ddg(2))
