"""A run as a value: worked out once, printed, and made again from JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polytempo as pt
from polytempo.core import Strategy
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.start import replica_of

DIGITS = pt.jobs.find("digits")  # lr 0.1, batch size 32, 15 epochs
LOCAL = pt.strategies.local_sgd(period=8)


@pytest.mark.parametrize(
    ("options", "lr", "batch_size", "epochs"),
    [
        (RunOptions(), 0.1, 32, 15),
        (RunOptions(lr=0.5, batch_size=4, epochs=2.5), 0.5, 4, 2.5),
        (RunOptions(steps=7), 0.1, 32, None),
        (RunOptions(steps=7, epochs=2), 0.1, 32, 2),
        (RunOptions(until={"accuracy": 0.9}), 0.1, 32, 150),
        (RunOptions(until={"accuracy": 0.9}, steps=7), 0.1, 32, None),
    ],
)
def test_what_the_options_leave_open_is_the_job_s(
    options: RunOptions, lr: float, batch_size: int, epochs: float | None
) -> None:
    spec = RunSpec.of(DIGITS, LOCAL, 2, options)
    assert (spec.lr, spec.batch_size, spec.epochs, spec.seed) == (lr, batch_size, epochs, 0)


def test_it_prints_as_progress_shows_it() -> None:
    assert str(RunSpec.of(DIGITS, LOCAL, 2, RunOptions())) == f"digits, {LOCAL}, 2 workers"


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(),
        RunOptions(epochs=2, lr=0.5, batch_size=8, seed=3, until={"loss": 0.1}, threads=1, transport="tcp"),
        RunOptions(reshape={1: 3, 2: 1}, restarts=2, timeout_s=5.0),
        RunOptions(out=Path("/runs/mine"), data=Path("/data"), checkpoint_every=5, resume=True),
    ],
)
def test_it_comes_back_from_json(options: RunOptions) -> None:
    spec = RunSpec.of(DIGITS, LOCAL, 2, options)
    again = RunSpec.from_json(spec.to_json(), pt.jobs.find)
    assert str(again) == str(spec)
    assert again.options == options
    assert (again.lr, again.batch_size, again.epochs) == (spec.lr, spec.batch_size, spec.epochs)
    ours, theirs = (torch.nn.utils.parameters_to_vector(replica_of(each)[0].parameters()) for each in (spec, again))
    assert torch.equal(ours, theirs)


def test_folders_travel_by_their_whole_path() -> None:
    again = RunSpec.from_json(RunSpec.of(DIGITS, LOCAL, 2, RunOptions(out=Path("here"))).to_json(), pt.jobs.find)
    assert again.options.out == Path("here").absolute()


def test_a_job_from_a_file_is_found_there(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from polytempo.jobs.digits import job as digits\njob = digits\n")
    spec = RunSpec.of(pt.jobs.find(f"{tmp_path}/own.py:job"), LOCAL, 2, RunOptions())
    assert RunSpec.from_json(spec.to_json(), pt.jobs.find).job.origin == f"{tmp_path}/own.py:job"


def test_a_job_that_only_this_process_knows_cannot_travel() -> None:
    made = pt.Job(model=DIGITS.model, data=DIGITS.data, loss=DIGITS.loss, optimizer=DIGITS.optimizer, name="mine")
    with pytest.raises(
        ValueError, match=r"job mine is made of functions .* write the job into a file, and give pt\.jobs"
    ):
        RunSpec.of(made, LOCAL, 2, RunOptions()).to_json()


def test_a_job_that_was_changed_is_not_taken_for_the_one_that_its_name_finds() -> None:
    changed = replace(DIGITS, model=lambda: torch.nn.Linear(64, 10))
    text = RunSpec.of(changed, LOCAL, 2, RunOptions()).to_json()
    with pytest.raises(
        ValueError, match=r"job digits has another model where the run was begun \(.*<lambda>, line \d+"
    ):
        RunSpec.from_json(text, pt.jobs.find)


def test_numbers_of_a_job_that_was_changed_travel() -> None:
    spec = RunSpec.of(replace(DIGITS, lr=0.7, batch_size=5, epochs=3), LOCAL, 2, RunOptions())
    again = RunSpec.from_json(spec.to_json(), pt.jobs.find)
    assert (again.lr, again.batch_size, again.epochs) == (0.7, 5, 3)
    assert (again.job.lr, again.job.batch_size, again.job.epochs) == (0.7, 5, 3)
    assert replica_of(again)[1].param_groups[0]["lr"] == 0.7


def test_a_strategy_that_its_name_does_not_make_cannot_travel() -> None:
    with pytest.raises(ValueError, match=r"strategy mine cannot be made by its name.*give one of pt\.strategies"):
        RunSpec.of(DIGITS, Strategy("mine"), 2, RunOptions()).to_json()


def test_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="this is not a polytempo-run-spec of version 1"):
        RunSpec.from_json("{}", pt.jobs.find)
