"""The error of a mistake in a job names its function, before a worker starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.core.errors import JobFailed
from polytempo.runs.frame import rehearsal
from polytempo.runs.frame.rehearsal import Rehearsed, _rehearsed, rehearse
from polytempo.spec.objective import loss_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

CLASSES, FEATURES = 3, 4


def samples(count: int = 16) -> TensorDataset:
    return TensorDataset(torch.randn(count, FEATURES), torch.arange(count) % CLASSES)


def most_likely(output: Any, target: Any) -> Any:
    return output.argmax(1) == target


JOB = pt.Job(
    name="own",
    model=lambda: nn.Linear(FEATURES, CLASSES),
    data=lambda path: pt.Data(samples(), samples(4)),
    loss=functional.cross_entropy,
    optimizer=lambda parameters, lr: SGD(parameters, lr),
    correct=most_likely,
    batch_size=8,
)


def rehearsed(job: pt.Job, strategy: Any = None, **options: Any) -> None:
    """The objects made before the workers start, in this process."""
    _rehearsed([RunSpec.of(job, strategy or pt.strategies.sync_sgd(), 1, RunOptions(**options))])


def raises(*_: Any) -> Any:
    raise KeyError("pixels")


def indirect(output: Any, target: Any) -> Any:
    return raises(output, target)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES + 1, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.first(x)


class Ragged(torch.utils.data.Dataset[Any]):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index + 1), 0


def test_a_job_without_a_mistake_passes() -> None:
    rehearsed(JOB)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "loss is a vector": (
        {"loss": lambda output, target: functional.cross_entropy(output, target, reduction="none")},
        r"job own: loss\(output, target\) returned a tensor of shape \(8,\) \(test_job_mistakes.py, line \d+\); "
        r"expected the mean loss, a tensor of one element; take its mean",
    ),
    "loss is a number": (
        {"loss": lambda output, target: functional.cross_entropy(output, target).item()},
        r"job own: loss\(output, target\) returned \d\.\d+ .*; expected the mean loss, a tensor of one element",
    ),
    "loss is nothing": ({"loss": lambda output, target: None}, r"loss\(output, target\) returned None"),
    "loss without a gradient": (
        {"loss": lambda output, target: functional.cross_entropy(output, target).detach()},
        r"loss\(output, target\) returned a tensor without a gradient .*leave out \.item\(\), \.detach\(\)",
    ),
    "loss of three arguments": (
        {"loss": lambda model, output, target: output.sum()},
        r"job own: loss is called as loss\(output, target\), and the function .* takes \(model, output, target\)",
    ),
    "model is a list": (
        {"model": lambda: [nn.Linear(1, 1)]},
        r"job own: model\(\) returned a list of 1 .*; expected a torch.nn.Module",
    ),
    "model has no parameters": (
        {"model": nn.ReLU},
        r"model\(\) returned a ReLU; expected a model with parameters that",
    ),
    "model takes an argument": (
        {"model": lambda width: nn.Linear(width, 1)},
        r"job own: model is called as model\(\), and the function .* takes \(width\)",
    ),
    "data is nothing": ({"data": lambda path: None}, r"data\(path\) returned None .*; expected pt.Data\(train, test\)"),
    "data is a pair": (
        {"data": lambda path: (samples(), samples())},
        r"data\(path\) returned a tuple of 2 .*; expected pt.Data\(train, test\); write pt.Data\(\*…\) around it",
    ),
    "data takes no argument": (
        {"data": lambda: pt.Data(samples())},
        r"data is called as data\(path\), and the function .* takes \(\)",
    ),
    "no training data": (
        {"data": lambda path: pt.Data(None)},
        r"data\(path\) returned pt.Data whose train is None .*; expected a torch Dataset or DataLoader as train",
    ),
    "training data without samples": (
        {"data": lambda path: pt.Data(samples(0))},
        r"returned pt.Data whose train has no samples .*; expected at least one sample in train",
    ),
    "test data without samples": (
        {"data": lambda path: pt.Data(samples(), samples(0))},
        r"returned pt.Data whose test has no samples .*; expected at least one sample in test, or test=None",
    ),
    "collate is no function": (
        {"data": lambda path: pt.Data(samples(), None, "pad")},
        r"returned pt.Data whose collate is a str .*; expected a function of a list of samples, or None",
    ),
    "optimizer takes one argument": (
        {"optimizer": lambda parameters: SGD(parameters, 0.1)},
        r"optimizer is called as optimizer\(parameters, lr\), and the function .* takes \(parameters\)",
    ),
    "optimizer is nothing": (
        {"optimizer": lambda parameters, lr: None},
        r"optimizer\(parameters, lr\) returned None .*; expected a torch.optim.Optimizer",
    ),
    "optimizer of another model": (
        {"optimizer": lambda parameters, lr: SGD(nn.Linear(1, 1).parameters(), lr)},
        r"returned a SGD .*; expected one of the parameters that it is given",
    ),
    "schedule is nothing": (
        {"schedule": lambda optimizer, steps: None},
        r"schedule\(optimizer, steps_per_epoch\) returned None .*; expected a torch.optim.lr_scheduler.LRScheduler",
    ),
    "schedule takes one argument": (
        {"schedule": lambda optimizer: None},
        r"schedule is called as schedule\(optimizer, steps_per_epoch\), and the function .* takes \(optimizer\)",
    ),
    "correct is a number": (
        {"correct": lambda output, target: 0.9},
        r"correct\(output, target\) returned 0.9 .*; expected a tensor with a boolean, or a number from 0 to 1",
    ),
    "correct is a sum": (
        {"correct": lambda output, target: (output.argmax(1) == target).sum()},
        r"correct\(output, target\) returned int64 \(\) for 4 samples, a sum or a mean .*; expected a tensor",
    ),
    "correct is a mean": (
        {"correct": lambda output, target: (output.argmax(1) == target).float().mean()},
        r"correct\(output, target\) returned float32 \(\) for 4 samples, a sum or a mean",
    ),
    "correct is a mean of the batch": (
        {"correct": pt.of_batch(lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float().mean())},
        r"correct\(model, batch\) returned float32 \(\) for 4 samples, a sum or a mean",
    ),
    "correct is percent": (
        {"correct": lambda output, target: 100.0 * (output.argmax(1) == output.argmax(1))},
        r"returned float32 \(4,\) for 4 samples, with numbers from 100 to 100 .*; expected .* from 0 to 1",
    ),
    "correct is not a number": (
        {"correct": lambda output, target: target / 0.0 * 0.0},
        r"returned float32 \(4,\) for 4 samples, with numbers from nan to nan",
    ),
    "correct compares each with each": (
        {"correct": lambda output, target: output.argmax(1, keepdim=True) == target},
        r"returned bool \(4, 4\) for 4 samples, each output beside each target",
    ),
    "batches are no pairs": (
        {"data": lambda path: pt.Data(TensorDataset(torch.zeros(8, FEATURES)))},
        r"job own: loss\(output, target\) needs batches that are pairs \(input, target\), but this one is a list of 1",
    ),
}
RAISED: dict[str, tuple[dict[str, Any], str]] = {
    "loss raises": (
        {"loss": indirect},
        r"^job own: loss\(output, target\) raised KeyError: 'pixels'; output is float32 \(8, 3\), "
        r"target is int64 \(8,\)\n"
        r"  File \".*test_job_mistakes.py\", line \d+, in indirect\n    return raises\(output, target\)\n"
        r"  File \".*test_job_mistakes.py\", line \d+, in raises\n    raise KeyError\(\"pixels\"\)$",
    ),
    "shapes do not match": (
        {"model": lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Flatten(0))},
        r"^job own: loss\(output, target\) raised \w+Error: .*; output is float32 \(24,\), target is int64 \(8,\)$",
    ),
    "model does not fit the data": (
        {"model": lambda: nn.Linear(FEATURES + 1, CLASSES)},
        r"^job own: model\(input\) raised RuntimeError: mat1 and mat2 .*; input is float32 \(8, 4\)$",
    ),
    "forward fails": (
        {"model": Broken},
        r"^job own: model\(input\) raised RuntimeError: .*; input is float32 \(8, 4\)\n"
        r"  File \".*test_job_mistakes.py\", line \d+, in forward\n    return self.first\(x\)$",
    ),
    "ragged samples": (
        {"data": lambda path: pt.Data(Ragged())},
        r"^job own: making a batch of its data raised RuntimeError: stack expects .*; pt.Data\(train, test, "
        r"collate=…\) takes the function that makes a batch of a list of samples$",
    ),
    "collate raises": (
        {"data": lambda path: pt.Data(samples(), None, raises)},
        r"^job own: making a batch of its data raised KeyError: 'pixels'; .*\n  File .*, in raises\n.*$",
    ),
    "data raises": ({"data": raises}, r"^job own: data\(path\) raised KeyError: 'pixels'\n  File .*, in raises\n.*$"),
    "correct raises": (
        {"correct": raises},
        r"^job own: correct\(output, target\) raised KeyError: 'pixels'; output is .*, target is .*\n  File .*\n.*$",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_the_function_what_it_returned_and_what_is_expected(name: str) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message) as raised:
        rehearsed(replace(JOB, **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_in_a_job_keeps_the_lines_of_the_job_alone(name: str) -> None:
    changes, message = RAISED[name]
    with pytest.raises(JobFailed, match=message):
        rehearsed(replace(JOB, **changes))


@pytest.mark.parametrize("name", [*MISTAKES, *RAISED])
@pytest.mark.parametrize(
    "strategy", [pt.strategies.sync_sgd(), pt.strategies.ssp()], ids=lambda s: s.name.split("(")[0]
)
def test_a_simulation_says_the_same(strategy: Any, name: str) -> None:
    changes, message = {**MISTAKES, **RAISED}[name]
    shapes = re.sub(r"\\\(8|\\\(24", r"\\(\\d+", message)
    with pytest.raises((ValueError, JobFailed), match=shapes):
        pt.simulate(replace(JOB, **changes), strategy, 2, steps=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear(1, 1)}, r"model is a Linear that is made already.*write model=lambda: Linear\(…\)"),
        ({"data": pt.Data(samples())}, r"data is a Data; expected a function, called as data\(path\)"),
        ({"optimizer": "sgd"}, r"optimizer is sgd; expected a function, called as optimizer\(parameters, lr\)"),
        ({"loss": None}, r"loss is None; expected a function, called as loss\(output, target\)"),
        ({"lr": 0}, r"lr is 0; expected a number above 0"),
        ({"batch_size": "32"}, r"batch_size is '32'; expected a whole number above 0"),
        ({"batch_size": 32.5}, r"batch_size is 32\.5; expected a whole number above 0"),
        ({"epochs": -1}, r"epochs is -1; expected a number above 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_function_is_refused_where_the_job_is_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"job own: {message}"):
        replace(JOB, **changes)


@pytest.mark.parametrize("read", [torch.load, lambda path: path / "x.pt", open], ids=["load", "join", "open"])
def test_a_forgotten_path_is_named(read: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"job own: data\(path\) reads a file or folder, and none is given; .*--data"):
        pt.simulate(replace(JOB, data=read), pt.strategies.sync_sgd(), 2, steps=1)


def test_a_strategy_that_does_not_fit_the_optimizer_is_refused() -> None:
    job = replace(JOB, optimizer=lambda parameters, lr: SGD(parameters, lr, momentum=0.9))
    with pytest.raises(ValueError, match="applies momentum"):
        rehearsed(job, pt.strategies.dgc())


def test_every_strategy_of_a_job_is_rehearsed_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with one strategy says nothing about the second one of a later `compare`."""
    job, tried = replace(JOB), []

    def tries(specs: Sequence[RunSpec], *, here: bool) -> Rehearsed:
        tried.append([str(spec.strategy) for spec in specs])
        return Rehearsed(8, 0, ())

    def rehearses(strategies: Sequence[Strategy], options: RunOptions) -> None:
        rehearse([RunSpec.of(job, strategy, 2, options) for strategy in strategies])

    monkeypatch.setattr(rehearsal, "_tried", tries)
    fits, other = pt.strategies.sync_sgd(), pt.strategies.dgc()
    for strategies in ([fits], [fits], [fits, other], [other, fits]):
        rehearses(strategies, RunOptions())
    rehearses([fits], RunOptions(lr=0.5))
    assert tried == [[str(fits)], [str(other)], [str(fits)]]


def test_a_goal_that_the_job_does_not_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="until needs a test set"):
        rehearsed(replace(JOB, data=lambda path: pt.Data(samples())), until={"loss": 0.1})
    with pytest.raises(ValueError, match="needs a job with an accuracy"):
        rehearsed(replace(JOB, correct=None), until={"accuracy": 0.9})


def test_what_this_library_raises_in_a_job_stays_as_it_is() -> None:
    """A reader's message names the remedy already; an exception of a hook is none of the job's."""
    with pytest.raises(ValueError, match=r"^job mnist_cnn needs --data FOLDER"):
        rehearsed(pt.jobs.find("mnist_cnn"))


def test_a_loss_is_only_looked_at_where_a_gradient_is_wanted() -> None:
    model, batch = JOB.model(), (torch.zeros(8, FEATURES), torch.zeros(8, dtype=torch.int64))
    with torch.no_grad():
        assert not loss_of(JOB, model, batch).requires_grad


def test_a_job_of_a_file_is_named_by_it() -> None:
    job = replace(JOB, name="job", origin="jobs.py:mine", loss=lambda output, target: None)
    with pytest.raises(ValueError, match=r"^job jobs.py:mine: loss\(output, target\) returned None"):
        rehearsed(job)


def make_raising(kind: type[Exception]) -> Callable[..., Any]:
    def loss(output: Any, target: Any) -> Any:
        raise kind

    return loss


@pytest.mark.parametrize("kind", [AssertionError, StopIteration, NotImplementedError])
def test_an_exception_that_says_nothing_is_named_by_its_kind(kind: type[Exception]) -> None:
    with pytest.raises(JobFailed, match=rf"raised {kind.__name__}; output is"):
        rehearsed(replace(JOB, loss=make_raising(kind)))
