"""Data that a model of a job file has not seen: all samples are taken, prepared as the training samples were."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import polytempo as pt
from command_output import asking
from polytempo.data.plan import permutation
from polytempo.training.observe.trained_model import TrainedModel

asked = asking()
ROWS = [
    {"size": str(n % 7 - 2), "colour": ("red", "blue")[n % 3 > 0], "kind": "ab"[n % 2], "price": str(n)}
    for n in range(40)
]
JOB = """
model = {{ {model} }}
data = {{ call = "{reader}", path = "{path}"{more} }}
loss = "{loss}"
optimizer = "SGD"
lr = 0.05
batch_size = 8
"""


def close(found: Tensor, expected: Tensor) -> None:
    """Equal to rounding: a processor's matrix product of another number of rows may have other last bits."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def table(path: Path, rows: list[dict[str, str]], columns: str = "size,colour,kind,price") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns.split(","), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def trained(folder: Path, data: Path | None = None, **parts: Any) -> TrainedModel:
    """The model of a job file after three steps."""
    (folder / "job.toml").write_text(JOB.format(**{"more": "", "loss": "cross_entropy"} | parts))
    job = pt.jobs.find(str(folder / "job.toml"))
    pt.simulate(job, "sync_sgd", workers=1, steps=3, out=folder / "run", checkpoint_every=3, data=data)
    made: TrainedModel = pt.training.trained_model(job, folder / "run")
    return made


@pytest.mark.parametrize(
    ("reader", "target", "loss", "inputs", "outputs"),
    [("csv_classes", "kind", "cross_entropy", 4, 2), ("csv_regression", "price", "mse_loss", 5, 1)],
)
def test_rows_of_another_table_have_the_numbers_that_training_gave_them(
    reader: str,
    target: str,
    loss: str,
    inputs: int,
    outputs: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table(tmp_path / "table.csv", ROWS)
    net = f'call = "perceptron", inputs = {inputs}, outputs = {outputs}, hidden = [4]'
    model = trained(tmp_path, model=net, reader=reader, path="table.csv", more=f', target = "{target}"', loss=loss)
    whole = model.outputs(table(tmp_path / "whole.csv", ROWS, "price,kind,size,colour"))
    order = permutation(len(ROWS), 0, 0)
    close(whole[order[32:]], model.outputs())
    left = ",".join(name for name in ("colour", "price", "kind", "size") if name != target)
    close(model.outputs(table(tmp_path / "few.csv", ROWS[:3], left)), whole[:3])
    close(model.outputs(table(tmp_path / "empty.csv", [row | {target: ""} for row in ROWS[:3]])), whole[:3])
    with pytest.raises(ValueError, match="no targets"):
        model.score(tmp_path / "few.csv")
    assert model.score(tmp_path / "whole.csv").loss > 0
    assert torch.equal(model.predict(tmp_path / "outputs.npy", tmp_path / "whole.csv"), whole)
    np.testing.assert_array_equal(np.load(tmp_path / "outputs.npy"), whole.numpy())
    model.predict(tmp_path / "outputs.csv", tmp_path / "whole.csv")
    header, *rows = (tmp_path / "outputs.csv").read_text().splitlines()
    found = torch.tensor([[float(cell) for cell in row.split(",")[1:]] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, whole.double(), rtol=1e-6, atol=1e-6)
    split = pt.data.csv_classes(tmp_path / "table.csv", "kind") if target == "kind" else None
    split = split or pt.data.csv_regression(tmp_path / "table.csv", "price")
    with torch.no_grad():
        own = model.model(split.test.tensors[0])
    if target == "kind":
        assert (header, model.score().target) == ("sample,a,b", None)
        torch.testing.assert_close(model.outputs(), own)
        return
    prices = torch.tensor([float(ROWS[row]["price"]) for row in order[:32]])
    mean, deviation = prices.mean().item(), prices.std(correction=0).item()
    assert (header, model.score().target) == ("sample,price", ("price", pytest.approx(mean), pytest.approx(deviation)))
    torch.testing.assert_close(model.outputs(), own.double() * deviation + mean, rtol=1e-6, atol=1e-6)
    said, _ = asked(capsys, "evaluate", str(tmp_path / "run"), "--job", str(tmp_path / "job.toml"))
    assert said.splitlines()[1] == f"loss and metrics: of price less {mean:.6g}, over {deviation:.6g}"
    said, _ = asked(capsys, "evaluate", str(tmp_path / "run"), "--job", str(tmp_path / "job.toml"), "--json")
    assert json.loads(said)["target"]["name"] == "price"


@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        ({"size": "large"}, "size,colour,price", "row 1: the model was trained on numbers, not 'large'"),
        ({}, "colour,price", "no column 'size'"),
        ({"kind": "c"}, "size,colour,kind,price", "'c' is not among the classes of .*: a, b"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(row: dict[str, str], columns: str, said: str, tmp_path: Path) -> None:
    known = table(tmp_path / "table.csv", ROWS)
    with pytest.raises(ValueError, match=said):
        pt.data.csv_classes(table(tmp_path / "new.csv", [ROWS[0] | row], columns), "kind", like=known)


def test_a_run_with_data_of_its_own_prepares_others_as_these(tmp_path: Path) -> None:
    """The job file names another table. The part of `own.csv` that was set aside is judged as it was in the run."""
    table(tmp_path / "table.csv", [row | {"size": "900"} for row in ROWS])
    own = table(tmp_path / "own.csv", ROWS)
    parts = {"model": 'call = "perceptron", inputs = 4, outputs = 2, hidden = [4]', "reader": "csv_classes"}
    model = trained(tmp_path, path="table.csv", more=', target = "kind"', data=own, **parts)
    whole = model.outputs(table(tmp_path / "whole.csv", ROWS))
    close(model.outputs(own), whole[permutation(len(ROWS), 0, 0)[32:]])
    own.unlink()
    with pytest.raises(ValueError, match=r"trained on .*own\.csv"):
        model.outputs(tmp_path / "whole.csv")


def test_pictures_need_no_classes(tmp_path: Path) -> None:
    for number in range(10):
        folder = tmp_path / "pets" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (20 * number, 200 * (number % 2), 0)).save(folder / f"{number}.png")
    model = trained(
        tmp_path, model='call = "convolutional", outputs = 2', reader="images", path="pets", more=", size = 16"
    )
    shutil.copytree(tmp_path / "pets", tmp_path / "more")
    assert len(model.outputs(tmp_path / "more")) == 10
    close(model.outputs(tmp_path / "pets" / "dog"), model.outputs(tmp_path / "more")[5:])
    assert torch.equal(model.outputs(tmp_path / "pets"), model.outputs())
    model.predict(tmp_path / "outputs.csv")
    assert (tmp_path / "outputs.csv").read_text().startswith("sample,cat,dog\n")
    with pytest.raises(ValueError, match="no targets"):
        model.score(tmp_path / "pets" / "dog")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no pictures, nor folders of cat, dog"):
        model.outputs(tmp_path / "empty")
