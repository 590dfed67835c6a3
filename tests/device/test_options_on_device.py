"""Options of runs on a device: the CPU's results, also where the host reads numbers; and the saved models of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from device.crew import check_all, first_fault, together
from laws import test_adapters as adapters
from polytempo.engines.local_engine import launch
from polytempo.runs.simulated.asked_device import device_of
from polytempo.training.observe.trained_model import trained_model
from polytempo.worlds import ProcessWorld
from silent_tracker import SilentTracker

pytestmark = pytest.mark.process


def points(num_samples: int) -> TensorDataset:
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(num_samples))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


class Shards(pt.data.ShardedData):
    """48 samples in three shards."""

    names, counts = ("a", "b", "c"), (16, 16, 16)

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[Any]:
        held = points(48)
        yield from (held[16 * shard + number] for run in runs for number in run)


def right(predictions: Tensor, targets: Tensor) -> float:
    return float((predictions.argmax(1) == targets).double().mean())


JOB = pt.Job(
    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)),
    data=lambda folder: pt.Data(points(48), points(17)),
    loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
    optimizer=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
    correct=lambda output, target: output.argmax(1) == target,
    lr=0.05,
    batch_size=4,
)
JOBS = {
    "plain": JOB,
    "weighted": replace(JOB, loss=nn.functional.cross_entropy, weight=lambda batch: batch[1].sum() + 1),
    "measured": replace(JOB, metrics={"right": right}),
    "adapters": adapters.job(constant=False),
    "streamed": replace(JOB, data=lambda folder: pt.Data(Shards().shuffled(), points(17))),
}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "accumulated": ("weighted", "sync_sgd()", {"accumulate": 2, "clip_norm": 0.5}),
    "clipped and late": ("plain", "delayed_sgd(delay=1)", {"clip_norm": 0.5, "eval_every": 3}),
    "measured": ("measured", "local_sgd(period=2)", {"accumulate": 2, "eval_every": 3, "ema": 0.9}),
    "streamed": ("streamed", "sync_sgd()", {"accumulate": 3}),
    "streamed to a server": ("streamed", "async_sgd()", {}),
    "weighted slices": ("weighted", "sync_sgd(route=invariant)", {"clip_norm": 0.5}),
    "noise scale": ("plain", "sync_sgd()", {"noise_scale": 2}),
    "adapters": ("adapters", "local_sgd(period=2)", {"ema": 0.9, "batch_size": 8}),
    "adapters in stages": ("adapters", "gpipe(2, 2)", {"batch_size": 8}),
    "adapters and a server": ("adapters", "async_sgd()", {"batch_size": 8}),
    "islands": ("plain", "islands(outer=diloco(period=2))", {"workers": 4}),
    "islands of two and of one": ("plain", "islands(outer=diloco(period=2))", {"workers": 3}),
}


class Seen(pt.callbacks.Callback):
    """Notes each evaluation, and asks for one."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> pt.callbacks.Control:
        return pt.callbacks.Control(evaluate=facts.step == 2)

    def on_evaluation(self, facts: pt.callbacks.CallbackFacts) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([facts.step, dict(facts.values)]) + "\n")


def check(device: str, found: list[Any], expected: list[Any]) -> None:
    """The pretend device computes as the CPU does; a real one only nearly so."""
    if device == "pretend":
        assert found == expected
    else:
        assert found[:2] == pytest.approx(expected[:2], rel=0.05)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_options_ends_with_the_cpus_result(device: str, name: str) -> None:
    job, strategy, options = RUNS[name]
    workers = 1 if "server" in name else 2
    found = [
        pt.run(JOBS[job], strategy, **{"workers": workers, "steps": 6, "threads": 1, "device": where} | options)
        for where in (device, "cpu")
    ]
    check(device, *([each.steps, each.loss, each.samples, each.parameters_sha256, each.metrics] for each in found))


def test_a_run_by_speed_counts_each_sample(device: str) -> None:
    found = pt.run(JOB, "sync_sgd()", 2, steps=18, threads=1, device=device, balance="speed")
    assert (found.steps, found.samples) == (18, 18 * 8)


def test_a_watched_run_ends_with_the_cpus_result_and_its_models_are_the_cpus(device: str, tmp_path: Path) -> None:
    """Callbacks, trackers, profiles; then scores and outputs of the saved weights, and of their average."""
    found = {}
    for name, where in (("there", device), ("here", "cpu")):
        tracker, out = SilentTracker(), tmp_path / name
        watched = {"callbacks": [Seen(tmp_path / f"{name}.txt")], "trackers": [tracker], "profile": "2:4"}
        result = pt.run(
            JOB, "sync_sgd()", 2, steps=6, threads=1, device=where, out=out, ema=0.5, checkpoint_every=3, **watched
        )
        assert tracker.ended == "finished"
        assert len([*out.glob("**/*profile*")]) > 0
        assert device_of(out) == where
        *_, last = (tmp_path / f"{name}.txt").read_text().splitlines()  # the asked one comes some steps later, or not
        found[name] = [result.steps, result.loss, result.parameters_sha256, last]
    check(device, found["there"], found["here"])

    def asked(folder: str, place: str, average: bool) -> list[Any]:
        model = trained_model(JOB, tmp_path / folder, average=average, device=place)
        outputs = model.outputs()
        assert (outputs.device.type, model.model[0].weight.device.type) == ("cpu", torch.device(place).type)
        file = model.export("safetensors", tmp_path / "model.safetensors")
        return [*model.score()[:2], outputs.tolist(), file.stat().st_size]

    for average in (False, True):
        [there, crossed] = launch(
            lambda _, average=average: [asked("there", f"{device}:0", average), asked("here", f"{device}:0", average)],
            1,
            threads=1,
        )[0]
        here = asked("there", "cpu", average)
        check(device, there, here)
        check(device, crossed, here)


def test_a_loop_scores_on_the_device(device: str) -> None:
    def scored(card: torch.device) -> dict[str, float]:
        torch.manual_seed(0)
        net = JOB.model().to(card)
        handle = pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "sync_sgd()")
        test = points(17)
        return {
            **pt.score(lambda batch: {"right": net(batch[0].to(card)).argmax(1) == batch[1].to(card)}, test),
            **handle.evaluate(lambda batch: (net(batch[0].to(card)), batch[1].to(card)), test, {"all": right}),
        }

    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        def fault() -> str:
            there, here = scored(card), scored(torch.device("cpu"))
            return "" if there == here else f"{there} {here}"

        return first_fault({"scores": fault})

    check_all(together(device, 2, work))
