"""Calls of a job's functions. An error names the function, its mistake, and the expected value.

a wrong value is returned              ValueError    job own: loss(output, target) returned a tensor of shape (32,); …
it takes other arguments               ValueError    job own: optimizer is called as optimizer(parameters, lr); …
it raised                              JobFailed     job own: loss(output, target) raised KeyError: 'x', and its lines

`ValueError`s of this library's readers of data, and errors that its hooks raise within a model, pass unchanged.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from polytempo.core.errors import JobFailed, PolytempoError
from polytempo.data.source import refuse_several
from polytempo.spec.job import Data, Job
from polytempo.spec.rates.chained import Chained
from polytempo.spec.rates.plateau import Plateau
from polytempo.spec.text.plain_values import written

_OURS = str(Path(__file__).parents[1]) + os.sep
_JOBS = os.path.join(_OURS, "jobs", "")
_CALLERS = (__file__, os.path.join(_OURS, "spec", "objective.py"))
_OTHERS = (str(Path(torch.__file__).parent), os.path.dirname(os.__file__), "<frozen ")
BATCH = "making a batch of its data"
ON_BATCH = "pt.Data(train, test, collate=…) takes the function that makes a batch of a list of samples"
_MOST_FRAMES = 6
"""Frames of the job's own code that a message shows, the innermost ones."""
_MOVED = ("lr", "momentum", "betas")
_MOST_NAMED = 6
"""Parts of a value that a message names."""


def model_of(job: Job) -> nn.Module:
    """The job's model. ValueError where `model()` makes none, or one without parameters that are trained."""
    model = called(job, "model()", job.model)
    if not isinstance(model, nn.Module):
        raise wrong(job, "model()", model, "a torch.nn.Module", job.model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        expected = "a model with parameters that require a gradient, and this one has nothing to train"
        raise wrong(job, "model()", model, expected, job.model)
    return model


def data_of(job: Job, path: str | Path | None) -> Data:
    """The job's data. ValueError where `data(path)` returns something else, or a training set without samples."""
    try:
        data = called(job, "data(path)", job.data, path)
    except JobFailed as error:
        if path is None and "NoneType" in str(error.__cause__):
            reads = f"{who(job)}: data(path) reads a file or folder, and none is given; give --data PATH, or data=PATH"
            raise ValueError(f"{reads} in Python ({_said(error.__cause__)})") from error
        raise
    if not isinstance(data, Data):
        pair = isinstance(data, tuple) and len(data) in (2, 3)
        expected = "pt.Data(train, test)" + ("; write pt.Data(*…) around it" if pair else "")
        raise wrong(job, "data(path)", data, expected, job.data)
    for name, given in (("train", data.train), ("test", data.test)):
        refuse_several(given)
        if given is not None and hasattr(given, "__len__") and len(given) == 0:
            expected = f"at least one sample in {name}" + ("" if name == "train" else ", or test=None")
            raise wrong(job, "data(path)", f"pt.Data whose {name} has no samples", expected, job.data)
        if not (hasattr(given, "__getitem__") or hasattr(given, "__iter__") or (given is None and name == "test")):
            expected = f"a torch Dataset or DataLoader as {name}"
            raise wrong(job, "data(path)", f"pt.Data whose {name} is {described(given)}", expected, job.data)
    _check_more(job, data)
    if data.collate is not None and not callable(data.collate):
        returned = f"pt.Data whose collate is {described(data.collate)}"
        raise wrong(job, "data(path)", returned, "a function of a list of samples, or None", job.data)
    return data


def _check_more(job: Job, data: Data) -> None:
    """ValueError for further test sets without a name of their own, without samples, and without a first test set."""
    if not isinstance(data.more, Mapping) or (data.more and data.test is None):
        returned = f"pt.Data with more={described(data.more)} and test={described(data.test)}"
        raise wrong(job, "data(path)", returned, "a dict of names and test sets, beside a test set", job.data)
    for name, given in data.more.items():
        if not isinstance(name, str) or not name or "/" in name or name in job.metrics:
            raise wrong(job, "data(path)", f"pt.Data with more[{name!r}]", "another name, without /", job.data)
        if not hasattr(given, "__len__") or len(given) == 0:
            returned = f"pt.Data with more[{name!r}] = {described(given)}"
            raise wrong(job, "data(path)", returned, "a torch Dataset with samples", job.data)


def optimizer_of(job: Job, model: nn.Module, lr: float | None = None) -> Optimizer:
    """The job's optimizer of the model's parameters. ValueError where it is none, or one of other parameters."""
    form = "optimizer(parameters, lr)"
    optimizer = called(job, form, job.optimizer, model.parameters(), lr or job.lr)
    if not isinstance(optimizer, Optimizer):
        raise wrong(job, form, optimizer, "a torch.optim.Optimizer", job.optimizer)
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
        expected = "one of the parameters that it is given, and this one has none of them"
        raise wrong(job, form, optimizer, expected, job.optimizer)
    return optimizer


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model's parameters and buffers. Tied parameters stay tied, also where torch makes new ones."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to(device)
    for (first, name), *others in places.values():
        for module, other in others:
            setattr(module, other, getattr(first, name))


def schedule_of(job: Job, optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler | None:
    """The job's schedule, where it has one; a ReduceLROnPlateau as a `Plateau`, a ChainedScheduler as a `Chained`.

    Saved with it, for a resumed run with another one: `recipe`, which is its class where it has no name, `begun`, the
    numbers of the parameter groups before it, and `epoch_steps`. ValueError where the function returns something else.
    """
    if job.schedule is None:
        return None
    assert not isinstance(job.schedule, str)  # it is a `NamedSchedule` then
    form = "schedule(optimizer, steps_per_epoch)"
    begun = moved_numbers(optimizer)
    made = called(job, form, job.schedule, optimizer, steps_per_epoch)
    if not isinstance(made, LRScheduler):
        raise wrong(job, form, made, "a torch.optim.lr_scheduler.LRScheduler", job.schedule)
    schedule: LRScheduler = made
    if isinstance(schedule, ReduceLROnPlateau):
        schedule = Plateau.of(schedule)
    elif type(schedule) is ChainedScheduler:
        schedule = Chained.of(schedule)
    elif not isinstance(getattr(schedule, "last_epoch", None), int):
        returned = f"{_a(schedule)} without last_epoch"
        raise wrong(job, form, returned, "a schedule that counts its steps in last_epoch, as torch's do", job.schedule)
    recipe = getattr(schedule, "recipe", f"{type(schedule).__module__}:{type(schedule).__qualname__}")
    vars(schedule).update(recipe=recipe, begun=begun, epoch_steps=steps_per_epoch)
    return schedule


def moved_numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The numbers of each parameter group that torch's schedules move: learning rate, momentum, betas."""
    return [{key: written(group[key]) for key in _MOVED if key in group} for group in optimizer.param_groups]


def made_schedule(job: Job) -> Callable[[Optimizer, int], LRScheduler] | None:
    """The job's `schedule`, checked whenever it is called."""
    if job.schedule is None:
        return None

    def make(optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
        schedule = schedule_of(job, optimizer, steps_per_epoch)
        assert schedule is not None
        return schedule

    return make


def next_batch(job: Job, batches: Iterator[Any]) -> Any:
    """The next batch, or None at the end; JobFailed where reading or collating the samples raises."""
    try:
        return next(batches, None)
    except Exception as error:
        raise failed(job, BATCH, error, ON_BATCH) from error


def called(job: Job, form: str, function: Callable[..., Any], *given: Any, facts: Callable[[], str] = str) -> Any:
    """`function(*given)`. `form` is the call as a job's author writes it; `facts()` may explain a failure."""
    try:
        return function(*given)
    except Exception as error:
        if isinstance(error, TypeError) and (takes := _other_arguments(function, given)):
            part = form.partition("(")[0]
            text = f"{who(job)}: {part} is called as {form}, and the function{_where(function)} takes {takes}"
            raise ValueError(text) from error
        raise failed(job, form, error, facts()) from error


def failed(job: Job, form: str, error: Exception, facts: str = "") -> Exception:
    """The exception for `error` in the job's `form`: itself, if this library raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, JobFailed) or _raised_by_us(frames[-1].filename, error):
        return error
    return JobFailed(f"{who(job)}: {form} raised {_said(error)}" + (f"; {facts}" if facts else "") + _lines(frames))


def not_read(text: str, error: Exception) -> Exception:
    """The exception for `error` while the job `text` was read: itself, if this library raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    if _raised_by_us(frames[-1].filename, error, jobs=True):
        return error
    if isinstance(error, SyntaxError):
        place = f"line {error.lineno}: {(error.text or '').strip()}"
        return JobFailed(f"job {text}: {error.filename} is not Python: {error.msg}, {place}")
    return JobFailed(f"job {text}: reading its file raised {_said(error)}" + _lines(frames))


def _said(error: BaseException | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _lines(frames: Sequence[traceback.FrameSummary]) -> str:
    """The frames that are the job's own, as Python shows them."""
    own = [frame for frame in frames if not frame.filename.startswith((*_OTHERS, _OURS))]
    shown = (f'\n  File "{at.filename}", line {at.lineno}, in {at.name}\n    {at.line}' for at in own[-_MOST_FRAMES:])
    return "".join(shown)


def wrong(job: Job, form: str, returned: object, expected: str, function: object = None) -> ValueError:
    """The error for a wrong value from the job's `form`. `returned` is the value, or words for it."""
    said = returned if isinstance(returned, str) else described(returned)
    where = "" if function is None else _where(function)
    return ValueError(f"{who(job)}: {form} returned {said}{where}; expected {expected}")


def described(value: Any) -> str:
    """A value in a few words: its parts, with shapes and dtypes.

    >>> described({"input_ids": torch.zeros(4, 7, dtype=torch.int64), "labels": [1, 2]})
    "a dict with 'input_ids': int64 (4, 7), 'labels': a list of 2"
    """
    if value is None or isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        parts = [f"{key!r}: {described(part)}" for key, part in value.items()]
        return f"{_a(value)} with {_listed(parts)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [described(part) for part in value if isinstance(part, Tensor | Mapping)]
        return f"{_a(value)} of {len(value)}" + (f" ({_listed(parts)})" if parts else "")
    return _a(value)


def _listed(parts: list[str]) -> str:
    more = len(parts) - _MOST_NAMED
    return ", ".join(parts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def who(job: Job) -> str:
    """The job's name in messages: its own, or its place."""
    return f"job {job.name if job.name != 'job' else job.origin or 'job'}"


def _where(function: object) -> str:
    """The place of the function, for the job's author."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def _raised_by_us(file: str, error: Exception, *, jobs: bool = False) -> bool:
    """True if this library raised it, or its own code failed, rather than the job's call. `jobs`: in searches."""
    if not file.startswith(_OURS) or file in _CALLERS:
        return False
    return isinstance(error, ValueError | PolytempoError) or jobs or not file.startswith(_JOBS)


def _other_arguments(function: Callable[..., Any], given: Sequence[Any]) -> str:
    """The function's own signature if it does not take the given arguments; else nothing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return ""
    try:
        signature.bind(*given)
    except TypeError:
        return f"{signature}"
    return ""
