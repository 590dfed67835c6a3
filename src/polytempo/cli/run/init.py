"""`polytempo init`: a job file for a table, files of Parquet or JSON lines, or a folder of pictures."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from polytempo.cli.run.init_options import InitOptions
from polytempo.data.readers.csv_regression import MAX_CATEGORIES, csv_classes, csv_regression, finite_number, read_table
from polytempo.data.readers.images import images
from polytempo.data.streams.sources.json_lines import json_lines
from polytempo.data.streams.sources.parquet import parquet
from polytempo.jobs.job_file import job_from_file
from polytempo.spec.job_calls import data_of

SHARDS = {
    ".parquet": "parquet",
    **dict.fromkeys(
        [f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in ("", ".gz", ".bz2", ".xz", ".zst")],
        "json_lines",
    ),
}
"""Endings of names of files in shards, and their readers in `polytempo.data`."""
_FEW = 20
"""Different numbers in a target that are taken for classes, at most."""


def init(asked: InitOptions) -> None:
    """Look at the data, and write the file."""
    if asked.out.exists() and not asked.force:
        raise ValueError(f"{asked.out} exists; --force overwrites it, or name another file by --out")
    reader = next((reader for ending, reader in SHARDS.items() if asked.files.name.endswith(ending)), None)
    if asked.test is not None and reader is None:
        raise ValueError("--test: a CSV table and a folder of pictures are split by the job; leave --test out")
    table = _pictures if asked.files.is_dir() else _table
    asked.out.write_text(table(asked) if reader is None else _shards(asked, reader))
    data = data_of(job_from_file(asked.out), None)
    num_train, num_test = len(data.train), len(data.test or ())  # type: ignore[arg-type]
    print(f"{asked.out}: {num_train:,} samples to learn from, {num_test:,} to measure with")
    print(f"polytempo train {asked.out} --workers {asked.workers}")


def _table(asked: InitOptions) -> str:
    names, rows = read_table(asked.files)
    target = asked.target or names[-1]
    if target not in names:
        raise ValueError(f"--target {target}: {asked.files} has no such column; its columns are {', '.join(names)}")
    cells = [row[names.index(target)] for row in rows]
    different = len(set(cells))
    are_classes = different <= _FEW or not all(finite_number(cell) is not None for cell in cells)
    if are_classes and not 2 <= different <= MAX_CATEGORIES:
        raise ValueError(
            f"--target {target}: the column has {different} different values, and not all are numbers; choose another"
        )
    split = (csv_classes if are_classes else csv_regression)(asked.files, target)
    inputs = split.train.tensors[0].shape[1]
    reader, outputs = ("csv_classes", different) if are_classes else ("csv_regression", 1)
    return _file(
        asked,
        f'{{ call = "perceptron", inputs = {inputs}, outputs = {outputs}, hidden = [64, 64] }}',
        f'{{ call = "{reader}", path = {_path(asked, asked.files)}, target = {_quoted(target)} }}',
        "cross_entropy" if are_classes else "mse_loss",
    )


def _shards(asked: InitOptions, reader: str) -> str:
    """Numbers of all columns but the target as one vector. One pass over the target's column finds its kind."""
    read = parquet if reader == "parquet" else json_lines
    first = next(iter(read(str(asked.files))))
    names = list(first)
    target = asked.target or names[-1]
    if target not in names:
        raise ValueError(f"--target {target}: {asked.files} has no such column; its columns are {', '.join(names)}")
    numbers = [name for name in names if name != target and isinstance(first[name], Tensor)]
    if not numbers:
        raise ValueError(f"{asked.files}: no column but {target} has numbers; write the job's data and model by hand")
    found = [each for (each,) in read(str(asked.files), as_tuple=[target])]
    if not all(isinstance(each, Tensor) and each.dim() == 0 for each in found):
        raise ValueError(f"--target {target}: the column has values other than numbers; choose another")
    values = torch.stack(found)
    are_classes = not values.is_floating_point() and values.min() >= 0 and values.max() < MAX_CATEGORIES
    outputs = max(2, int(values.max()) + 1) if are_classes else 1
    inputs = sum(first[name].numel() for name in numbers)
    kept = f"[{', '.join(map(_quoted, numbers))}], {_quoted(target) if are_classes else f'[{_quoted(target)}]'}"
    test = "" if asked.test is None else f", test_path = {_path(asked, asked.test)}"
    return _file(
        asked,
        f'{{ call = "perceptron", inputs = {inputs}, outputs = {outputs}, hidden = [64, 64] }}',
        f'{{ call = "{reader}", path = {_path(asked, asked.files)}{test}, as_tuple = [{kept}] }}',
        "cross_entropy" if are_classes else "mse_loss",
    )


def _pictures(asked: InitOptions) -> str:
    train, _ = images(asked.files)
    classes = len(train.classes)
    return _file(
        asked,
        f'{{ call = "convolutional", outputs = {classes} }}',
        f'{{ call = "images", path = {_path(asked, asked.files)}, size = 64 }}',
        "cross_entropy",
    )


def _file(asked: InitOptions, model: str, data: str, loss: str) -> str:
    correct = 'correct = "most_likely"\n' if loss == "cross_entropy" else ""
    return f"""\
# A job of Polytempo: polytempo train {asked.out.name}
# A name is module:object, such as "torchvision.models:resnet18", or a plain name of the modules in the comments.

model = {model}  # polytempo.jobs.models
data = {data}  # polytempo.data
loss = "{loss}"  # torch.nn.functional
optimizer = {{ call = "AdamW", weight_decay = 0.01 }}  # torch.optim
schedule = {{ call = "CosineAnnealingLR", T_max = "{asked.epochs} epochs" }}  # torch.optim.lr_scheduler
{correct}lr = 0.003
batch_size = 32
epochs = {asked.epochs}

[run]  # options of `polytempo train`; the command line overrides them
workers = {asked.workers}
strategy = {_quoted(asked.strategy)}
"""


def _path(asked: InitOptions, path: Path) -> str:
    """A path of data, relative to the job file if it is below."""
    data, folder = path.resolve(), asked.out.resolve().parent
    return _quoted(str(data.relative_to(folder) if data.is_relative_to(folder) else data))


def _quoted(text: str | Path) -> str:
    """A TOML string."""

    return json.dumps(str(text), ensure_ascii=False)
