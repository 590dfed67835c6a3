"""Files of clusters and folders of runs, as commands take them: workers that were not measured, prices, other jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from command_output import asking
from polytempo.cli.options.measured_hosts import beyond_measured, measured_workers
from polytempo.cli.predict.measure import check_cluster_file, price_in
from polytempo.cli.run import train
from polytempo.cluster import KernelSpeed, Speeds
from polytempo.cluster.measured import Measured, MeasuredHost, MeasuredLink, cluster_of, to_toml
from polytempo.runs.calibration.earlier import changed

HOST = Measured("local", (MeasuredHost("a", 2, 1e9),), (), (MeasuredLink("a", "a", 1e-6, 1e9),))
HOSTS = HOST._replace(hosts=(*HOST.hosts, MeasuredHost("b", 2, 1e9)), between=(MeasuredLink("a", "b", 1e-4, 1e8),))


asked = asking()


def written(folder: Path, measured: Measured, host_hour: float | None = None) -> str:
    path = folder / "cluster.toml"
    path.write_text(to_toml(cluster_of(measured), measured, host_hour=host_hour), encoding="utf-8")
    return str(path)


def test_more_workers_than_were_measured_are_told(tmp_path: Path) -> None:
    alone = written(tmp_path, HOST)
    assert measured_workers(alone) == 2
    assert [beyond_measured(alone, workers) for workers in (1, 2)] == [None, None]
    said = beyond_measured(alone, 4)
    assert said is not None
    assert "measured with 2 workers on 1 host; 4 workers are predicted on more hosts like it, with its memory" in said
    both = written(tmp_path, HOSTS)
    assert beyond_measured(both, 4) is None
    assert "with 4 workers on 2 hosts; 8 workers are predicted on more hosts like these." in str(
        beyond_measured(both, 8)
    )
    assert beyond_measured("ethernet", 1000) is None


def test_commands_tell_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, HOST), str(tmp_path / "out")
    for workers, told in (("2", False), ("4", True)):
        simulated = ("simulate", "digits", "--cluster", path, "--workers", workers, "--steps", "2", "--meta")
        explained = ("explain", "sync_sgd", "--cluster", path, "--workers", workers)
        for arguments in ((*simulated, "--out", out + workers), explained):
            _, err = asked(capsys, *arguments)
            assert ("was measured with 2 workers on 1 host" in err) == told, arguments


def test_a_plan_compares_as_many_workers_as_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--strategies", "sync_sgd", "--batch-sizes", "32", "--until", "accuracy=0.9", "--json")
    out, _ = asked(capsys, "plan", "digits", *few, "--cluster", written(tmp_path, HOST))
    found = json.loads(out)
    assert {each["workers"] for each in found["forecasts"]} == {1, 2}
    assert not any("was measured with" in sentence for sentence in found["sentences"])


def test_a_price_stays_in_a_file_that_is_measured_again(tmp_path: Path) -> None:
    path = Path(written(tmp_path, HOST, host_hour=1.5))
    check_cluster_file(path)
    assert price_in(path) == 1.5
    assert price_in(tmp_path / "none.toml") is None
    path.write_text(path.read_text(encoding="utf-8").replace("= 1.5", "= -1"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"price.host_hour = -1 must be a number"):
        check_cluster_file(path)


def test_other_numbers_of_workers_are_no_change() -> None:
    """Two workers of a host have its memory for themselves, four share it: that is not a change of the host."""
    fast, slow = (Speeds((("elementwise", KernelSpeed(call_s=call_s)),)) for call_s in (1e-6, 2e-6))
    earlier, later = (replace(cluster_of(HOST), speeds=speeds) for speeds in (fast, slow))
    change = changed(earlier, later)
    assert change is not None
    assert change.kernels == pytest.approx(2.0)
    assert changed(earlier, replace(later, workers_per_host=4)) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, as one on processes leaves it."""
    folder = tmp_path_factory.mktemp("run")
    pt.simulate(pt.jobs.find("digits"), pt.strategies.sync_sgd(), workers=2, steps=8, out=folder)
    return folder


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        ({}, (), "is a simulation; name the folder of a run on real processes"),
        ({"job": "mine"}, (), "is a run of mine, a job of your own; give --job, such as --job path/to/file.py:job"),
        ({}, ("--job", "mnist"), "--job mnist: its name is mnist, and "),
        ({"batch_size": 16}, (), "the batch grew in this run, from 16 samples of a worker; name a run without"),
        ({"membership": [{}, {}]}, (), "its workers came and went, and a simulation has all of them"),
    ],
)
def test_what_cannot_be_validated(
    change: dict[str, Any],
    arguments: tuple[str, ...],
    said: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    if change or arguments:
        result |= {"world": "process"} | change
    for name, text in (("result.json", json.dumps(result)), ("trace.json", (run / "trace.json").read_text())):
        (tmp_path / name).write_text(text, encoding="utf-8")
    _, err = asked(capsys, "validate", str(tmp_path), "--cluster", "ethernet", *arguments, code=2)
    assert said in err
    assert len(err.splitlines()) == 1


def test_train_prices_the_change_that_its_bound_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound of the run, with the planner's price on the named cluster."""
    cluster = replace(pt.cluster.ethernet(), flops_per_s=1e7)

    def simulated(out: Path | None) -> pt.Result:
        return pt.simulate("digits", pt.strategies.sync_sgd(), 2, cluster, steps=4, out=out)

    result = simulated(None)
    monkeypatch.setattr(train, "run", lambda *given, **more: simulated(given[3].out))
    out, _ = asked(capsys, "train", "digits", "--cluster", written(tmp_path, HOST), "--out", str(tmp_path / "run"))
    assert result.bound is not None
    begin = f"{result.bound['text']} Priced on this cluster: "
    said = " ".join(out.split())
    assert begin in said
    assert 1.5 < float(said.partition(begin)[2].split()[0]) < 2.1, (
        "computing is nearly all of a step: twice the workers"
    )
    kept = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["bound"]
    assert kept["text"].startswith(begin)
    assert kept["text"] in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    out, _ = asked(capsys, "train", "digits", "--out", str(tmp_path / "another"))
    assert "Priced" not in out
