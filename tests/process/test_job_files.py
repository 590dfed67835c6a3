"""`polytempo train job.toml`, on data in shards and on streams, and schedules of a file that is resumed."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polytempo as pt
from command_output import asking
from polytempo.report.status.rows import read_metrics

pytestmark = pytest.mark.process

JOB = """
model = { call = "perceptron", inputs = 3, outputs = 2, hidden = [4] }
data = DATA
loss = "cross_entropy"
optimizer = "SGD"
correct = "most_likely"
lr = 0.05
batch_size = 4
"""
POINTS = """
import torch
from torch.utils.data import IterableDataset, TensorDataset

class Points(IterableDataset):
    def __init__(self, number):
        self.number = number

    def __iter__(self):
        for n in range(self.number):
            yield torch.tensor([n / 8, 1.0, 2.0]), n % 2

def counted(number):
    return TensorDataset(*map(torch.stack, zip(*((x, torch.tensor(y)) for x, y in Points(number)))))
"""
asked = asking()


@pytest.fixture(autouse=True)
def _beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "points_of_a_file", raising=False)
    (tmp_path / "points_of_a_file.py").write_text(POINTS)


def write_tar(path: Path, count: int) -> None:
    with tarfile.open(path, "w") as tar:
        for n in range(count):
            np.save(stream := io.BytesIO(), np.array([n / 8, 1, 2], np.float32))
            for name, content in ((f"{n:04}.npy", stream.getvalue()), (f"{n:04}.cls", b"%d" % (n % 2))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_lines(path: Path, count: int) -> None:
    rows = "".join(json.dumps({"x": [n / 8, 1.0, 2.0], "y": n % 2}) + "\n" for n in range(count))
    path.write_bytes(gzip.compress(rows.encode()) if path.suffix == ".gz" else rows.encode())


@pytest.mark.parametrize(
    ("data", "samples"),
    [
        ('{ call = "webdataset", path = "part-{0..1}.tar", as_tuple = ["npy", "cls"] }', 24),
        ('{ call = "json_lines", path = "part-*.jsonl.gz", as_tuple = ["x", "y"] }', 24),
        ('{ call = "points_of_a_file:Points", number = 23 }', 23),
        ('{ call = "points_of_a_file:counted", number = 23 }', 23),
    ],
    ids=["tars", "lines", "stream", "data set"],
)
def test_each_sample_is_trained_on_once_an_epoch(
    data: str, samples: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part, count in enumerate((14, 10)):
        write_tar(tmp_path / f"part-{part}.tar", count)
        write_lines(tmp_path / f"part-{part}.jsonl.gz", count)
    (tmp_path / "job.toml").write_text(JOB.replace("DATA", data))
    options = ["--workers", "2", "--threads", "1", "--json", "--out", str(tmp_path / "run")]
    for epochs, more in ((1, []), (2, ["--resume"])):
        said, _ = asked(capsys, "train", str(tmp_path / "job.toml"), "--epochs", str(epochs), *options, *more)
        result = json.loads(said)
        assert (result["samples"], result["epochs"]) == (epochs * samples, epochs)


COUNTED = '{ call = "points_of_a_file:counted", number = 64 }'
LR, STEPS_OF_EPOCH = 0.05, 8


def rates(out: Path) -> dict[int, float]:
    """The rate after each step that has a row."""
    return {row["step"]: row["lr"] for row in read_metrics(out) if row["kind"] == "train"}


@pytest.mark.parametrize("elastic", [{}, {"min_workers": 1}], ids=["fixed", "elastic"])
@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        ('{ call = "StepLR", step_size = "1.5 epochs", gamma = 0.5 }', lambda step: 0.5 ** (step // 12)),
        (
            '{ call = "MultiStepLR", milestones = ["1 epoch", "0.75 run"] }',
            lambda step: 0.1 ** ((step >= 8) + (step >= 24)),
        ),
        ('{ call = "LinearLR", total_iters = "run" }', lambda step: 1 / 3 + 2 / 3 * step / 32),
    ],
    ids=["epochs", "both", "run"],
)
def test_a_resumed_run_has_the_rates_of_its_files_lengths(
    schedule: str, factor: Any, elastic: dict[str, int], tmp_path: Path
) -> None:
    """Begun with a schedule in steps for two epochs; resumed to four with lengths in epochs and parts of the run."""
    file, out = tmp_path / "job.toml", tmp_path / "run"
    given: dict[str, Any] = {"threads": 1, "out": out, **elastic}
    file.write_text(JOB.replace("DATA", COUNTED) + 'schedule = { call = "ExponentialLR", gamma = 0.9 }\n')
    pt.run(str(file), "sync_sgd", 2, epochs=2, **given)
    first = rates(out)
    assert first[16] == pytest.approx(LR * 0.9**16)
    file.write_text(JOB.replace("DATA", COUNTED) + f"schedule = {schedule}\n")
    pt.run(str(file), "sync_sgd", 2, epochs=4, resume=True, **given)
    later = {step: rate for step, rate in rates(out).items() if step > 16}
    assert max(later) == 4 * STEPS_OF_EPOCH
    assert later == pytest.approx({step: LR * factor(min(step, 31)) for step in later}), "the last step's rate stays"
