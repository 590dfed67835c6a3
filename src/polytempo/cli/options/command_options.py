"""`CommandOptions`: options of `train`, `compare` and `simulate` beside `RunOptions`; and files of both. No torch yet.

options.toml        workers = 4                        names with - or _; `--config options.toml`
                    strategy = "local_sgd(period=8)"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic, iglob
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from polytempo.cli.options import values
from polytempo.cli.options.completion import cluster_names, distribution_names, engine_names, job_names, strategy_names
from polytempo.jobs.job_file import is_job_file, read_job_file
from polytempo.spec.run_options import FOLDER, RunOptions
from polytempo.spec.table.option import (
    ONE_STRATEGY,
    PROCESSES,
    TRAIN,
    Count,
    Option,
    OptionRow,
    entries,
    unknown_option,
)

T = TypeVar("T")
MAX_FILE_BYTES = 100_000
_RANGE = re.compile(r"\{\d+\.\.\d+\}")
SIMULATE, COMPARE, SWEEP = ("simulate",), ("compare",), ("sweep",)
RUN, SEARCH, OUTPUT = "Run", "Search", "Output"


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of a command that runs a job, other than the run's."""

    job: Annotated[str | None, Option("", "JOB", read=values.job, complete=job_names)] = None
    """A job that ships (digits, mnist, …), or your own: my_module:job, path/to/file.py:job, job.toml."""
    strategy: Annotated[str, Option(RUN, "S", ONE_STRATEGY, read=values.strategy, complete=strategy_names)] = "sync_sgd"
    """A strategy such as 'local_sgd(period=8)'; `polytempo strategies` lists them. Default: sync_sgd."""
    strategies: Annotated[str | None, Option(RUN, "A,B", COMPARE, read=values.strategies, complete=strategy_names)] = (
        None
    )
    """Strategies, separated by commas. Default: seven common ones."""
    workers: Annotated[int, Meta(ge=1, le=1_000_000), Option(RUN, "N")] = 2
    """Number of workers. Default: 2."""
    engine: Annotated[str, Option(RUN, "E[:ADDRESS]", PROCESSES, complete=engine_names)] = "local"
    """Who starts the workers, and where: local, subprocess, ssh:host1,host2, …. Default: local."""
    available: Annotated[Path | None, Option(RUN, "PROGRAM", TRAIN)] = None
    """A program that prints how many workers there may be now; it is run every 2 s."""
    cluster: Annotated[
        str | None, Option(RUN, "C", (*TRAIN, *SIMULATE, *SWEEP), read=values.cluster, complete=cluster_names)
    ] = None
    """The machines to simulate, such as 'ethernet(gbit_per_s=10)'. With `train`: a file of `calibrate`, to price the
    change that the run's bound names."""
    stragglers: Annotated[
        str | None, Option(RUN, "D", SIMULATE, read=values.distribution, complete=distribution_names)
    ] = None
    """The distribution of computing times, such as 'lognormal(sigma=0.3)'; 'busy': the times that calibrate measured
    beside other programs. Default: the distribution in the cluster's file, or all equal."""
    meta: Annotated[bool, Option(RUN, programs=SIMULATE)] = False
    """Simulate times and bytes only; compute no gradients. Needs --steps."""
    batched: Annotated[bool, Option(RUN, programs=SIMULATE)] = False
    """Compute all workers' gradients in one pass; equal up to rounding."""
    over: Annotated[Sequence[str], Option(SEARCH, "NAME=VALUES", SWEEP)] = ()
    """Try these values: lr=1e-4..1e-1:log, batch_size=16|32|64, strategy=sync_sgd,'local_sgd(period=8)'; again for
    another setting. Names are strategy, workers and options of runs."""
    trials: Annotated[Count | None, Option(SEARCH, "N", SWEEP)] = None
    """Number of trials. Default: 20; all combinations where each setting has a few values."""
    goal: Annotated[str | None, Option(SEARCH, "METRIC", SWEEP)] = None
    """The score to search for: accuracy, loss or one of the job's metrics. Default: accuracy where the job has one."""
    sampler: Annotated[Literal["grid", "random", "tpe"] | None, Option(SEARCH, "S", SWEEP)] = None
    """Choose trials by grid, random or tpe (Optuna). Default: grid for few values, else tpe where it is there."""
    prune: Annotated[bool, Option(SEARCH, programs=SWEEP)] = False
    """End trials that are worse than the median of the trials before them."""
    parallel: Annotated[Count, Option(SEARCH, "K", SWEEP)] = 1
    """Trials at a time, each in a process of its own. Default: 1."""
    force: Annotated[bool, Option(FOLDER)] = False
    """Accept an --out folder that holds other files."""
    ui: Annotated[bool, Option(OUTPUT)] = False
    """Show the run in the browser while it goes on, and print the link. Needs the extra `ui`."""
    json: Annotated[bool, Option(OUTPUT)] = False
    """Print only the result, as JSON."""
    dry_run: Annotated[bool, Option(OUTPUT)] = False
    """Print the settings of the run and exit."""


class GivenOptions(NamedTuple):
    """Options of a command, from the command line and a file together."""

    command: CommandOptions
    run: dict[str, Any]
    """Options of the run by name, each checked; `RunOptions` looks at them together."""


def table() -> dict[str, OptionRow]:
    """All options by name."""
    return entries(CommandOptions) | entries(RunOptions)


def given_options(command_line: Mapping[str, object], config: Path | None = None) -> GivenOptions:
    """Options of the command line that are not None; behind them options of the file `config`, and of a job file.

    ValueError names the option, its place, its value, and the requirement.
    """
    in_file, typed = load_file(config) if config else {}, checked_values(table(), command_line)
    if "data" not in typed:
        _check_data(in_file.get("data"), f"{config}: data = {str(in_file.get('data'))!r}")
    job = typed.get("job", in_file.get("job"))
    in_job = _options(read_job_file(Path(job)).get("run", {}), f"{job}, [run]") if job and is_job_file(job) else {}
    found = in_job | in_file | typed
    ours = {key: value for key, value in found.items() if key in entries(CommandOptions)}
    return GivenOptions(CommandOptions(**ours), {key: value for key, value in found.items() if key not in ours})


def read_options(kind: type[T], command_line: Mapping[str, object]) -> T:
    """A value of `kind`, a table of options, from all options that are not None. ValueError as in `given_options`."""
    return kind(**checked_values(entries(kind), command_line))


def checked_values(rows: Mapping[str, OptionRow], command_line: Mapping[str, object]) -> dict[str, Any]:
    """The options of the command line that are not None, each in its final form."""
    found = {}
    for key, value in command_line.items():
        if value is not None:
            given = url_of(value) or value if isinstance(value, Path) else value
            found[key] = _checked(rows, key, given, _typed(rows[key], value))
            if key == "data":
                _check_data(found[key], _typed(rows[key], value))
    return found


def _typed(row: OptionRow, value: object) -> str:
    """An option as it was typed."""
    given = " ".join(value) if isinstance(value, list) else value
    text = repr(given).removesuffix(".0") if isinstance(given, float) else str(given).strip() or repr(given)
    flag = row.option.flag.partition("/")[0] or f"--{row.name.replace('_', '-')}"
    return f"{flag} {text}" if row.option.section else f"{row.option.value} {text}"


def _check_data(data: object, where: str) -> None:
    if isinstance(data, Path) and not data.exists() and not _names_files(str(data)):
        missing = "no file has such a name" if has_magic(str(data)) else "there is no such file or folder"
        raise ValueError(f"{where}: {missing}")


def _names_files(text: str) -> bool:
    """True for a pattern that a file has, and for ranges such as {000..299}: a reader names a missing file."""
    return _RANGE.search(text) is not None or any(True for _ in iglob(text, recursive=True))


def load_file(path: Path) -> dict[str, Any]:
    """The options in a TOML file, checked. `ValueError` names file, key, value and remedy."""
    if path.suffix != ".toml":
        raise ValueError(f"{path}: options are read from TOML files; {_as_toml(path)}")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: a file of options has at most {MAX_FILE_BYTES:,} bytes")
    try:
        given = msgspec.toml.decode(path.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path}: this is not TOML: {reason}") from None
    return _options(given, str(path))


def _options(given: Mapping[str, object], where: str) -> dict[str, Any]:
    named = {str(key).replace("-", "_"): value for key, value in given.items()}
    return {key: _checked(table(), key, value, f"{where}: {key} = {_shown(value)}") for key, value in named.items()}


def _as_toml(path: Path) -> str:
    """The way from another file to a TOML file."""
    if path.suffix not in (".yaml", ".yml"):
        return "rename it to end in .toml, or write one"
    return (
        f"write {path.with_suffix('.toml')} with `workers = 4` in place of `workers: 4`, texts in quotes "
        '(`strategy = "local_sgd(period=8)"`) and `until = { accuracy = 0.97 }`'
    )


def _checked(rows: Mapping[str, OptionRow], key: str, value: object, where: str) -> object:
    if key not in rows:
        raise ValueError(f"{where}: {unknown_option(key, sorted(rows))}")
    try:
        return rows[key].checked(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def url_of(path: Path) -> str | None:
    """The URL that `path` was before it became a Path, which drops a slash; None where it was none."""
    scheme = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):", path.parts[0]) if path.parts else None
    if scheme is None:
        return None
    rest = "/".join(path.parts[1:])
    return f"file:///{rest}" if scheme[1] == "file" else f"{scheme[1]}://{rest}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
