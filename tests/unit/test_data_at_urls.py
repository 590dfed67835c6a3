"""Tables and pictures at URLs: the samples, bits and predictions of a local copy. S3 and HTTP are in integrations."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
import torch
from PIL import Image

import polytempo as pt
from command_output import asking
from object_store import bucket
from polytempo.core.system.url_path import UrlPath
from polytempo.spec.job_calls import data_of

asked = asking()
TABLE = "size,colour,kind\n" + "".join(f"{n % 7},{'red' if n % 3 else 'blue'},{'ab'[n % 2]}\n" for n in range(40))
NEW = "size,colour\n" + "".join(f"{n},red\n" for n in range(5))


@pytest.fixture(params=["memory", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place with `t.csv`, `new.csv` and `pictures`, which are in `tmp_path`, too."""
    (tmp_path / "t.csv").write_text(TABLE)
    (tmp_path / "new.csv").write_text(NEW)
    for number in range(5):
        for name, colour in (("red", (255, number, 0)), ("blue", (0, number, 255))):
            (tmp_path / "pictures" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 7), colour).save(tmp_path / "pictures" / name / f"{number}.png")
    (tmp_path / "pictures" / "red" / "notes.txt").write_text("none")
    url = bucket(tmp_path) if request.param == "bucket" else f"memory://{tmp_path.name}"
    for file in [tmp_path / "t.csv", tmp_path / "new.csv", *(tmp_path / "pictures").rglob("*.*")]:
        UrlPath(f"{url}/{file.relative_to(tmp_path)}").write(file.read_bytes())
    return url


@pytest.mark.parametrize(("name", "form"), [("t.csv", "toml"), ("t.csv", "py"), ("pictures", "toml")])
def test_init_writes_the_job_of_the_copy(
    name: str, form: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for data, file in ((str(tmp_path / name), f"here.{form}"), (f"{url}/{name}", f"there.{form}")):
        made = tmp_path / file
        asked(capsys, "init", data, "--out", str(made), "--epochs", "1", "--batch-size", "4")
        result = pt.simulate(str(made) + ":job" * (form == "py"), "sync_sgd", 2)
        found.append((result.steps, result.parameters_sha256))
    assert f"{url}/{name}" in (tmp_path / f"there.{form}").read_text()
    assert found[0] == found[1]


def test_folders_of_training_and_testing_are_found_at_a_url(url: str, tmp_path: Path) -> None:
    content = (tmp_path / "pictures" / "red" / "0.png").read_bytes()
    for name in ("train/a/0.png", "train/a/1.png", "train/b/0.png", "val/a/0.png", "val/b/0.PNG"):
        UrlPath(f"{url}/split/{name}").write(content)
    train, test = pt.data.images(f"{url}/split", size=2)
    assert [(str(file).removeprefix(f"{url}/split/"), label) for file, label in [*train.files, *test.files]] == [
        *(("train/a/0.png", 0), ("train/a/1.png", 0), ("train/b/0.png", 1)),
        *(("val/a/0.png", 0), ("val/b/0.PNG", 1)),
    ]
    x, label = train[2]
    assert (x.shape, x[0].mean().item(), label) == ((3, 2, 2), 1.0, 1)


def test_new_data_at_a_url_are_prepared_as_the_training_samples(url: str, tmp_path: Path) -> None:
    made = tmp_path / "job.toml"
    asked_parts = {"model": "perceptron", "inputs": 3, "outputs": 2}
    text = ", ".join(f"{'call' if key == 'model' else key} = {json.dumps(value)}" for key, value in asked_parts.items())
    data = f'{{ call = "csv_classes", path = "{url}/t.csv", target = "kind" }}'
    made.write_text(f'model = {{ {text} }}\ndata = {data}\nloss = "cross_entropy"\noptimizer = "SGD"\nlr = 0.1\n')
    job, outputs = pt.jobs.find(str(made)), []
    for given in (None, f"{url}/t.csv", tmp_path / "t.csv"):  # the file's own, and --data of the run
        run = tmp_path / f"run-{len(outputs)}"
        pt.simulate(job, "sync_sgd", 1, steps=3, checkpoint_every=3, out=run, data=given)
        model = pt.training.trained_model(job, run)
        outputs += [model.outputs(f"{url}/new.csv"), model.outputs(tmp_path / "new.csv")]
    assert len(outputs[0]) == 5
    assert all(torch.equal(each, outputs[0]) for each in outputs)


def test_a_run_on_a_url_with_a_login_is_scored_with_that_url(tmp_path: Path) -> None:
    """A run records memory://folder/t.csv for memory://me:key@folder/t.csv, and nothing is there."""
    signed, kept = (f"memory://{login}{tmp_path.name}/t.csv" for login in ("me:key@", ""))
    UrlPath(signed).write(TABLE.encode())
    for name, text in (("own.csv", TABLE), ("new.csv", NEW)):
        (tmp_path / name).write_text(text)
    made, run = tmp_path / "job.toml", tmp_path / "run"
    made.write_text(
        'model = { call = "perceptron", inputs = 3, outputs = 2 }\nloss = "cross_entropy"\n'
        'optimizer = "SGD"\nlr = 0.1\n'
        'data = { call = "csv_classes", path = "own.csv", target = "kind" }\n'
    )
    job = pt.jobs.find(str(made))
    pt.simulate(job, "sync_sgd", 1, steps=3, checkpoint_every=3, out=run, data=signed)
    model = pt.training.trained_model(job, run)
    assert model.trained_on == kept
    assert model.score(signed) == model.score()
    with pytest.raises(ValueError, match="keeps no login or signature"):
        model.outputs(tmp_path / "new.csv")


def test_data_of_a_run_at_a_url_reach_the_job_as_text(url: str) -> None:
    seen = []

    def read(path: Path | str | None) -> pt.Data:
        seen.append(path)
        assert isinstance(path, str)
        with fsspec.open(path, "rt") as file:
            return pt.Data(torch.utils.data.TensorDataset(torch.ones(len(file.read()), 1)))

    job = pt.Job(
        model=lambda: torch.nn.Linear(1, 1),
        data=read,
        loss=pt.of_batch(lambda model, batch: model(batch[0]).mean()),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )
    assert pt.simulate(job, "sync_sgd", 1, steps=1, data=f"{url}/t.csv").steps == 1
    assert set(seen) == {f"{url}/t.csv"}
    with pytest.raises(ValueError, match=r"job digits comes with its data; leave out --data memory://x"):
        data_of(pt.jobs.find("digits"), "memory://x")
    with pytest.raises(ValueError, match=r"job mnist: --data memory://x is a URL"):
        data_of(pt.jobs.find("mnist"), "memory://x")


@pytest.mark.parametrize("read", [lambda url: pt.data.csv_classes(url, "kind"), pt.data.images])
def test_a_place_without_data_is_named(read: object, url: str) -> None:
    with pytest.raises((OSError, ValueError), match=f"{url}/absent"):
        read(f"{url}/absent")  # type: ignore[operator]
