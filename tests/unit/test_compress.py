"""`pt.training.compress` and `polytempo compress`: pruning, shared values, and a file with the model's own accuracy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import polytempo as pt
from command_output import asking
from polytempo.jobs.digits import job
from polytempo.training.smaller.pruning import masks_of, prunable

NAMES = ("0.weight", "2.weight")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    pt.simulate(job, pt.strategies.sync_sgd(), workers=2, epochs=3, checkpoint_every=40, out=folder)
    return folder


asked = asking("compress")


def test_the_largest_weights_of_each_layer_stay() -> None:
    weights = {"a": torch.tensor([[1.0, -2.0, 3.0, 0.0]]), "b": torch.tensor([[10.0, -40.0], [20.0, 30.0]])}
    # rms of what is not zero: a 2.16, b 27.4; so |w| / σ: a .46 .93 1.39, b .37 1.46 .73 1.1
    by_one = masks_of(weights, 0.5)
    assert by_one["a"].tolist() == [[False, True, True, False]]
    assert by_one["b"].tolist() == [[False, True], [False, True]]
    by_layer = masks_of(weights, {"a": 0.25})
    assert by_layer["a"].tolist() == [[False, False, True, False]]
    assert by_layer["b"].all()
    assert masks_of(weights, 1.0)["a"].tolist() == [[True, True, True, False]]
    assert all(mask.sum() == 1 for mask in masks_of(weights, 1e-9).values())


def test_biases_and_frozen_weights_stay() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Embedding(3, 4), nn.Linear(4, 2))
    model[3].weight.requires_grad_(False)
    assert list(prunable(model)) == ["0.weight", "2.weight"]


def test_a_compressed_run_is_small_and_as_good(run: Path, tmp_path: Path) -> None:
    made = pt.training.compress(job, run, keep=0.2, bits=4, rounds=2, epochs=2, share_epochs=1, out=tmp_path / "net")
    model = job.model()
    model.load_state_dict(pt.training.compressed_model(made.file))
    kept = sum(int((model.get_parameter(name) != 0).sum()) for name in NAMES)
    assert kept == round(0.2 * (64 * 128 + 128 * 10))
    assert all(len(model.get_parameter(name).unique()) <= 16 + 1 for name in NAMES)
    samples, labels = pt.data.digits().test.tensors
    with torch.no_grad():
        answers = model(samples)
    assert made.before is not None
    assert made.pruned is not None
    assert made.after is not None
    assert made.after.loss == pytest.approx(float(functional.cross_entropy(answers, labels)), rel=1e-5)
    assert made.after.accuracy == pytest.approx(float((answers.argmax(1) == labels).double().mean()))
    assert (made.after.accuracy or 0) >= (made.before.accuracy or 1) - 0.01
    assert made.num_bytes == Path(made.file).stat().st_size
    assert made.dense_bytes == 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert made.ratio > 12


def test_the_same_call_makes_the_same_file(run: Path, tmp_path: Path) -> None:
    few = {"keep": {"0": 0.1}, "bits": {"0": 3, "2.weight": 4}, "rounds": 1, "epochs": 0.3, "share_epochs": 0.2}
    for name in ("one", "two"):
        pt.training.compress(job, run, out=tmp_path / name, **few)  # type: ignore[arg-type]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found = pt.training.compressed_model(tmp_path / "one")
    assert int((found["0.weight"] != 0).sum()) == round(0.1 * 64 * 128)
    assert len(found["0.weight"].unique()) <= 9
    assert int((found["2.weight"] != 0).sum()) == 128 * 10
    assert len(found["2.weight"].unique()) <= 16


def test_a_step_with_shared_values_is_plain_sgd_of_the_values(run: Path, tmp_path: Path) -> None:
    """In float64, against autograd of the values themselves with the mean of their members' gradients."""
    wide = replace(
        job,
        model=lambda: nn.Sequential(nn.Linear(64, 10)).double(),
        loss=lambda out, target: functional.cross_entropy(out, target),
        data=lambda path: pt.Data(torch.utils.data.TensorDataset(x, y)),
        correct=None,
        batch_size=40,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-3),
    )
    samples, labels = pt.data.digits().train.tensors
    x, y = samples[:40].double(), labels[:40]
    pt.simulate(wide, pt.strategies.sync_sgd(), workers=1, steps=4, checkpoint_every=4, out=tmp_path / "run")
    first = pt.training.compress(wide, tmp_path / "run", keep=0.5, bits=2, epochs=0, share_epochs=0, out=tmp_path / "a")
    after = pt.training.compress(wide, tmp_path / "run", keep=0.5, bits=2, epochs=0, share_epochs=3, out=tmp_path / "b")
    assert first.before is None
    start, end = pt.training.compressed_model(first.file), pt.training.compressed_model(after.file)
    weight, bias = start["0.weight"], start["0.bias"].clone().requires_grad_()
    centroids, members = weight.unique(return_inverse=True)
    sizes = torch.bincount(members.view(-1)).double()
    zero = int((centroids == 0).nonzero())
    values = centroids.clone().requires_grad_()
    speed, bias_speed = torch.zeros_like(values), torch.zeros_like(bias)
    for _ in range(3):
        loss = functional.cross_entropy(functional.linear(x, values[members], bias), y)
        by_value, by_bias = torch.autograd.grad(loss, [values, bias])
        by_value[zero] = 0
        with torch.no_grad():
            speed = 0.9 * speed + by_value / sizes + 1e-3 * values
            bias_speed = 0.9 * bias_speed + by_bias + 1e-3 * bias
            values -= job.lr * speed
            bias -= job.lr * bias_speed
    torch.testing.assert_close(end["0.weight"], values.detach()[members], rtol=0, atol=1e-10)
    torch.testing.assert_close(end["0.bias"], bias.detach(), rtol=0, atol=1e-10)


def test_the_command_shows_layers_and_accuracy(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--epochs", "0.2", "--share-epochs", "0.2", "--keep", "0=0.1,2=0.5", "--bits", "3")
    out, _ = asked(capsys, str(run), *few, "--out", str(tmp_path / "shown"))
    assert "0.weight" in out
    assert "10.0%" in out
    assert "times smaller" in out
    found = json.loads(asked(capsys, str(run), *few, "--out", str(tmp_path / "json"), "--json")[0])
    assert found["num_bytes"] == (tmp_path / "json").stat().st_size
    assert [each["kept"] for each in found["tensors"]] == [819, 128, 640, 10]
    assert {"before", "pruned", "after"} < set(found)


def test_the_file_is_in_the_runs_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--epochs", "0", "--share-epochs", "0")
    asked(capsys, str(run), *few)
    assert set(pt.training.compressed_model(run / "network.ptnet")) == set(job.model().state_dict())
    _, error = asked(capsys, str(run), *few, code=2)
    assert "network.ptnet exists; remove it, or name another file" in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--keep", "0"], "--keep 0: must be a number > 0"),
        (["--keep", "1=2"], "--keep 1=2: must be a number <= 1"),
        (["--keep", "few"], "--keep few: 'few' is not a number; write one for all layers"),
        (["--bits", "0"], "--bits 0: must be a whole number >= 1"),
        (["--bits", "1=13"], "--bits 1=13: must be a whole number <= 12"),
        (["--keep", "7=0.1"], "keep: there is no layer '7' to compress; there are 0.weight, 2.weight"),
        (["--rounds", "0"], "--rounds 0: must be a "),
        (["--job", "chars"], "job chars needs --data"),
        (["--lr", "1e30"], "fine-tuning diverged; give a smaller lr"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], complaint: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 1 if "--lr" in arguments else 2
    _, error = asked(capsys, str(run), *arguments, "--out", str(tmp_path / "net"), code=code)
    assert complaint in error
    assert not list(tmp_path.iterdir())


def test_what_is_no_run_or_another_jobs_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint"):
        pt.training.compress(job, tmp_path)
    other = replace(job, model=lambda: nn.Linear(64, 10))
    with pytest.raises(ValueError, match="the checkpoint does not fit job digits"):
        pt.training.compress(other, run, out=tmp_path / "net")
    vectors = replace(job, model=lambda: nn.BatchNorm1d(64))
    pt.simulate(vectors, pt.strategies.sync_sgd(), workers=1, steps=1, checkpoint_every=1, out=tmp_path / "run")
    with pytest.raises(ValueError, match="two dims or more"):
        pt.training.compress(vectors, tmp_path / "run")


def test_a_run_with_a_parameter_server_is_compressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its job is known by its result; its snapshots do not name it."""
    run = tmp_path / "served"
    pt.simulate(job, pt.strategies.async_sgd(), workers=2, steps=8, checkpoint_every=8, out=run)
    few = ("--rounds", "1", "--epochs", "0.3", "--share-epochs", "0.2")
    out, _ = asked(capsys, str(run), "--out", str(tmp_path / "small"), *few)
    assert "times smaller" in out
