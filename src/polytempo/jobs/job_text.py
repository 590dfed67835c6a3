"""`JobParts`: the parts of a job by name, written as `job.toml` or `job.py`.

SGD(momentum=0.9)     ─▶  optimizer = { call = "SGD", momentum = 0.9 }
                      └▶  optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from polytempo.jobs.job_file import HOMES
from polytempo.spec.text.call import Call, parse_call

_IN_MODULE = re.compile(r"\s*([A-Za-z_][\w.]*):(.*)", re.DOTALL)
_IMPORTED = {"loss": "nn.functional", "optimizer": "torch.optim", "data": "pt.data"}
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class PartCall(NamedTuple):
    """A name, plain or `module:object`, and its keyword arguments."""

    name: str
    arguments: dict[str, Any] = {}  # noqa: RUF012 - no caller changes it

    @property
    def text(self) -> str:
        """The call as the command line takes it."""
        return _called(self.name, self.arguments) if self.arguments else self.name


class JobParts(NamedTuple):
    """The parts of a job."""

    model: PartCall
    data: PartCall
    """The first argument is the path."""
    test: str | None
    """The path of samples to measure with, where the data's reader sets none aside."""
    loss: PartCall
    optimizer: PartCall
    schedule: PartCall
    metrics: Mapping[str, PartCall]
    has_classes: bool
    """True if the target has classes."""
    numbers: Mapping[str, float]
    """lr, batch_size, epochs."""
    run: Mapping[str, Any]
    """Options of `polytempo train`."""


def part_call(text: str) -> PartCall:
    """`module:object(argument=value)`, or a plain name in its place. ValueError for another text."""
    found = _IN_MODULE.fullmatch(text)
    call = parse_call(found[2] if found else text)
    if call.positional:
        raise ValueError(f"{text}: name each argument, as in {call.name}(name=value)")
    for key, value in call.keywords.items():
        if isinstance(value, Call) or value is None:
            raise ValueError(f"{text}: {key} is a number, true, false or a text here; write others into the file")
    arguments = {key: str(value) if isinstance(value, str) else value for key, value in call.keywords.items()}
    return PartCall(f"{found[1]}:{call.name}" if found else call.name, arguments)


# ---------------------------------------------------------------------- job.toml


def toml_text(parts: JobParts, name: str) -> str:
    """The job as a job file of this name."""
    path, *rest = parts.data.arguments.items()
    data = PartCall(parts.data.name, dict([path, *([] if parts.test is None else [("test_path", parts.test)]), *rest]))
    ends = "; change its epochs with those below" if "epoch" in str(parts.schedule.arguments) else ""
    lines = [
        f"# A job of Polytempo: polytempo train {name}",
        '# A name is module:object, such as "torchvision.models:resnet18", or one of the modules in the comments.',
        "",
        f"model = {_table(parts.model)}  # {HOMES['model']}",
        f"data = {_table(data)}  # {HOMES['data']}",
        f"loss = {_table(parts.loss)}  # {HOMES['loss']}",
        f"optimizer = {_table(parts.optimizer)}  # {HOMES['optimizer']}",
        f"schedule = {_table(parts.schedule)}  # torch.optim.lr_scheduler{ends}",
        *(['correct = "most_likely"'] if parts.has_classes else []),
        *(f"metrics.{key} = {_table(call)}" for key, call in parts.metrics.items()),
        *(f"{key} = {_toml(value)}" for key, value in parts.numbers.items()),
        "",
        "[run]  # options of `polytempo train`; the command line overrides them",
        *(f"{key} = {_toml(value)}" for key, value in parts.run.items()),
    ]
    return "\n".join(lines) + "\n"


def _table(call: PartCall) -> str:
    return _toml({"call": call.name, **call.arguments} if call.arguments else call.name)


def _toml(value: Any) -> str:
    """A value of TOML, in one line."""
    if isinstance(value, Mapping):
        entries = (f"{key if _BARE.fullmatch(key) else _toml(key)} = {_toml(each)}" for key, each in value.items())
        return f"{{ {', '.join(entries)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------- job.py


def python_text(parts: JobParts, name: str) -> str:
    """The job as a Python file of this name, with the job `job` in it."""
    imports = {"import torch", "from torch import nn", "import polytempo as pt"}

    def named(part: str, call: PartCall) -> str:
        module, _, found = call.name.rpartition(":")
        if not module and part in _IMPORTED:
            return f"{_IMPORTED[part]}.{found}"
        imports.add(f"from {module or HOMES[part]} import {found.partition('.')[0]}")
        return found

    def value(part: str, call: PartCall) -> str:
        """A function, with its arguments bound, or an object of a class."""
        found = named(part, call)
        if found.rpartition(".")[2][:1].isupper():
            return _called(found, call.arguments)
        if not call.arguments:
            return found
        imports.add("from functools import partial")
        return _called("partial", call.arguments, found)

    def place(path: str) -> str:
        if "://" in path:
            return repr(path)
        imports.add("from pathlib import Path")
        return f"Path(__file__).parent / {path!r}"

    (_, path), *rest = parts.data.arguments.items()
    read = named("data", parts.data)
    splits = parts.data.name in ("csv_classes", "csv_regression", "images")
    sets = [f"path or {place(path)}", *([] if parts.test is None else [place(parts.test)])]
    data = ", ".join(_called(read, dict(rest), each) for each in sets)
    optimizer = _called(named("optimizer", parts.optimizer), parts.optimizer.arguments, "parameters", "lr=lr")
    metrics = [f"{key!r}: {value('metrics', call)}" for key, call in parts.metrics.items()]
    lines = [
        f"model=lambda: {_called(named('model', parts.model), parts.model.arguments)}",
        f"data=lambda path: pt.Data({'*' * splits}{data})",
        f"loss={value('loss', parts.loss)}",
        f"optimizer=lambda parameters, lr: {optimizer}",
        f"schedule={parts.schedule.text!r}",
        *(["correct=lambda output, target: output.argmax(-1) == target"] if parts.has_classes else []),
        *([f"metrics={{{', '.join(metrics)}}}"] if metrics else []),
        *(f"{key}={number!r}" for key, number in parts.numbers.items()),
    ]
    head = "\n".join(sorted(imports, key=lambda line: ("polytempo" in line, line.startswith("from"), line)))
    body = "\n".join(f"    {line}," for line in lines)
    return f'"""A job of Polytempo: polytempo train {name}:job"""\n\n{head}\n\njob = pt.Job(\n{body}\n)\n'


def _called(made: str, arguments: Mapping[str, Any], *before: str) -> str:
    return f"{made}({', '.join([*before, *(f'{key}={value!r}' for key, value in arguments.items())])})"
