"""`polytempo profile`, `validate`, and the commands that take a measured cluster; the samples of `calibrate`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import polytempo as pt
import warm
from polytempo.aggregation import low_rank
from polytempo.cli.main import app
from polytempo.cluster import Cluster, KernelSpeed, Link, Speeds, one_host
from polytempo.cluster.measured import to_toml
from polytempo.compression import feedback, one_bit, through
from polytempo.core import Port
from polytempo.engines.local_engine import launch
from polytempo.jobs import find
from polytempo.runs.calibration.kernel_samples import ON_HOST, _around, _exchanges, _passes, _perceptron
from polytempo.runs.calibration.link_samples import collectives, links
from polytempo.runs.calibration.server_samples import _job, pushes
from polytempo.runs.frame.job_memory import estimated, measured_bytes
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.wire.memory import keep_memory
from polytempo.worlds import VirtualWorld

PARAMETERS = 4 * (64 * 128 + 128 + 128 * 10 + 10)
SPEEDS = Speeds((("elementwise", KernelSpeed(1e-6, 1e-10, 0.0)), ("product", KernelSpeed(1e-5, 0.0, 1e-10))))
CLUSTER = Cluster(Link(1e-4, 1e8), Link(1e-5, 1e9), workers_per_host=2, speeds=SPEEDS, name="mine")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(CLUSTER), encoding="utf-8")
    return path


def test_the_command_names_the_component(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of a slower cluster stands for a real run's."""
    slow = replace(CLUSTER, memory=Link(5e-3, 1e9))
    run = tmp_path / "run"
    pt.simulate(find("digits"), pt.strategies.sync_sgd(), 2, slow, steps=12, out=run)
    result = json.loads((run / "result.json").read_text())
    asked = ["validate", str(run), "--cluster", str(file)]
    refused = CliRunner().invoke(app, asked)
    assert (refused.exit_code, "is a simulation" in refused.stderr) == (2, True)
    (run / "result.json").write_text(json.dumps(result | {"world": "process"}))
    beside = tmp_path / "run-simulated"
    monkeypatch.chdir(run)
    here = ["validate", ".", "--cluster", str(file), "--ui"]
    assert f"add --out {run}-simulated" in CliRunner().invoke(app, here).stderr
    shown = CliRunner().invoke(app, [*here, "--out", "../run-simulated"])
    assert shown.exit_code == 0, shown.output
    assert re.match(r"live page: http://127\.0\.0\.1:\S+#/run/run\n", shown.stderr)
    assert json.loads((beside / "result.json").read_text())["world"] == "virtual"
    for given, said in (
        (["--ui"], f"--ui needs --out, to show its files; add --out {run}-simulated"),
        (["--ui", "--out", str(tmp_path / "far" / "away")], "the page shows a simulation beside its run"),
        (["--out", str(beside)], "a result is in it"),
    ):
        refused = CliRunner().invoke(app, [*asked, *given])
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr
    assert "most of the error: all_reduce, predicted 9.98 ms less (100% of it)" in shown.stdout
    plain = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert plain["most_of_the_error"] == "all_reduce"
    assert plain["step"]["error"] < -0.9


def test_other_commands_take_the_file(file: Path, tmp_path: Path) -> None:
    explained = CliRunner().invoke(app, ["explain", "sync_sgd", "--workers", "2", "--cluster", str(file)])
    assert "a step on mine\n  0." in explained.stdout, explained.output
    planned = CliRunner().invoke(app, ["plan", "layers", "digits", "--cluster", str(file)])
    assert "0.8 Gbit/s, 100 us" in planned.stdout, planned.output
    refused = CliRunner().invoke(app, ["plan", "layers", "digits", "--cluster", str(file), "--link", "1gbit"])
    assert "leave out --link and --latency-us" in refused.stderr
    bench = ["bench", "compression", "--quick", "--model", "64-64-10", "--codecs", "one_bit", "--json"]
    done = CliRunner().invoke(app, [*bench, "--cluster", str(file), "--out", str(tmp_path / "bench")])
    [row] = json.loads(done.stdout)["rows"]
    num_bytes = 4 * (64 * 64 + 64 * 10 + 74)
    assert json.loads(done.stdout)["settings"]["uncompressed"]["computing_s"] == pytest.approx(
        4e-6 + 1e-10 * num_bytes
    ), "four tensors are scaled"
    assert row["computing_s"] > 4e-6 + 1e-10 * num_bytes


def wide_adam() -> pt.Job:
    """So large that an allocator's own memory hardly counts: 16 MB of parameters, and Adam's two moments."""

    def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr)

    data = TensorDataset(torch.randn(64, 1024), torch.randint(10, (64,)))
    return pt.Job(
        name="wide",
        model=lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10)),
        data=lambda path: pt.Data(data, None),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        lr=0.01,
        batch_size=16,
    )


def measured_processes() -> list[int | None]:
    """Bytes of a process alone, again after this one has freed 28 MB, and where the allocator keeps freed memory."""
    spec = RunSpec.of(wide_adam(), pt.strategies.sync_sgd(), 2, RunOptions())
    alone = measured_bytes(spec)
    torch.ones(7 << 20)
    return [alone, measured_bytes(spec), *launch(lambda _: _after_freeing(spec), 1)]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this kernel tells no peaks")
def test_a_process_takes_about_what_is_reckoned(tmp_path: Path) -> None:
    """A fresh process measures: memory of other tests would count in this one."""
    reckoned = estimated(RunSpec.of(wide_adam(), pt.strategies.sync_sgd(), 2, RunOptions()), 1 << 20).alone
    state = 4 * 4 * (1024 * 4096 + 4096 + 40960 + 10) + 4 * 4  # with four counts of steps
    assert reckoned == state + 2 * 4 * 1024 * 4096, "the square root of the larger matrix, and what it is divided by"
    script = tmp_path / "measure.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(Path(warm.__file__).parent)!r})\n"
        f"print(*runpy.run_path({__file__!r})['measured_processes']())\n"
    )
    done = warm.run([script.name], tmp_path)
    assert done.returncode == 0, done.stderr
    measured, beside_free, beside_kept = map(int, done.stdout.split())
    assert 0.8 < measured / reckoned < 1.25
    assert beside_free == pytest.approx(measured, rel=0.05), "28 MB that this process has freed do not count"
    assert 0.8 < beside_kept / reckoned < 1.5, "this allocator keeps more"


def _after_freeing(spec: RunSpec) -> int | None:
    """The measurement after the allocator has kept 128 MB of this process's freed memory."""
    assert keep_memory()
    torch.ones(1 << 25)
    return measured_bytes(spec)


def test_the_command(tmp_path: Path) -> None:
    speeds = Speeds((("elementwise", KernelSpeed(1e-3)), ("product", KernelSpeed(2e-3))))
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml(Cluster(Link(1e-4, 1e8), speeds=speeds)), encoding="utf-8")
    asked = ["profile", "digits", "--batch-size", "8", "--cluster", str(file)]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    products = [each for each in found["operators"] if each["kernel"] == "product"]
    assert {each["operator"]: each["calls"] for each in products} == {"aten.addmm": 2, "aten.mm": 3}
    assert found["predicted_s"] >= 5 * 2e-3
    assert found["memory"]["parameters"] == PARAMETERS
    shown = CliRunner().invoke(app, asked)
    assert "forward and backward of 8 samples" in shown.stdout, shown.output
    file.write_text(to_toml(Cluster(Link(1e-4, 1e8))), encoding="utf-8")
    assert "it has one speed for everything" in CliRunner().invoke(app, asked).stderr


def test_links_and_collectives_are_measured_between_all_that_talk() -> None:
    """A virtual world with messages that take this program's time for them."""

    async def program(port: Port) -> tuple[Any, Any]:
        return await links(port), await collectives(port, torch.zeros)

    first, second = VirtualWorld(one_host(workers=2), 2).run(program).results
    assert first is not None
    assert second is not None
    [found] = first[0]
    assert (found.source, found.target, second[0]) == (0, 1, [])
    assert found.link.latency_s > 0 < found.link.bytes_per_s
    assert [kind for kind, _, _ in first[1]] == ["all_reduce", "all_gather", "all_to_all"]


def test_a_shard_is_measured_by_its_pushes() -> None:
    """The pushes of two workers in twelve steps; more parameters take longer."""
    small, large = (pushes(_job(middle)) for middle in (4, 2048))
    assert [sample.uses[0].kernel for sample in small] == ["serve"] * 2 * 12
    [use] = {sample.uses for sample in small}.pop()
    assert use.flops == 4 * (256 * 4 + 4 + 4 * 64 + 64)
    assert 0 < median(sample.seconds for sample in small) < median(sample.seconds for sample in large)


def test_samples_name_the_kernels_that_are_charged() -> None:
    passes = {use.kernel for sample in _passes(_perceptron((8, 4, 10)), (2, 8), ON_HOST) for use in sample.uses}
    assert passes == {"product", "elementwise", "view", "operator"}
    kernels = [sample.uses[0].kernel for sample in _around(_perceptron((8, 4, 10)), torch.optim.Adam, (2, 8), ON_HOST)]
    assert sorted(kernels) == ["check", "copy", "scale", "update Adam"]
    coded = {
        use.kernel for s in _exchanges(through(feedback(one_bit()), exact_below=0), (8, 8), ON_HOST) for use in s.uses
    }
    assert coded == {"encode feedback(one_bit())", "decode feedback(one_bit())"}
    parts = {use.kernel for sample in _exchanges(low_rank(1, exact_below=0), (8, 8), ON_HOST) for use in sample.uses}
    assert parts == {"low_rank project", "low_rank answer", "low_rank settle"}
    assert Cluster(Link(0, 1)).speeds is None, "a declared cluster has none of these"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--batch-size", "4"], "give --job, too"),
        (["--job", "nope"], "there is no job 'nope'"),
        (["--job", "digits", "--batch-size", "0"], "--batch-size 0: must be"),
        (["--job", "a9a", "--data", "nowhere"], "nowhere"),
    ],
)
def test_what_calibrate_cannot_measure_is_refused_before_it_measures(
    asked: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polytempo.cli.predict.calibrate.calibrated", lambda *asked: pytest.fail("it has measured"))
    refused = CliRunner().invoke(app, ["calibrate", *asked, "--out", str(tmp_path / "cluster.toml")])
    assert (refused.exit_code, said in refused.stderr) == (2, True)
    assert not list(tmp_path.iterdir())
