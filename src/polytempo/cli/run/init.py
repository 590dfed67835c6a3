"""`polytempo init`: a job file for a table, files of Parquet or JSON lines, or a folder of pictures."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo import jobs
from polytempo.cli.run.init_options import InitOptions, shards_reader
from polytempo.core.system.url_path import Place, UrlPath, place
from polytempo.data.readers import Split
from polytempo.data.readers.csv_regression import MAX_CATEGORIES, classes_of, finite_number, numbers_of, read_table
from polytempo.data.readers.images import images
from polytempo.data.streams.sources.json_lines import json_lines
from polytempo.data.streams.sources.parquet import parquet
from polytempo.jobs.job_text import JobParts, PartCall, python_text, toml_text
from polytempo.spec.job import Data
from polytempo.spec.job_calls import data_of, model_of
from polytempo.spec.objective import judged
from polytempo.spec.table.option import entries
from polytempo.training.job.sample_batches import SampleBatches

_FEW = 20
"""Different numbers in a target that are taken for classes, at most."""
_ASKED = ("files", "target", "model", "optimizer", "lr", "epochs", "strategy", "workers")
_SHOWN = 6


class DataFacts(NamedTuple):
    """The facts of the data that decide a job."""

    data: PartCall
    inputs: int | None
    """Numbers of a sample; None for a picture."""
    outputs: int
    has_classes: bool
    about: str
    """The target, for a person."""
    split: Split | None = None
    """The samples of a table, which has been read as a whole; None: the job reads its data."""


def init(asked: InitOptions) -> None:
    """Look at the data, and write the file. It is there only if a batch goes through its model and its loss."""
    if asked.out.exists() and not asked.force:
        raise ValueError(f"{asked.out} exists; --force overwrites it, or name another file by --out")
    if asked.files is None:
        asked = _answered(asked)
    assert asked.files is not None
    reader = shards_reader(asked.files)
    if asked.test is not None and reader is None:
        raise ValueError("--test: a CSV table and a folder of pictures are split by the job; leave --test out")
    files = place(asked.files)
    if reader is None and isinstance(files, UrlPath) and not files.exists():
        raise ValueError(f"{files}: there is no such file or folder; name a CSV table or a folder of pictures")
    is_table = isinstance(files, UrlPath) and files.name.endswith(".csv")  # a web server would be asked for its links
    read = _table if is_table or not files.is_dir() else _pictures
    facts = _shards(asked, reader) if reader else read(asked, files)
    parts = _parts(asked, facts)
    before = asked.out.read_bytes() if asked.out.exists() else None
    name = str(asked.out) if asked.out.suffix == ".toml" else f"{asked.out}:job"
    try:
        write = toml_text if asked.out.suffix == ".toml" else python_text
        asked.out.write_text(write(parts, asked.out.name))
        num_train, num_test = _tried(name, facts.split)
    except BaseException:
        asked.out.unlink() if before is None else asked.out.write_bytes(before)
        raise
    print(facts.about)
    print(f"{asked.out}: {num_train:,} samples to learn from, {num_test:,} to measure with")
    rest = "".join(f" --track {each!r}" for each in parts.run.get("trackers", ()))
    more = f" --strategy '{asked.strategy}'{rest}" if asked.out.suffix == ".py" else ""
    print(f"polytempo train {name} --workers {asked.workers}{more}")


def _tried(name: str, split: Split | None) -> tuple[int, int]:
    """The numbers of samples to learn from and to measure with, after two samples have gone through the job."""
    job = jobs.find(name)
    data = data_of(job, None) if split is None else Data(*split)
    train: Any = data.train
    model = model_of(job).eval()
    samples = SampleBatches(train, data.collate, "the training set")
    with torch.no_grad():
        for batch, number in samples.between(0, min(2, samples.length)):
            judged(job, model, batch, number)
    return len(train), len(data.test or ())  # type: ignore[arg-type]


def _answered(asked: InitOptions) -> InitOptions:
    """The options, with a person's answers in place of the most important ones."""
    if not sys.stdin.isatty():
        raise ValueError("name the data: polytempo init DATA; on a terminal it asks")
    print(f"The job goes to {asked.out}. Enter takes the value in brackets.")
    rows, answers = entries(InitOptions), dict[str, Any]()
    for name in _ASKED:
        row, default = rows[name], getattr(asked, name)
        shown = f" [{default.text if isinstance(default, PartCall) else default}]" if default is not None else ""
        question = row.help.replace(" Without it, questions are asked.", "").partition(" Default: ")
        rest = f" [{question[2].rstrip('.')}]" if not shown and question[2] else shown
        while name not in answers:
            text = input(f"{name}: {question[0]}{rest}\n> ").strip()
            if not text and name == "files":
                continue
            if not text:
                break
            try:
                kind = row.plain_kind
                answers[name] = row.checked(kind(text) if kind in (int, float) else text)
            except ValueError as error:
                print(f"  {error}")
    return replace(asked, **answers)


# ---------------------------------------------------------------------- the data


def _table(asked: InitOptions, files: Place) -> DataFacts:
    table = read_table(files)
    names, rows = table.names, table.rows
    if number := next((name for name in names if "." in name and finite_number(name) is not None), None):
        raise ValueError(f"{files}: its first row has {number}; write a row with the names of the columns above it")
    target = _target(asked, names)
    cells = [row[names.index(target)] for row in rows]
    different = sorted(set(cells))
    are_numbers = all(finite_number(cell) is not None for cell in cells)
    are_classes = asked.kind == "classes" or not are_numbers or (asked.kind is None and len(different) <= _FEW)
    if asked.kind == "number" and not are_numbers:
        raise ValueError(f"--kind number: column {target} of {files} has cells that are not numbers")
    if are_classes and not 2 <= len(different) <= MAX_CATEGORIES:
        raise ValueError(
            f"--target {target}: the column has {len(different)} different values, and not all are numbers; choose "
            "another"
        )
    split = (classes_of if are_classes else numbers_of)(table, target)
    data = PartCall("csv_classes" if are_classes else "csv_regression", {"path": _path(asked), "target": target})
    kind = _listed(different) if are_classes else "a number, in the loss less its mean, over its deviation"
    about = f"{_about(asked, target)}, {kind}"
    outputs = len(different) if are_classes else 1
    return DataFacts(data, split.train.tensors[0].shape[1], outputs, are_classes, about, split)


def _shards(asked: InitOptions, reader: str) -> DataFacts:
    """Numbers of all columns but the target as one vector. One pass over the target's column finds its kind."""
    read, files = parquet if reader == "parquet" else json_lines, str(asked.files)
    first = next(iter(read(files)))
    target = _target(asked, list(first))
    numbers = [name for name in first if name != target and isinstance(first[name], Tensor)]
    if not numbers:
        raise ValueError(f"{files}: no column but {target} has numbers; write the job's data and model by hand")
    found = [each for (each,) in read(files, as_tuple=[target])]
    if not all(isinstance(each, Tensor) and each.dim() == 0 for each in found):
        raise ValueError(f"--target {target}: the column has values other than numbers; choose another")
    values = torch.stack(found)
    countable = not values.is_floating_point() and bool(values.min() >= 0) and bool(values.max() < MAX_CATEGORIES)
    are_classes = countable if asked.kind is None else asked.kind == "classes"
    if are_classes and not countable:
        raise ValueError(f"--kind classes: column {target} has other values than whole numbers from 0 to 99")
    outputs = max(2, int(values.max()) + 1) if are_classes else 1
    data = PartCall(reader, {"path": _path(asked), "as_tuple": [numbers, target if are_classes else [target]]})
    kind = f"{outputs} classes by number" if are_classes else "a number"
    inputs = sum(first[name].numel() for name in numbers)
    return DataFacts(data, inputs, outputs, are_classes, f"{_about(asked, target)}, {kind}")


def _pictures(asked: InitOptions, files: Place) -> DataFacts:
    if asked.target is not None:
        raise ValueError("--target: pictures are predicted by the names of their folders; leave --target out")
    train, _ = images(files)
    data = PartCall("images", {"path": _path(asked), "size": asked.size})
    return DataFacts(data, None, len(train.classes), True, f"predicted: the folder, {_listed(train.classes)}")


def _target(asked: InitOptions, names: list[str]) -> str:
    target = asked.target or names[-1]
    if target not in names:
        raise ValueError(f"--target {target}: {asked.files} has no such column; its columns are {', '.join(names)}")
    return target


def _about(asked: InitOptions, target: str) -> str:
    return f"predicted: {target}{'' if asked.target else ' (the last column; --target names another)'}"


def _listed(classes: list[str]) -> str:
    more = ", …" if len(classes) > _SHOWN else ""
    return f"{len(classes)} classes: {', '.join(classes[:_SHOWN])}{more}"


# ---------------------------------------------------------------------- the job


def _parts(asked: InitOptions, facts: DataFacts) -> JobParts:
    run: dict[str, Any] = {"workers": asked.workers, "strategy": asked.strategy}
    if asked.trackers:
        run["trackers"] = [str(each) for each in asked.trackers]
    return JobParts(
        model=_model(asked, facts),
        data=facts.data,
        test=None if asked.test is None else _path(asked, asked.test),
        loss=asked.loss or PartCall("cross_entropy" if facts.has_classes else "mse_loss"),
        optimizer=asked.optimizer or PartCall("AdamW", {"weight_decay": 0.01}),
        schedule=asked.schedule or PartCall("CosineAnnealingLR", {"T_max": "run"}),
        metrics=asked.metric or {},  # type: ignore[arg-type]  # it has been read
        has_classes=facts.has_classes,
        numbers={"lr": asked.lr, "batch_size": asked.batch_size or 32, "epochs": asked.epochs},
        run=run,
    )


def _model(asked: InitOptions, facts: DataFacts) -> PartCall:
    if asked.model is None:
        if facts.inputs is None:
            return PartCall("convolutional", {"outputs": facts.outputs})
        sizes = {"inputs": facts.inputs, "outputs": facts.outputs, "hidden": [64, 64]}
        return PartCall("perceptron", sizes)
    library, _, name = asked.model.name.partition(":")
    if library not in ("torchvision", "timm", "transformers"):
        return asked.model
    if facts.inputs is not None:
        raise ValueError(
            f"--model {asked.model.text}: its models take pictures; name a folder of them, not {asked.files}"
        )
    if find_spec(library) is None:
        raise ValueError(f"--model {asked.model.text}: there is no module {library}; run: pip install {library}")
    if library == "torchvision":
        return PartCall(f"torchvision.models:{name}", {**asked.model.arguments, "num_classes": facts.outputs})
    if library == "timm":
        given = {"model_name": name, **asked.model.arguments, "num_classes": facts.outputs}
        return PartCall("timm:create_model", given)
    if asked.model.arguments:
        raise ValueError(f"--model {asked.model.text}: give a name or a folder alone; its configuration has the rest")
    found = str(Path(name).resolve()) if Path(name).is_dir() else name  # the job may be run in another folder
    return PartCall("from_transformers", {"name": found, "outputs": facts.outputs})


def _path(asked: InitOptions, given: str | None = None) -> str:
    """A path of data, relative to the job file if it is below; a URL as it is."""
    files = given or str(asked.files)
    if "://" in files:
        return files
    data, folder = Path(files).resolve(), asked.out.resolve().parent
    return str(data.relative_to(folder) if data.is_relative_to(folder) else data)
