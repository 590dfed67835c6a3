"""`polytempo sharpness` on a checkpoint: its output, its picture, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file
from torch import nn

import polytempo as pt
from command_output import asking
from polytempo.cli.look.sharpness import _finite, _numbers
from polytempo.jobs.digits import job
from polytempo.report.pictures.loss_landscape import draw_line, draw_plane
from polytempo.training.observe.saved_model import checkpoint_in
from polytempo.training.observe.whole_checkpoint import load_run_model

SAMPLES = 200


asked = asking("sharpness")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short runs: of ranks with equal models, and of ranks with different ones."""
    folder = tmp_path_factory.mktemp("runs")
    for name, strategy in (("first", pt.strategies.sync_sgd()), ("other", pt.strategies.local_sgd(period=50))):
        pt.simulate(job, strategy, workers=2, steps=12, checkpoint_every=4, out=folder / name)
    return folder


def test_the_numbers_of_a_checkpoint_are_those_of_its_model(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rebuilt here from the checkpoint's files, by plain torch."""
    first = str(runs / "first")
    out, _ = asked(capsys, first, "--samples", str(SAMPLES), "--subspace", "5", "--json", "--threads", "1")
    found: dict[str, Any] = json.loads(out)
    model = job.model()
    step = load_run_model(model, runs / "first").step
    chosen = torch.randperm(len(pt.data.digits()[0]), generator=torch.Generator().manual_seed(0))[:SAMPLES]  # type: ignore[arg-type]
    samples, labels = (
        torch.stack(list(each)) for each in zip(*(pt.data.digits()[0][i] for i in chosen.tolist()), strict=True)
    )
    parameters = list(model.parameters())

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(samples), labels)

    lb = pt.large_batch
    assert (found["step"], found["job"], found["samples"]) == (12, "digits", SAMPLES) == (step, job.name, SAMPLES)
    assert found["loss"] == pytest.approx(loss().item(), rel=1e-5)
    assert found["sharpness"] == pytest.approx(lb.sharpness(loss, parameters), rel=1e-3)
    assert found["sharpness_in_subspace"] == pytest.approx(lb.sharpness(loss, parameters, subspace=5), rel=1e-3)
    assert found["neighbourhood_loss"] == pytest.approx(lb.neighbourhood_loss(loss, parameters), rel=1e-5)
    assert found["top_eigenvalue"]["value"] == pytest.approx(lb.top_eigenvalue(loss, parameters).value, rel=1e-3)
    shown, _ = asked(capsys, first, "--samples", str(SAMPLES))
    assert "step 12" in shown
    assert f"{SAMPLES} training samples" in shown


def test_a_checkpoint_of_ranks_that_differ_is_their_mean(runs: Path) -> None:
    mean = pt.training.checkpoint_model(runs / "other")
    from_files = _parts(runs / "other")
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, torch.stack([part[f"model/{name}"] for part in from_files]).mean(0))
    assert any(not torch.equal(from_files[0][name], from_files[1][name]) for name in from_files[0] if "model" in name)


def _parts(run: Path) -> list[dict[str, torch.Tensor]]:
    folder = checkpoint_in(run)
    return [load_file(Path(str(folder)) / f"rank-{rank}.safetensors") for rank in range(2)]


def test_pictures_of_the_line_and_of_the_surface(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = str(runs / "first"), str(runs / "other" / "checkpoint" / "step-00000012")
    few = ("--samples", "50", "--points", "7", "--out", str(tmp_path), "--json")
    found = json.loads(asked(capsys, first, "--line", other, "--surface", *few)[0])
    ends = json.loads(asked(capsys, other, "--samples", "50", "--json")[0])["loss"], found["loss"]
    line = dict(zip(found["line"]["at"], found["line"]["losses"], strict=True))
    assert (line[1.0], line[0.0]) == pytest.approx(ends, rel=1e-5)
    assert found["surface"]["losses"][3][3] == pytest.approx(found["loss"], rel=1e-5)
    for name in ("line", "surface"):
        assert found[name]["picture"] == str(tmp_path / f"{name}.png")
        assert imread(tmp_path / f"{name}.png").shape[2] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["line.png", "surface.png"]


def test_losses_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    nan = float("nan")
    draw_line(tmp_path / "line.png", [-0.5, 0.0, 1.0, 1.5], [0.5, 1e-4, 0.2, nan], ("one", "$other"))
    draw_plane(tmp_path / "plane.png", [-1.0, 0.0, 1.0], [[1.0, 0.1, nan], [0.5, 1e-3, 0.5], [1.0, 0.1, 1.0]], "one")
    assert all(imread(tmp_path / f"{name}.png").shape[2] == 4 for name in ("line", "plane"))


def test_a_picture_of_one_checkpoint_lies_in_its_runs_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs / "first" / "checkpoint" / "step-00000012"
    before = sorted(folder.iterdir())
    found = json.loads(asked(capsys, str(folder), "--surface", "--points", "3", "--samples", "20", "--json")[0])
    assert found["surface"]["picture"] == str(runs / "first" / "surface.png")
    assert sorted(folder.iterdir()) == before


def test_stages_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    done = pt.simulate(job, pt.strategies.gpipe(stages=2), workers=2, steps=4, checkpoint_every=4, out=tmp_path)
    model = job.model()
    assert load_run_model(model, tmp_path).step == 4
    samples, labels = pt.data.digits()[1].tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(samples), labels)
    assert done.loss == pytest.approx(float(loss), rel=1e-5)


def test_an_infinite_mask_is_no_part_of_a_line() -> None:
    ends = [nn.Linear(2, 1), nn.Linear(2, 1)]
    for each in ends:
        each.register_buffer("mask", torch.tensor([-torch.inf]))
        each.register_buffer("running", torch.zeros(1))
    pairs = [_finite(one, two) for one, two in zip(*map(_numbers, ends), strict=True)]
    assert pairs == [True, True, False, True]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["runs/none"], "runs/none: there is no such folder"),
        (["."], "there is no checkpoint in checkpoint; name a run's folder"),
        ([".", "--epsilon", "0"], "--epsilon 0: must be a "),
        ([".", "--subspace", "-1"], "--subspace -1: must be a "),
        ([".", "--points", "9"], "--points is about pictures; give --surface or --line as well"),
        ([".", "--surface", "--points", "2"], "--points 2: must be a "),
        ([".", "--width", "2"], "--width is about pictures"),
        ([".", "--line", "x"], "x: there is no such folder"),
        ([".", "--job", "nothing"], "there is no job 'nothing'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    _, error = asked(capsys, *arguments, code=2)
    assert complaint in error


def test_another_job_and_a_parameter_servers_run_without_result_are_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, error = asked(capsys, str(runs / "first"), "--job", "mnist", code=2)
    assert "was saved by job 'digits', and --job mnist is 'mnist'; name the same" in error
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "snapshot-3-run.json").touch()
    _, error = asked(capsys, str(tmp_path), code=2)
    assert "holds snapshots of a parameter server, which do not name their job" in error
