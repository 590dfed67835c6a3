"""`job.toml`: a job in a file; `polytempo init`, which writes one; readers of pictures and classes."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import polytempo as pt
from command_output import asking
from polytempo import jobs
from polytempo.cli.options.command_options import given_options
from polytempo.core.errors import JobFailed
from polytempo.spec.job_calls import data_of, model_of, optimizer_of, schedule_of

TABLE = "size,colour,kind\n" + "".join(f"{n % 7},{'red' if n % 3 else 'blue'},{'ab'[n % 2]}\n" for n in range(40))
JOB = """
model = { call = "perceptron", inputs = 3, outputs = 2, hidden = [4] }
data = { call = "csv_classes", path = "table.csv", target = "kind" }
loss = "cross_entropy"
optimizer = { call = "SGD", momentum = 0.9 }
correct = "most_likely"
lr = 0.05
batch_size = 8
epochs = 2

[run]
workers = 3
strategy = "local_sgd(period=2)"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A job file beside its table."""
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "first.toml").write_text(JOB)
    return tmp_path / "first.toml"


asked = asking()


# ---------------------------------------------------------------------- the job


@pytest.mark.parametrize("path", ['"part-*.jsonl"', '"part-{0..1}.jsonl"', '["part-0.jsonl", "part-1.jsonl"]'])
def test_data_in_shards_are_named_by_their_reader(path: str, tmp_path: Path) -> None:
    for name, count in (("part-0", 20), ("part-1", 12), ("test", 5)):
        rows = [{"x": [n, 1.0, 2.0], "y": n % 2} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f'{{ call = "json_lines", path = {path}, test_path = "test.jsonl", as_tuple = ["x", "y"] }}'
    written = "\n".join(f"data = {data}" if line.startswith("data") else line for line in JOB.splitlines())
    (tmp_path / "job.toml").write_text(written)
    job = jobs.find(str(tmp_path / "job.toml"))
    found = data_of(job, None)
    assert (len(found.train), len(found.test)) == (32, 5)  # type: ignore[arg-type]
    result = pt.simulate(job, "sync_sgd()", workers=2, epochs=1)
    assert result.steps == 2
    assert result.accuracy is not None


def test_a_job_file_is_the_job_that_its_names_make(file: Path) -> None:
    """Its run has the bits of the same job in Python."""
    found = jobs.find(str(file))
    split = pt.data.csv_classes(file.parent / "table.csv", "kind")
    written = pt.Job(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        data=lambda path: pt.Data(*split),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        correct=lambda output, target: output.argmax(-1) == target,
        lr=0.05,
        batch_size=8,
        epochs=2,
    )
    one, other = (pt.simulate(job, pt.strategies.sync_sgd(), 2) for job in (found, written))
    assert (one.parameters_sha256, one.loss, one.accuracy) == (other.parameters_sha256, other.loss, other.accuracy)
    assert (found.name, found.origin) == ("first", str(file))


def test_the_run_of_a_file_has_its_options_and_the_command_line_overrides_them(file: Path) -> None:
    command, run = given_options({"job": str(file), "workers": 5, "steps": 7})
    assert (command.workers, command.strategy, run["steps"]) == (5, "local_sgd(period=2)", 7)
    config = file.parent / "options.toml"
    config.write_text("workers = 4\nlr = 0.5\n")
    command, run = given_options({"job": str(file)}, config)
    assert (command.workers, command.strategy, run["lr"]) == (4, "local_sgd(period=2)", 0.5)


@pytest.mark.process
def test_workers_that_start_anew_find_the_job(file: Path) -> None:
    forked, fresh = (pt.run(str(file), "sync_sgd", 2, engine=engine, threads=1) for engine in ("local", "subprocess"))
    assert (forked.parameters_sha256, forked.loss) == (fresh.parameters_sha256, fresh.loss)


def test_its_own_module_lies_beside_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (file.parent / "job_file_parts.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, layers, drop):\n"
        "        super().__init__(*layers, drop)\n"
    )
    file.write_text(
        JOB.replace(
            '{ call = "perceptron", inputs = 3, outputs = 2, hidden = [4] }',
            '{ call = "job_file_parts:Net", layers = [ '
            '{ call = "torch.nn:Linear", in_features = 3, out_features = 2 }], '
            'drop = { call = "torch.nn:Dropout", p = 0.25 } }',
        )
    )
    model = model_of(jobs.find(str(file)))
    assert [type(layer).__name__ for layer in model.children()] == ["Linear", "Dropout"]
    assert model[1].p == 0.25  # type: ignore[index]
    assert model_of(jobs.find(str(file))) is not model


def test_epochs_in_a_schedule_are_steps(file: Path) -> None:
    file.write_text('schedule = { call = "MultiStepLR", milestones = ["1 epoch", "2.5 epochs"], gamma = 0.1 }\n' + JOB)
    job = jobs.find(str(file))
    model = model_of(job)
    schedule: Any = schedule_of(job, optimizer_of(job, model), 8)
    assert sorted(schedule.milestones) == [8, 20]


def test_a_loss_may_be_a_class_and_metrics_have_names(file: Path) -> None:
    changed = JOB.replace('"cross_entropy"', '{ call = "torch.nn:CrossEntropyLoss", label_smoothing = 0.1 }')
    file.write_text(changed.replace("\n[run]", '\nmetrics = { mean = "torch:mean" }\n[run]'))
    job = jobs.find(str(file))
    assert isinstance(job.loss, nn.CrossEntropyLoss)
    assert job.loss.label_smoothing == 0.1
    assert job.metrics == {"mean": torch.mean}
    file.write_text('weight = "builtins:len"\npredictions = { call = "torch:add", alpha = 2 }\n' + JOB)
    job = jobs.find(str(file))
    assert job.weight is len
    assert job.predictions is not None
    assert job.predictions(torch.ones(1), torch.ones(1)) == 3


def test_data_of_the_command_line_goes_before_the_files_own(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text(TABLE + "1,red,a\n" * 60)
    job = jobs.find(str(file))
    assert [len(data_of(job, path).train) for path in (None, other)] == [32, 80]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text.replace("optimizer", "optimiser"), "a job has no 'optimiser' (did you mean optimizer?)"),
        (lambda text: text.replace('loss = "cross_entropy"\n', ""), "loss is missing; a job needs model, data, loss"),
        (lambda text: text.replace('"cross_entropy"', '"cross_entrop"'), "has no 'cross_entrop' (did you mean cross"),
        (lambda text: text.replace('"perceptron"', '"nothing_here:Net"'), "there is no module 'nothing_here'"),
        (lambda text: text.replace('call = "perceptron", ', ""), "model is a table without `call`"),
        (lambda text: text.replace('"cross_entropy"', '"torch:float32"'), "is a dtype; name a function or a class"),
        (lambda text: text.replace("lr = 0.05", 'lr = "fast"'), "lr = 'fast': Expected `float`, got `str`"),
        (lambda text: text.replace("workers = 3", "workers = 0"), "first.toml, [run]: workers = 0: must be a"),
        (lambda text: text.replace("workers", "worker"), "did you mean workers?"),
        (lambda text: text + "]", "this is not TOML"),
    ],
)
def test_mistakes_of_a_file_are_named(
    change: Callable[[str], str], complaint: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(change(JOB))
    _, error = asked(capsys, "train", str(file), "--dry-run", code=2)
    assert complaint in error
    assert error.count("\n") == 1


def test_an_argument_that_a_function_lacks_is_named(file: Path) -> None:
    file.write_text(JOB.replace("inputs = 3", "input = 3"))
    with pytest.raises(JobFailed, match=r"job first: model\(\) raised TypeError: .*argument 'input'"):
        model_of(jobs.find(str(file)))


def test_a_file_that_is_not_there_says_who_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, error = asked(capsys, "train", str(tmp_path / "job.toml"), code=2)
    assert "job.toml; `polytempo init` writes one" in error


def test_no_file_that_a_run_names_is_imported(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's folder may come from a stranger."""
    run = file.parent / "run"
    pt.simulate(str(file), "sync_sgd", 2, checkpoint_every=4, out=run)
    _, error = asked(capsys, "evaluate", str(run), code=2)
    assert f"was saved by job 'first', which does not ship; name it: --job {file}" in error
    asked(capsys, "evaluate", str(run), "--job", str(file))


# ---------------------------------------------------------------------- polytempo init


def picture(path: Path, colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 7), colour).save(path)


def colours(folder: Path) -> Path:
    for number in range(5):
        picture(folder / "red" / f"{number}.png", (255, number, 0))
        picture(folder / "blue" / f"{number}.jpg", (0, number, 255))
    (folder / "red" / "notes.txt").write_text("none")
    return folder


@pytest.mark.parametrize(
    ("target", "model", "loss"),
    [
        ("kind", "inputs = 3, outputs = 2", "cross_entropy"),
        ("colour", "inputs = 3, outputs = 2", "cross_entropy"),
        ("price", "inputs = 5, outputs = 1", "mse_loss"),
    ],
)
def test_init_writes_a_job_that_trains_a_table(
    target: str,
    model: str,
    loss: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header, *rows = TABLE.splitlines()
    more = [f"{row},{n * 1.5}" for n, row in enumerate(rows)] if target == "price" else rows
    (tmp_path / "t.csv").write_text("\n".join([header + ",price" * (target == "price"), *more]))
    made = tmp_path / "job.toml"
    reads, read = [], csv.reader
    monkeypatch.setattr(csv, "reader", lambda lines: reads.append(lines) or read(lines))
    said, _ = asked(capsys, "init", str(tmp_path / "t.csv"), "--target", target, "--out", str(made), "--epochs", "1")
    assert len(reads) == 1
    learns = f"{made}: 32 samples to learn from, 8 to measure with\npolytempo train {made} --workers 2\n"
    number = "a number, in the loss less its mean, over its deviation"
    kind = {"kind": "2 classes: a, b", "colour": "2 classes: blue, red", "price": number}[target]
    assert said == f"predicted: {target}, {kind}\n{learns}"
    assert model in made.read_text()
    assert f'loss = "{loss}"' in made.read_text()
    found = pt.simulate(str(made), "sync_sgd", 2, batch_size=4)
    assert found.steps == 4
    _, error = asked(capsys, "init", str(tmp_path / "t.csv"), "--out", str(made), code=2)
    assert "exists; --force overwrites it" in error


@pytest.mark.parametrize(
    ("target", "model", "loss"),
    [
        ("kind", "inputs = 3, outputs = 3", "cross_entropy"),
        ("price", "inputs = 3, outputs = 1", "mse_loss"),
    ],
)
def test_init_writes_a_job_of_json_lines(
    target: str, model: str, loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in range(2):
        rows = [{"at": [n, 2], "name": "a", "price": n / 2, "kind": n % 3} for n in range(8)]
        (tmp_path / f"part-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = tmp_path / "job.toml"
    data, test = str(tmp_path / "part-*.jsonl"), str(tmp_path / "part-1.jsonl")
    said, _ = asked(capsys, "init", data, "--target", target, "--test", test, "--out", str(made))
    assert f"{made}: 16 samples to learn from, 8 to measure with\n" in said
    assert 'path = "part-*.jsonl", test_path = "part-1.jsonl"' in made.read_text()
    assert model in made.read_text()
    assert f'loss = "{loss}"' in made.read_text()
    found = pt.simulate(str(made), "sync_sgd", 2, batch_size=4, epochs=1)
    assert (found.steps, found.loss is None) == (2, False)


def test_init_writes_a_job_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colours(tmp_path / "pictures")
    asked(capsys, "init", str(tmp_path / "pictures"), "--out", str(tmp_path / "job.toml"), "--force")
    job = jobs.find(str(tmp_path / "job.toml"))
    assert pt.simulate(job, "sync_sgd", 2, steps=1, batch_size=2).steps == 1
    x, label = data_of(job, None).train[0]
    assert (tuple(x.shape), x.dtype, label in (0, 1)) == ((3, 64, 64), torch.float32, True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "there is no such file or folder; name a CSV table"),
        (["t.csv", "--target", "x"], "--target x: t.csv has no such column; its columns are size, colour, kind"),
        (["."], "has pictures of 0 classes; put them into folders"),
        (["t.csv", "--test", "t.csv"], "--test: a CSV table and a folder of pictures are split by the job"),
        (["t.jsonl", "--target", "x"], "--target x: t.jsonl has no such column; its columns are a, b"),
        (["t.jsonl"], "t.jsonl: no column but b has numbers"),
        (["t.jsonl", "--target", "a"], "--target a: the column has values other than numbers"),
        (["t.csv", "--out", "job.yaml"], "--out job.yaml: must end with .toml or .py"),
        ([], "name the data: polytempo init DATA"),
        (["memory://nothing/t.csv"], "memory://nothing/t.csv: there is no such file or folder"),
        (["memory://nothing"], "memory://nothing: there is no such file or folder"),
        (["bare.csv"], "bare.csv: its first row has 0.5; write a row with the names"),
        (["t.csv", "--kind", "number"], "--kind number: column kind of t.csv has cells that are not numbers"),
        (["t.csv", "--model", "torchvision:resnet18"], "its models take pictures; name a folder of them, not t.csv"),
        (["t.csv", "--model", "perceptron(inputs=9, outputs=2)"], "model(input) raised RuntimeError"),
        (["t.csv", "--model", "perceptron(3)"], "perceptron(3): name each argument"),
        (["t.csv", "--optimizer", "SGDD"], "torch.optim has no 'SGDD' (did you mean SGD, ASGD?)"),
        (["t.csv", "--optimizer", "SGD(lr=1"], "is never closed"),
        (["t.csv", "--loss", "l1_loss", "--target", "colour"], "loss(output, target) raised "),
        (["t.csv", "--schedule", "Cosine"], "did you mean CosineAnnealingLR"),
        (["t.csv", "--metric", "F1Score"], "write NAME=module:object"),
        (["t.csv", "--metric", "f1=torchmetrix:F1Score"], "there is no module 'torchmetrix'"),
        (["t.csv", "--strategy", "local"], "there is no strategy 'local'"),
    ],
)
def test_mistakes_of_init_are_named(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(TABLE)
    Path("t.jsonl").write_text('{"a": "x", "b": 1}\n')
    Path("bare.csv").write_text("0.5,a\n0.75,b\n" * 20)
    _, error = asked(capsys, "init", *arguments, code=1 if "raised" in complaint else 2)
    assert complaint in error
    assert not [*Path().glob("job.*")]


@pytest.mark.parametrize("out", ["job.toml", "job.py"])
def test_init_takes_all_parts_by_name(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both forms are the same job: their runs have the same bits."""
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(TABLE)
    parts = ["--optimizer", "SGD(momentum=0.5)", "--schedule", "StepLR(step_size='1 epoch', gamma=0.5)", "--lr", "0.1"]
    parts += [
        "--loss",
        "torch.nn:CrossEntropyLoss(label_smoothing=0.1)",
        "--metric",
        "mean=polytempo.spec.job:most_likely",
    ]
    parts += ["--model", "polytempo.jobs.models:perceptron(inputs=3, outputs=2)", "--track", "tensorboard"]
    asked(capsys, "init", "t.csv", *parts, "--batch-size", "8", "--epochs", "2", "--out", out)
    job = jobs.find(out if out == "job.toml" else "job.py:job")
    assert isinstance(job.loss, nn.CrossEntropyLoss)
    assert (job.lr, job.batch_size, job.epochs, [*job.metrics]) == (0.1, 8, 2, ["mean"])
    written = replace(
        job,
        model=lambda: nn.Sequential(
            *(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
        ),
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.5),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, steps, 0.5),
        metrics={},
    )
    one, other = (pt.simulate(each, "sync_sgd()", 2) for each in (replace(job, metrics={}), written))
    assert one.parameters_sha256 == other.parameters_sha256
    if out == "job.toml":
        assert 'trackers = ["tensorboard"]' in Path(out).read_text()


def test_init_without_data_asks_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(TABLE)
    answers = iter(["", "no.csv", "t.csv", "colour", "", "SGD(", "SGD", "fast", "0.5", "", "local_sgd(period=2)", "3"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    said, _ = asked(capsys, "init")
    assert next(answers, "none left") == "none left"
    for complaint in ("there is no such file or folder", "is never closed", "could not convert"):
        assert complaint in said
    text = Path("job.toml").read_text()
    for part in ('target = "colour"', 'optimizer = "SGD"', "lr = 0.5", "epochs = 10", "workers = 3"):
        assert part in text
    _, error = asked(capsys, "init", code=2)  # before the first question
    assert "job.toml exists; --force overwrites it" in error


# ---------------------------------------------------------------------- readers


def test_pictures_are_scaled_and_numbered_by_the_names_of_classes(tmp_path: Path) -> None:
    train, test = pt.data.images(colours(tmp_path), size=4)
    assert (len(train), len(test), train.classes) == (8, 2, ["blue", "red"])
    for x, label in [*train, *test]:  # type: ignore[misc]
        assert tuple(x.shape) == (3, 4, 4)
        assert x[0].mean().item() == pytest.approx(1.0 if label else -1.0, abs=0.05)
    again = pt.data.images(tmp_path, size=4)[1].files
    assert again == test.files
    assert {file.name for file, _ in [*train.files, *test.files]} == {
        f"{n}.{e}" for n in range(5) for e in ("png", "jpg")
    }


def test_folders_named_train_and_test_are_taken_as_they_are(tmp_path: Path) -> None:
    for part, numbers in (("train", 3), ("val", 1)):
        for number in range(numbers):
            picture(tmp_path / part / "a" / f"{number}.png", (0, 0, 0))
            picture(tmp_path / part / "b" / f"{number}.png", (9, 9, 9))
    train, test = pt.data.images(tmp_path, size=2)
    assert (len(train), len(test)) == (6, 2)


def test_a_picture_that_is_none_is_named(tmp_path: Path) -> None:
    colours(tmp_path)
    (tmp_path / "red" / "0.png").write_bytes(b"no picture")
    train, test = pt.data.images(tmp_path, size=2)
    with pytest.raises(ValueError, match=r"0\.png cannot be read as a picture"):
        list(map(train.__getitem__, range(len(train)))) + list(map(test.__getitem__, range(len(test))))


def test_classes_of_a_table_are_numbered_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TABLE)
    split = pt.data.csv_classes(tmp_path / "t.csv", "kind")
    assert split.train.tensors[1].dtype == torch.int64
    labels = torch.cat([split.train.tensors[1], split.test.tensors[1]])
    assert np.bincount(labels.numpy()).tolist() == [20, 20]
    (tmp_path / "one.csv").write_text("x,y\n" + "1,2\n" * 20)
    with pytest.raises(ValueError, match=r"column 'x'.*1 different values; there may be 2 to 100 classes"):
        pt.data.csv_classes(tmp_path / "one.csv", "x")


def test_the_job_of_a_run_is_in_its_stream(file: Path) -> None:
    run = file.parent / "run"
    pt.simulate(str(file), "sync_sgd", 2, steps=1, out=run)
    assert json.loads((run / "events.jsonl").read_text().splitlines()[0])["origin"] == str(file)
