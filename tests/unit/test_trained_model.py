"""`polytempo evaluate`, `predict` and `export`: the model of a run has the score of the run, and loads without us."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import polytempo as pt
from command_output import asking
from polytempo.jobs.digits import job
from polytempo.training.observe.trained_model import trained_model, write_outputs

s = pt.strategies

RUNS: dict[str, tuple[pt.Strategy, dict[str, Any]]] = {
    "sync": (s.sync_sgd(), {}),
    "ranks that differ": (s.local_sgd(period=5), {}),
    "stages": (s.gpipe(stages=2), {}),
    "a parameter server": (s.downpour(shards=2), {}),
    "average": (s.sync_sgd(), {"ema": 0.9}),
    "bf16": (s.sync_sgd(), {"precision": "bf16"}),
    "fp16": (s.sync_sgd(), {"precision": "fp16(loss_scale=1024)"}),
    "int8": (s.sync_sgd(), {"precision": "int8"}),
}


asked = asking()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    pt.simulate(job, s.sync_sgd(), workers=2, steps=10, checkpoint_every=10, out=folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_trained_model_has_the_score_of_its_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy, options = RUNS[name]
    found = pt.simulate(job, strategy, workers=2, steps=8, checkpoint_every=8, out=tmp_path, **options)
    average = ["--average"] if "ema" in options else []
    score = json.loads(asked(capsys, "evaluate", str(tmp_path), "--json", *average)[0])
    assert score["step"] == 8
    assert score["loss"] == pytest.approx(found.loss, rel=1e-6)
    assert score["accuracy"] == pytest.approx(found.accuracy)


def test_predictions_are_the_models_outputs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples, labels = pt.data.digits()[1].tensors
    net = job.model()
    net.load_state_dict(pt.training.checkpoint_model(run))
    with torch.no_grad():
        expected = net(samples).numpy()
    said, _ = asked(capsys, "predict", str(run), "--out", str(tmp_path / "outputs.npy"))
    assert said == f"{tmp_path / 'outputs.npy'}: 360 samples, 10 outputs each\n"
    np.testing.assert_allclose(np.load(tmp_path / "outputs.npy"), expected, rtol=1e-5, atol=1e-6)
    asked(capsys, "predict", str(run), "--out", str(tmp_path / "outputs.csv"))
    header, *rows = (tmp_path / "outputs.csv").read_text().splitlines()
    assert header == "sample," + ",".join(f"output_{k}" for k in range(10))
    table = np.array([[float(value) for value in row.split(",")] for row in rows])
    assert table[:, 0].tolist() == list(range(len(labels)))
    np.testing.assert_allclose(table[:, 1:], expected, rtol=1e-5, atol=1e-6)


def test_whole_numbers_and_grids_of_outputs_have_a_table(tmp_path: Path) -> None:
    write_outputs(torch.tensor([[[1, 2], [3, 2**53 + 1]]]), tmp_path / "grid.csv")
    assert (tmp_path / "grid.csv").read_text() == (
        "sample,output_0,output_1,output_2,output_3\n0,1,2,3,9007199254740993\n"
    )
    write_outputs(torch.tensor([0.1, float("nan")]), tmp_path / "one.csv")
    assert (tmp_path / "one.csv").read_text() == "sample,output_0\n0,0.100000001\n1,nan\n"


@pytest.mark.parametrize("classes", [3, {"a"}, {"a": 0}, "a", ["a", "b"], [1]])
def test_other_classes_of_a_data_set_name_no_columns(classes: Any, tmp_path: Path) -> None:
    samples = SimpleNamespace(classes=classes, units="kg")
    write_outputs(torch.tensor([2.0]), tmp_path / "one.csv", samples)
    assert (tmp_path / "one.csv").read_text() == "sample,output_0\n0,2\n"
    samples.classes = ["a, b"]
    write_outputs(torch.tensor([2.0]), tmp_path / "one.csv", samples)
    assert (tmp_path / "one.csv").read_text() == 'sample,"a, b"\n0,2\n'


class Tied(nn.Module):
    """A model with one matrix under two names, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x)) * self.scale
        return y[:, :10]

    def save_pretrained(self, folder: Path) -> None:
        """Hugging Face names it so."""
        folder.mkdir()
        (folder / "config.json").write_text("{}")


TIED = replace(job, model=Tied, name="tied")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of that model."""
    folder = tmp_path_factory.mktemp("runs") / "tied"
    pt.simulate(TIED, s.sync_sgd(), workers=2, steps=3, checkpoint_every=3, out=folder)
    return folder


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_exported_tensors_load_without_us(form: str, tied: Path) -> None:
    trained = trained_model(TIED, tied)
    file = trained.export(form)
    assert file == tied / {"safetensors": "model.safetensors", "torch": "model.pt"}[form]
    if form == "torch":
        tensors = torch.load(str(file), weights_only=True)
    else:
        tensors = load_file(str(file))
        with safe_open(str(file), "pt") as opened:
            about = opened.metadata()
        assert about == {"format": "pt", "job": "tied", "strategy": str(s.sync_sgd()), "step": "3"}
    fresh = Tied()
    fresh.load_state_dict(tensors)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert fresh.first.weight is fresh.last.weight


class Adapted(nn.Module):
    """A model with an adapter, which peft would merge."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(64, 10).requires_grad_(False), nn.Linear(64, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.adapter(x)
        return y

    def merge_and_unload(self) -> nn.Module:
        """The base model, changed in place."""
        self.base.weight.data += self.adapter.weight
        return self.base


def test_an_adapter_is_exported_within_the_weights(tmp_path: Path) -> None:
    made = replace(job, model=Adapted, name="adapted")
    pt.simulate(made, s.sync_sgd(), workers=2, steps=2, checkpoint_every=2, out=tmp_path)
    trained, x, base = trained_model(made, tmp_path), torch.randn(3, 64), nn.Linear(64, 10)
    for form in ("safetensors", "torch"):
        file = str(trained.export(form))
        base.load_state_dict(load_file(file) if form == "safetensors" else torch.load(file, weights_only=True))
        torch.testing.assert_close(base(x), trained.model(x))


def test_a_model_of_hugging_face_is_saved_by_itself(tied: Path) -> None:
    folder = trained_model(TIED, tied).export("hf")
    assert (folder, [each.name for each in Path(str(folder)).iterdir()]) == (tied / "hf", ["config.json"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["evaluate", "RUN", "--average"], "has no moving average of the weights"),
        (["evaluate", "RUN", "--job", "mnist"], "was saved by job 'digits', and --job mnist is 'mnist'"),
        (["evaluate", "RUN/.."], "there is no checkpoint in"),
        (["predict", "RUN", "--out", "table.xlsx"], "--out table.xlsx: must end with .csv or .npy"),
        (["export", "RUN", "--to", "gguf"], "--to gguf: must be one of"),
        (["export", "RUN", "--to", "hf"], "the model is a Sequential, without save_pretrained"),
        (["export", "RUN", "--out", "RUN"], "is a folder; name a file, such as"),
        (["export", "RUN", "--to", "onnx"], "export to onnx needs packages"),
        (["export", "no/where"], "there is no such folder"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_mistakes_are_named(
    arguments: list[str],
    complaint: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    _, error = asked(capsys, *(each.replace("RUN", str(run)) for each in arguments), code=2)
    assert complaint in error
    assert error.count("\n") == 1


def test_a_job_that_has_no_table_of_outputs_is_refused(run: Path, tmp_path: Path) -> None:
    without = replace(job, data=lambda folder: pt.Data(pt.data.digits()[0]))
    with pytest.raises(ValueError, match="job digits has no test set"):
        trained_model(without, run).score()

    class Pairs(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return self[2](self[1](self[0](x))), x

    pairs = replace(job, model=lambda: Pairs(*job.model().children()))
    with pytest.raises(ValueError, match=r"360 samples with a tuple of 2 .*load pt\.training\.checkpoint_model"):
        trained_model(pairs, run).outputs()
