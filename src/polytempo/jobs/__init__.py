"""The jobs that ship, and `find`: a job by its name or its module, as one writes it on the command line.

Torch is imported when a job is found, not when this module is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from polytempo.jobs.job_file import is_job_file, job_from_file, read_job_file

if TYPE_CHECKING:
    from polytempo.spec.job import Job

SHIPPED = {
    "digits": "polytempo.jobs.digits:job",
    "mnist": "polytempo.jobs.mnist:job",
    "mnist_cnn": "polytempo.jobs.mnist:cnn",
    "chars": "polytempo.jobs.chars:job",
    "housing": "polytempo.jobs.housing:job",
    "a9a": "polytempo.jobs.a9a:job",
}
_OURS = frozenset(place.partition(":")[0] for place in SHIPPED.values())
FORMS = "my_module:job, path/to/file.py:job or path/to/job.toml"

__all__ = ["check", "find", "names"]


def names() -> list[str]:
    """The names of the jobs that ship."""
    return list(SHIPPED)


def find(text: str) -> Job:
    """The job that `text` means: a name of `names()`, `my_module:job`, `path/to/file.py:job` or a `job.toml`.

    Modules of one's own are looked for in the current directory too. Raises ValueError, listing the jobs that exist.
    """
    if is_job_file(text):
        return job_from_file(Path(text))
    where, name = _place(text)
    if not name:
        raise ValueError(_choice(text))
    if where.endswith(".py"):
        found = _job_of(_from_file(Path(where)), name, where)
        return replace(found, origin=f"{Path(where).resolve()}:{name}")
    return replace(_job_of(_from_module(where, text), name, where), origin=text)


def check(text: str) -> None:
    """ValueError for a job, file or module that does not exist, without an import: `find` would refuse it, too."""
    if is_job_file(text):
        read_job_file(Path(text))
        return
    where, _ = _place(text)
    if where.endswith(".py"):
        _check_file(Path(where))
        return
    _look_for(where)
    top = where.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise _no_module(text, top)


def _place(text: str) -> tuple[str, str]:
    """A module or file, and the job's name in it: "" for a file that is written without one."""
    where, colon, name = SHIPPED.get(text, text).rpartition(":")
    if not colon and text.endswith(".py"):
        return text, ""
    if not (colon and where and name):
        raise ValueError(f"there is no job {text!r}; there are {', '.join(SHIPPED)}, and your own as {FORMS}")
    return where, name


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"there is no file {path} (looked in {Path.cwd()}); a job is written {FORMS}")


def _no_module(text: str, name: str) -> ValueError:
    return ValueError(
        f"job {text!r}: there is no module {name!r} (looked in {Path.cwd()} and the installed packages); "
        f"there are {', '.join(SHIPPED)}, and your own as {FORMS}"
    )


def _choice(file: str) -> str:
    """The argument of the command line for each job of a file."""
    have = _jobs_in(_from_file(Path(file)))
    if not have:
        return f"{file} has no jobs; write job = pt.Job(...) in it, and name it {file}:job"
    if len(have) == 1:
        return f"{file} has one job; name it: {file}:{have[0]}"
    return f"{file} has {len(have)} jobs; name one of them: " + ", ".join(f"{file}:{each}" for each in have)


def _from_file(path: Path) -> ModuleType:
    _check_file(path)
    _look_in(path.resolve().parent)
    name = f"polytempo_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and worker processes look a module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_module(name: str, text: str) -> ModuleType:
    _look_for(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, but a module that it imports is not
        raise _no_module(text, error.name) from error


def _look_for(module: str) -> None:
    """Let a module of one's own be found in the current directory. For a job that ships, no file there is imported."""
    if module not in _OURS:
        _look_in(Path.cwd())


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _jobs_in(module: ModuleType) -> list[str]:
    from polytempo.spec.job import Job  # here, because it imports torch, which `names()` must not

    return [key for key, value in vars(module).items() if isinstance(value, Job)]


def _job_of(module: ModuleType, name: str, where: str) -> Job:
    from polytempo.spec.job import Job  # here, because it imports torch, which `names()` must not

    found = getattr(module, name, None)
    if isinstance(found, Job):
        return found
    have = _jobs_in(module)
    wrong = (
        f"{name!r} of {where} is a {type(found).__name__}, not a job"
        if found is not None
        else f"{where} has no {name!r}"
    )
    there = f"its jobs are {', '.join(have)}" if have else f"it has no jobs; write {name} = pt.Job(...) in it"
    raise ValueError(f"{wrong}; {there}")


def folder_of(given: str | Path | None, job: str, expected: str) -> Path:
    """The folder given as `--data`. Raises ValueError, naming the expected files."""
    if given is None:
        raise ValueError(f"job {job} needs --data FOLDER, a folder with {expected}")
    given = _local(given, job)
    if not given.is_dir():
        raise ValueError(f"job {job}: --data {given} is not a folder; expected one with {expected}")
    return given


def _local(given: str | Path, job: str) -> Path:
    if isinstance(given, str):
        raise ValueError(f"job {job}: --data {given} is a URL; copy the data here, and name the copy")
    return given


def file_of(given: str | Path | None, job: str, name: str) -> Path:
    """The file given as `--data`, or the file `name` in that folder. Raises ValueError where there is none."""
    if given is None:
        raise ValueError(f"job {job} needs --data PATH, a file or a folder with {name}")
    given = _local(given, job)
    path = given / name if given.is_dir() else given
    if not path.is_file():
        raise ValueError(f"job {job}: there is no file {path}; --data takes a file or a folder with {name}")
    return path
