"""Shipped jobs fit together and learn; a user's own are found; mistakes are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from polytempo import jobs
from polytempo.cli.options.plan import found_job
from polytempo.core.errors import JobFailed
from polytempo.data import DataShard
from polytempo.spec.job import Data, Job

DATA = Path(os.environ.get("POLYTEMPO_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
FOLDERS = {
    "digits": None,
    "mnist": DATA / "mnist",
    "mnist_cnn": DATA / "mnist",
    "chars": DATA / "tinyshakespeare",
    "housing": DATA / "california-housing",
    "a9a": DATA / "a9a",
}
OWN = """
import torch
from polytempo.spec.job import Data, Job

def make():
    return Job(model=lambda: torch.nn.Linear(1, 1), data=lambda folder: Data(None), loss=torch.nn.functional.mse_loss,
               optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr), name="own")

mine = make()
number = 3
"""


def losses(job: Job, data: Data, num_steps: int) -> list[float]:
    """The loss of each step of one worker."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer(model.parameters(), job.lr)
    found = []
    for _, (x, y) in zip(range(num_steps), DataShard(data.train, rank=0, size=1, batch_size=16), strict=False):
        optimizer.zero_grad()
        loss = job.loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


def test_the_jobs_that_ship() -> None:
    assert jobs.names() == ["digits", "mnist", "mnist_cnn", "chars", "housing", "a9a"]
    assert set(FOLDERS) == set(jobs.names())


@pytest.mark.parametrize("name", list(FOLDERS))
def test_a_job_fits_together_and_learns(name: str) -> None:
    job = jobs.find(name)
    data = job.data(FOLDERS[name])
    assert job.name == name
    found = losses(job, data, num_steps=20)
    assert all(loss < float("inf") for loss in found)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])
    if job.schedule is not None:
        optimizer = job.optimizer(job.model().parameters(), job.lr)
        assert job.schedule(optimizer, 10).get_last_lr() == [job.lr]


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "housing"])
def test_a_job_counts_what_is_correct(name: str) -> None:
    job = jobs.find(name)
    data = job.data(FOLDERS[name])
    assert data.test is not None
    assert job.correct is not None
    x, y = next(iter(DataShard(data.test, rank=0, size=1, batch_size=8)))
    found = job.correct(job.model()(x), y)
    assert found.dtype == torch.bool
    assert found.shape == y.shape


def test_housing_has_no_accuracy() -> None:
    assert jobs.find("housing").correct is None


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_reaches_97_percent_within_its_epochs(seed: int) -> None:
    """The global batch is two workers'."""
    job = jobs.find("digits")
    data = job.data(None)
    assert isinstance(data.test, TensorDataset)
    assert job.correct is not None
    torch.manual_seed(seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters(), job.lr)
    shard = DataShard(data.train, rank=0, size=1, batch_size=2 * job.batch_size, seed=seed)
    while shard.epoch < job.epochs:
        for x, y in shard:
            optimizer.zero_grad()
            torch.autograd.backward(job.loss(model(x), y))
            optimizer.step()
    x, y = data.test.tensors
    assert job.correct(model(x), y).float().mean().item() >= 0.97


def test_the_learning_rate_of_mnist_halves_every_epoch() -> None:
    job = jobs.find("mnist")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    assert job.schedule is not None
    schedule = job.schedule(optimizer, 2)
    seen = []
    for _ in range(14):
        optimizer.step()
        schedule.step()
        seen.append(schedule.get_last_lr()[0])
    assert seen[1::2] == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32, 1 / 32])


def test_no_character_sees_the_ones_after_it() -> None:
    model = jobs.find("chars").model()
    tokens = torch.arange(64).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 40:] = 7
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :40], after[0, :40])
    assert not torch.allclose(before[0, 40:], after[0, 40:])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnist", "job mnist needs --data FOLDER, a folder with train-images-idx3-ubyte"),
        ("mnist_cnn", "job mnist_cnn needs --data FOLDER, a folder with train-images-idx3-ubyte"),
        ("chars", "job chars needs --data PATH, a file or a folder with input.txt"),
        ("housing", "job housing needs --data PATH, a file or a folder with housing.csv"),
        ("a9a", "job a9a needs --data FOLDER, a folder with the files a9a and a9a.t"),
    ],
)
def test_a_job_without_its_data_says_what_it_needs(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jobs.find(name).data(None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnist", "has no train-images-idx3-ubyte.gz"),
        ("chars", "there is no file .*input.txt; --data takes"),
        ("housing", "there is no file .*housing.csv; --data takes"),
        ("a9a", "has no a9a and no a9a.t; expected a9a and a9a.t"),
        ("digits", "comes with its data; leave out --data"),
    ],
)
def test_a_folder_without_the_files_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        jobs.find(name).data(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_other_data_than_a_job_expects_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,median_house_value\n" + "1,2\n" * 9)
    with pytest.raises(ValueError, match="gives 1 features; job housing expects 13"):
        jobs.find("housing").data(table)
    text = tmp_path / "t.txt"
    text.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 300))), encoding="utf-8")
    with pytest.raises(ValueError, match="has 300 different characters; job chars has room for 256"):
        jobs.find("chars").data(text)


def test_your_own_job_by_file_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_job.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert jobs.find(f"{tmp_path}/my_own_job.py:mine").name == "own"
    assert jobs.find("my_own_job.py:mine").name == "own"
    assert jobs.find("my_own_job:mine").name == "own"
    with pytest.raises(ValueError, match=r"my_own_job.py has no 'yours'; its jobs are mine"):
        jobs.find("my_own_job.py:yours")
    with pytest.raises(ValueError, match=r"'number' of my_own_job is a int, not a job; its jobs are mine"):
        jobs.find("my_own_job:number")


def test_for_a_job_that_ships_no_folder_is_looked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for text in (*jobs.names(), "polytempo.jobs.digits:job"):
        jobs.check(text)
        jobs.find(text)
    assert str(tmp_path) not in sys.path


def test_a_file_alone_lists_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "several.py"
    for text, message in (
        ("x = 1", r"several.py has no jobs; write job = pt.Job\(...\) in it, and name it .*several.py:job$"),
        (OWN, r"several.py has one job; name it: .*several.py:mine$"),
        (OWN + "other = make()\n", r"several.py has 2 jobs; name one of them: .*several.py:mine, .*several.py:other$"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            jobs.find(str(file))
    with pytest.raises(ValueError, match=r"there is no file .*nothing.py"):
        jobs.find(str(tmp_path / "nothing.py"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "digit",
            "there is no job 'digit'; there are digits, .*my_module:job, path/to/file.py:job or path/to/job.toml",
        ),
        ("", "there is no job ''"),
        (":job", "there is no job ':job'"),
        ("digits:", "there is no job 'digits:'"),
        ("nowhere.py:job", "there is no file nowhere.py"),
        ("no_such_module_here:job", "there is no module 'no_such_module_here'"),
        ("polytempo.jobs.nothing:job", "there is no module 'polytempo.jobs.nothing'"),
        ("math:pi", "'pi' of math is a float, not a job; it has no jobs; write pi = pt.Job"),
        ("math:job", "math has no 'job'"),
    ],
)
def test_a_job_that_is_not_there_is_answered_with_what_is(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jobs.find(text)


def test_a_module_that_cannot_import_something_says_so_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken_job.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for text in ("my_broken_job:job", "my_broken_job.py:job"):
        with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
            jobs.find(text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def ratio():\n    return 1 / 0\n\nratio()\n",
            r"job \S+bad.py:job: reading its file raised ZeroDivisionError: division by zero\n"
            r"  File \"\S+bad.py\", line 4, in <module>\n    ratio\(\)\n"
            r"  File \"\S+bad.py\", line 2, in ratio\n    return 1 / 0$",
        ),
        ("x = [\n", r"job \S+bad.py:job: \S+bad.py is not Python: '\[' was never closed, line 1: x = \["),
        (
            "import not_there_at_all\n",
            r"raised ModuleNotFoundError: No module named 'not_there_at_all'\n.*\n    import not_",
        ),
    ],
    ids=["raises", "syntax", "import"],
)
def test_a_file_that_cannot_be_read_is_answered_with_its_lines(tmp_path: Path, source: str, message: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(source)
    with pytest.raises(JobFailed, match=message):
        found_job(f"{file}:job")
    with pytest.raises(ValueError, match="there is no job 'digitz'"):
        found_job("digitz")


def test_names_are_known_without_importing_torch() -> None:
    check = "import sys; from polytempo import jobs; jobs.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
