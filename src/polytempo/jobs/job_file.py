"""`job.toml`: a job in a file, which names its parts.

    model = { call = "torchvision.models:resnet18", num_classes = 5 }
    data = { call = "images", path = "flowers", size = 64 }
    loss = "cross_entropy"
    optimizer = { call = "SGD", momentum = 0.9 }
    schedule = { call = "CosineAnnealingLR", T_max = "run" }
    correct = "most_likely"
    lr = 0.05
    batch_size = 32
    epochs = 10

    [run]  # options of `polytempo train`, which the command line overrides
    workers = 4
    strategy = "local_sgd(period=8)"

A name is `module:object`, looked up beside the file first, or a plain name of the home that the part has (`HOMES`). A
table with `call` gives that object keyword arguments; tables with `call` among these are called, too. Nothing else in
the file is run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from polytempo.spec.rates.schedules import FileSchedule

if TYPE_CHECKING:
    from polytempo.spec.job import Data, Job

HOMES = {
    "model": "polytempo.jobs.models",
    "data": "polytempo.data",
    "loss": "torch.nn.functional",
    "optimizer": "torch.optim",
    "schedule": "polytempo.spec.rates.schedules",
    "correct": "polytempo.spec.job",
    "predictions": "",
    "weight": "",
}
"""The module of plain names, for each part of a job; "": a part has none."""
NEEDED = ("model", "data", "loss", "optimizer")
NUMBERS = {"name": str, "lr": float, "batch_size": int, "epochs": float}
RUN = "run"
MAX_BYTES = 1 << 20


def is_job_file(text: str) -> bool:
    """True for the name of a job file."""
    return text.endswith(".toml")


def read_job_file(path: Path) -> dict[str, Any]:
    """The entries of the file. ValueError for another file, an entry that no job has, and a missing part."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; `polytempo init` writes one")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: a job file has at most {MAX_BYTES:,} bytes")
    try:
        found: dict[str, Any] = msgspec.toml.decode(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: this is not TOML: {str(error) or type(error).__name__}") from None
    known = [*HOMES, *NUMBERS, "metrics", RUN]
    for key in found.keys() - set(known):
        near = get_close_matches(key, known, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{path}: a job has no {key!r}{meant}; it has {', '.join(known)}")
    if missing := [key for key in NEEDED if key not in found]:
        raise ValueError(f"{path}: {', '.join(missing)} is missing; a job needs {', '.join(NEEDED)}")
    for key, kind in NUMBERS.items():
        if key in found:
            try:
                found[key] = msgspec.convert(found[key], kind)
            except msgspec.ValidationError as error:
                raise ValueError(f"{path}: {key} = {found[key]!r}: {error}") from None
    return found


def job_from_file(path: Path) -> Job:
    """The job of the file; torch and the modules that it names are imported."""
    from polytempo.spec.job import Job  # imports torch, which naming a job must not

    path = path.resolve()
    entries = read_job_file(path)
    parts = _Parts(path)
    made: dict[str, Any] = {key: entries[key] for key in NUMBERS if key in entries}
    made |= {
        "model": parts.function("model", entries["model"]),
        "data": parts.reader(entries["data"]),
        "loss": parts.loss(entries["loss"]),
        "optimizer": _with_rate(parts.function("optimizer", entries["optimizer"])),
    }
    for key in ("correct", "predictions", "weight"):
        if key in entries:
            made[key] = parts.function(key, entries[key])
    if "schedule" in entries:
        made["schedule"] = parts.schedule(entries["schedule"])
    if "metrics" in entries:
        made["metrics"] = {
            name: parts.value(given) if isinstance(given, dict) else parts.named("metrics", given)
            for name, given in entries["metrics"].items()
        }
    return Job(**{"name": path.stem} | made, origin=str(path))


class _Parts:
    """The objects that a job file names."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))

    def named(self, part: str, text: object) -> Any:
        """The object of a name."""
        if not isinstance(text, str) or not text:
            raise ValueError(f"{self._path}: {part} = {text!r}; write a name, or {{ call = NAME, … }}")
        module, colon, name = text.rpartition(":")
        module = module if colon else HOMES.get(part, "")
        if not module:
            raise ValueError(f"{self._path}: {part} = {text!r}; write module:object")
        try:
            found = importlib.import_module(module)
            for attribute in name.split("."):
                found = getattr(found, attribute)
        except ModuleNotFoundError as error:
            raise ValueError(f"{self._path}: {part} = {text!r}: there is no module {error.name!r}") from error
        except AttributeError:
            near = get_close_matches(name, dir(found), 3) or [
                each for each in dir(found) if name.lower() in each.lower()
            ]
            meant = f" (did you mean {', '.join(near[:3])}?)" if near else ""
            raise ValueError(f"{self._path}: {part} = {text!r}: {module} has no {name!r}{meant}") from None
        return found

    def function(self, part: str, given: object) -> Callable[..., Any]:
        """A function, with its keyword arguments."""
        if not isinstance(given, dict):
            return self._callable(part, given)
        name, arguments = self._call(part, given)
        function = self._callable(part, name)
        return _Call(function, arguments, self.value) if arguments else function

    def loss(self, given: object) -> Callable[..., Any]:
        """A function, or an instance of a class such as nn.CrossEntropyLoss."""
        name, arguments = self._call("loss", given) if isinstance(given, dict) else (given, {})
        found = self._callable("loss", name)
        if isinstance(found, type):
            made: Callable[..., Any] = found(**{key: self.value(value) for key, value in arguments.items()})
            return made
        return partial(found, **arguments) if arguments else found

    def reader(self, given: object) -> Callable[[str | Path | None], Data]:
        """A function of the path of --data, or of the file's own `path`, which is relative to the file."""
        name, arguments = self._call("data", given) if isinstance(given, dict) else (given, {})
        read, own = self._callable("data", name), self._beside(arguments.pop("path", None))
        test = self._beside(arguments.pop("test_path", None))

        def data(path: str | Path | None) -> Data:
            kept = {key: self.value(value) for key, value in arguments.items()}
            chosen = own if path is None else path
            answer = read(**kept) if chosen is None else read(chosen, **kept)
            return _as_data(answer if test is None else (answer, read(test, **kept)))

        def unseen(path: str | Path, trained_on: str | Path | None) -> Data:
            like = own if trained_on is None else trained_on
            if like is None or _whole(path) == _whole(like):
                return data(path)
            return _as_data(read(path, like=like, **{key: self.value(value) for key, value in arguments.items()}))

        if test is None and "like" in signature(read).parameters:
            data.unseen = unseen  # type: ignore[attr-defined]
        return data

    def _beside(self, path: object) -> Any:
        """A path, or a list of paths, that is relative to the file; URLs as they are."""
        if isinstance(path, list):
            return [self._beside(each) for each in path]
        return path if path is None or "://" in str(path) else self._path.parent / str(path)

    def schedule(self, given: object) -> FileSchedule:
        """A function of the optimizer and the steps of an epoch; "3 epochs" and "run" among its arguments are steps.
        Its `schedulers` are schedules, too."""
        name, arguments = self._call("schedule", given) if isinstance(given, dict) else (given, {})
        listed = arguments.pop("schedulers", None) if isinstance(arguments.get("schedulers"), list) else None
        parts = {} if listed is None else {"schedulers": [self.schedule(each) for each in listed]}
        make = self._callable("schedule", name)
        return FileSchedule(make, lambda: self.value(arguments) | parts, f"{self._path}: schedule")

    def value(self, given: object) -> Any:
        """A value of the file, with tables of calls called."""
        if isinstance(given, list):
            return [self.value(each) for each in given]
        if isinstance(given, dict):
            if "call" in given:
                name, arguments = self._call("call", given)
                return self._callable("call", name)(**{key: self.value(each) for key, each in arguments.items()})
            return {key: self.value(each) for key, each in given.items()}
        return given

    def _callable(self, part: str, name: object) -> Callable[..., Any]:
        found: Callable[..., Any] = self.named(part, name)
        if not callable(found):
            raise ValueError(f"{self._path}: {part} = {name!r} is a {type(found).__name__}; name a function or a class")
        return found

    def _call(self, part: str, given: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        if "call" not in given:
            raise ValueError(
                f"{self._path}: {part} is a table without `call`; write {{ call = NAME, argument = value }}"
            )
        return given["call"], {key: value for key, value in given.items() if key != "call"}


class _Call:
    """A function with the keyword arguments of a file, which are made in each call."""

    def __init__(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], value: Callable[[object], Any]
    ) -> None:
        self._function, self._arguments, self._value = function, arguments, value

    def __call__(self, *given: Any, **more: Any) -> Any:
        kept = {key: self._value(value) for key, value in self._arguments.items()}
        return self._function(*given, **kept | more)


def _whole(path: str | Path) -> str:
    """A URL as it is, and the whole name of a file."""
    return str(path) if "://" in str(path) else str(Path(path).resolve())


def _as_data(answer: Any) -> Data:
    from polytempo.spec.job import Data  # imports torch

    if isinstance(answer, Data):
        return answer
    return Data(*answer) if isinstance(answer, tuple) else Data(answer)


def _with_rate(make: Callable[..., Any]) -> Callable[..., Any]:
    """torch's optimizers take the learning rate by its name."""

    def optimizer(parameters: Any, lr: float) -> Any:
        return make(parameters, lr=lr)

    return optimizer
