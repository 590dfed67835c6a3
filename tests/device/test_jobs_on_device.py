"""Jobs on a device end with the CPU's result, and their state stays there.

Runs fork from this process, which never uses the device; a `Trainer` or a simulation is in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core.errors import JobFailed
from polytempo.device import num_devices, use_device
from polytempo.engines.local_engine import launch
from polytempo.spec.result import Result

pytest.importorskip("device.build", reason="the fixture `device` is made by the harness beside this file")

join, run_device = (import_module(f"polytempo.{name}") for name in ("engines.join.init", "training.model.run_device"))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 10))


JOB = pt.Job(
    model=model,
    data=lambda path: pt.Data(*pt.data.digits()),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    correct=lambda output, target: output.argmax(1) == target,
    lr=0.05,
    batch_size=16,
)
PLAIN = {"steps": 12}


def apart(work: Any) -> Any:
    """The value of `work()` in a process of its own."""
    [found] = launch(lambda _: work(), 1, threads=1)
    return found


def facts(result: Result) -> list[Any]:
    return [result.steps, result.loss, result.accuracy, result.parameters_sha256]


def check(device: str, on_device: list[Any], on_cpu: list[Any]) -> None:
    """The pretend device computes as the CPU does; a real one only nearly so."""
    if device == "pretend":
        assert on_device == on_cpu
    else:
        assert on_device[1] == pytest.approx(on_cpu[1], rel=0.05)


RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sync": ("sync_sgd()", 2, {}),
    "local": ("local_sgd(period=4)", 2, {}),
    "more workers than devices": ("sync_sgd(route=ring)", 3, {}),
    "gossip": ("gossip()", 2, {}),
    "compressed": ("top_k_sgd(0.05)", 2, {}),
    "average of weights": ("sync_sgd()", 2, {"ema": 0.9}),
    "growing batch": ("sync_sgd()", 2, {"batch_growth": {1: 2}, "steps": None, "epochs": 2}),
    "16 bits": ("sync_sgd()", 2, {"precision": "bf16"}),
    "elastic": ("sync_sgd()", 2, {"min_workers": 1}),
    "stages": ("gpipe(stages=2, micro_batches=2)", 2, {}),
    "stages with late gradients": ("pipedream(stages=2)", 2, {}),
    "split layers": ("split(rules='auto', parts=2)", 2, {}),
    "hybrid": ("hybrid()", 2, {}),
    "codistillation": ("codistillation(groups=2)", 2, {}),
    "slices": ("sync_sgd(route=invariant)", 2, {}),
    "parameter server": ("async_sgd()", 1, {}),
    "elastic averaging": ("easgd(period=2)", 1, {}),
    "stages with parameter servers": ("one_f_one_b(stages=2, inner=async_sgd())", 2, {}),
    "late stages with parameter servers": ("pipedream(stages=2, inner=async_sgd())", 2, {}),
}


@pytest.mark.process
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_with_the_cpus_result(device: str, name: str) -> None:
    strategy, workers, options = RUNS[name]
    found = [facts(pt.run(JOB, strategy, workers, device=where, **PLAIN | options)) for where in (device, "cpu")]
    check(device, *found)


SIMULATED = {
    "sync": ("sync_sgd()", {}),
    "local": ("local_sgd(period=4)", {}),
    "batched": ("local_sgd(period=4)", {"batched": True}),
    "parameter server": ("async_sgd()", {}),
}


@pytest.mark.process
@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulation_ends_with_the_cpus_result(device: str, name: str) -> None:
    strategy, options = SIMULATED[name]

    def simulated(where: str) -> list[Any]:
        job = JOB if "batched" not in options else without_dropout()
        return facts(pt.simulate(job, strategy, 4, device=where, steps=12, **options))

    check(device, *(apart(lambda where=where: simulated(where)) for where in (device, "cpu")))


def without_dropout() -> pt.Job:
    return replace(JOB, model=lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)))


WEIGHTS = torch.linspace(1, 2, 10)
WEIGHTED = {
    "module": nn.CrossEntropyLoss(weight=WEIGHTS),
    "keyword": partial(nn.functional.cross_entropy, weight=WEIGHTS),
    "module in a partial": partial(nn.CrossEntropyLoss(weight=WEIGHTS)),
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("loss", "strategy"), [*((loss, "sync_sgd()") for loss in WEIGHTED), ("module", "async_sgd()")]
)
def test_a_loss_with_weights_of_classes_is_copied_there(device: str, loss: str, strategy: str) -> None:
    weighted = replace(JOB, loss=WEIGHTED[loss])
    check(device, *(facts(pt.run(weighted, strategy, 1, device=where, **PLAIN)) for where in (device, "cpu")))
    assert WEIGHTS.device.type == WEIGHTED["module"].weight.device.type == "cpu"


@pytest.mark.process
@pytest.mark.parametrize(("strategy", "where"), [("sync_sgd()", "cpu"), ("hogwild()", "auto"), ("async_sgd()", "cpu")])
def test_a_run_on_the_cpu_leaves_devices_alone(
    device: str, monkeypatch: pytest.MonkeyPatch, strategy: str, where: str
) -> None:
    def wrong(number: int) -> None:
        raise AssertionError(f"a worker has taken {device}:{number}")

    for module in (join, run_device):
        monkeypatch.setattr(module, "use_device", wrong)
    assert pt.run(JOB, strategy, 2, device=where, steps=2).steps == 2


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["sync_sgd()", "async_sgd()"])
def test_a_device_with_a_number_is_the_only_one_in_use(
    device: str, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """`init` made the device of the rank's number current before, which took memory there."""
    if num_devices() < 2:
        pytest.skip("one device")
    taken = use_device

    def only(number: int) -> None:
        assert number == 1, f"a worker has taken {device}:{number}"
        taken(number)

    for module in (join, run_device):
        monkeypatch.setattr(module, "use_device", only)
    found = pt.run(JOB, strategy, 2, device=f"{device}:1", steps=4)
    assert found.steps == 4


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["async_sgd()", "easgd(period=2)"])
def test_a_loop_pushes_from_the_device(device: str, strategy: str) -> None:
    def trained(where: str) -> float:
        torch.manual_seed(0)
        net = nn.Linear(64, 10).to(where)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        handle = pt.attach(net, optimizer, pt.parse_strategy(strategy))
        for _, (x, y) in zip(range(8), pt.shard(pt.data.digits().train, batch_size=16), strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.to(where)), y.to(where)).backward()
            optimizer.step()
        handle.detach()
        assert net.weight.device.type == where
        return float(net.weight.detach().double().sum())

    found = [apart(lambda where=where: trained(where)) for where in (device, "cpu")]
    check(device, [8, found[0]], [8, found[1]])


@pytest.mark.process
def test_state_stays_on_the_device(device: str) -> None:
    def places() -> list[str]:
        trainer = pt.Trainer(JOB, "sync_sgd()", steps=3, device=device, ema=0.9)
        trainer.fit()
        optimizer = trainer.context.replica.optimizer
        state = [value for entries in optimizer.state.values() for value in entries.values()]
        tensors = [*trainer.model.parameters(), *state, *trainer.context.average.tensors.values()]
        return sorted({str(tensor.device) for tensor in tensors if tensor.dim()})

    assert apart(places) == [f"{device}:0"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("saved", "resumed", "strategy", "ema"),
    [
        ("device", "cpu", "local_sgd(period=4)", None),
        ("cpu", "device", "slowmo(period=4)", None),
        ("device", "device", "top_k_sgd(0.05)", 0.9),
        ("device", "device", "pipedream(stages=2)", None),
    ],
)
def test_a_checkpoint_of_any_device_goes_on_on_any(
    device: str, tmp_path: Path, saved: str, resumed: str, strategy: str, ema: float | None
) -> None:
    places = {"device": device, "cpu": "cpu"}
    options = {"checkpoint_every": 6, "ema": ema, "out": tmp_path / "run"}
    pt.run(JOB, strategy, 2, device=places[saved], steps=6, **options)
    gone_on = pt.run(JOB, strategy, 2, device=places[resumed], steps=12, resume=True, **options)
    whole = pt.run(JOB, strategy, 2, device="cpu", ema=ema, **PLAIN)
    check(device, facts(gone_on), facts(whole))


@pytest.mark.process
def test_a_loop_does_not_move_a_model_away_for_one_copy_of_its_weights(device: str) -> None:
    def refused() -> str:
        net = model().to(device)
        with pytest.raises(ValueError, match="PT1901") as error:
            pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), pt.strategies.hogwild())
        return str(error.value)

    assert f"device={device}:0: hogwild" in apart(refused)


WRITTEN = """
from dataclasses import replace

import torch
import polytempo as pt

job = pt.Job(
    model=lambda: torch.nn.Linear(64, 10),
    data=lambda path: pt.Data(*pt.data.digits()),
    loss=torch.nn.functional.cross_entropy,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
)
mistaken = replace(job, loss=lambda output, target: output.mistake)
"""


@pytest.fixture
def found(tmp_path: Path) -> pt.Job:
    """A job that new interpreters find, too."""
    (tmp_path / "written.py").write_text(WRITTEN)
    return pt.jobs.find(f"{tmp_path}/written.py:job")


@pytest.mark.process
def test_a_process_that_has_used_the_device_forks_no_workers_for_it(device: str, found: pt.Job) -> None:
    def trained() -> list[Any]:
        torch.ones(1, device=device).sum().item()
        with pytest.raises(ValueError, match=r"PT1904.*pt\.jobs\.find"):
            pt.run(JOB, "sync_sgd()", 1, steps=1)
        pt.run(JOB, "sync_sgd()", 1, steps=1, device="cpu")
        return facts(pt.run(found, "sync_sgd()", 1, steps=2, threads=1))

    check(device, apart(trained), facts(pt.run(found, "sync_sgd()", 1, steps=2, device="cpu", threads=1)))


@pytest.mark.process
def test_a_process_that_has_computed_gradients_forks_no_workers(device: str, found: pt.Job) -> None:
    """Workers ended with torch's "Unable to handle autograd's threading", on the CPU too."""

    def trained() -> list[Any]:
        pt.simulate(found, "sync_sgd()", 2, steps=1, device="cpu")
        with pytest.raises(ValueError, match=r"PT1905.*pt\.jobs\.find"):
            pt.run(JOB, "sync_sgd()", 1, steps=1, device="cpu")
        with pytest.raises(ValueError, match="PT1905"):
            pt.compare(JOB, "sync_sgd", 1, steps=1)
        with pytest.raises(JobFailed, match="mistake"):  # before workers start
            pt.run(found.origin.replace(":job", ":mistaken"), "sync_sgd()", 1, steps=1)
        [compared] = pt.compare(found, "sync_sgd", 1, steps=2, device="cpu", threads=1)
        return facts(compared)

    check(device, apart(trained), facts(pt.run(found, "sync_sgd()", 1, steps=2, device="cpu", threads=1)))


@pytest.mark.process
def test_a_profile_beside_a_device(device: str) -> None:
    """The launcher forked after it had computed gradients, and ended with torch's error."""
    command = [sys.executable, "-m", "polytempo", "profile", "digits", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
