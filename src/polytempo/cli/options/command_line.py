"""Commands from tables of options, and their help in sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from polytempo.cli.options.command_options import OUTPUT, RUN, SEARCH, read_options, table
from polytempo.cli.options.failure import exit_code
from polytempo.spec.run_options import FOLDER, LENGTH, PROCESS, TRAINING
from polytempo.spec.table.option import OptionRow, entries

T = TypeVar("T")
_SECTIONS = ("", RUN, SEARCH, LENGTH, TRAINING, PROCESS, FOLDER, OUTPUT)
_CONFIG = "A TOML file with these options; the command line overrides it."


def takes(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command of a function of one value of `kind`, a table of options: its rows are the parameters."""

    def declared(function: Callable[[T], None]) -> Callable[..., None]:
        return _command(function, entries(kind).values(), lambda given: function(read_options(kind, given)))

    return declared


def takes_run_options(
    programs: str, request: Callable[[Mapping[str, object], Path | None], T]
) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command of a function of a request, with the options that one of `programs` has in the table of runs."""
    rows = [row for row in table().values() if not set(programs.split()).isdisjoint(row.option.programs)]
    rows.sort(key=lambda row: _SECTIONS.index(row.option.section))
    hint = Annotated[Path | None, typer.Option(metavar="FILE", help=_CONFIG, rich_help_panel=OUTPUT)]
    config = Parameter("config", Parameter.KEYWORD_ONLY, annotation=hint, default=None)

    def declared(function: Callable[[T], None]) -> Callable[..., None]:
        return _command(function, rows, lambda given: function(request(given, given.pop("config"))), config)

    return declared


def _command(
    function: Callable[[T], None],
    rows: Iterable[OptionRow],
    call: Callable[[dict[str, Any]], None],
    *more: Parameter,
) -> Callable[..., None]:
    """A function with these parameters, as typer reads them; errors in it become exit codes."""

    @wraps(function)
    def command(**given: object) -> None:
        with exit_code():
            call(given)

    parameters = [*map(_parameter, rows), *more]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(row: OptionRow) -> Parameter:
    """An option as typer declares it. None means not given."""
    option, kind, needed = row.option, row.plain_kind, row.default is MISSING
    settings: dict[str, Any] = {"help": row.help, "autocompletion": option.complete, "metavar": option.value or None}
    if option.section:
        flag = option.flag or f"--{row.name.replace('_', '-')}"
        declared = typer.Option(flag, rich_help_panel=option.section, **settings)
    else:
        declared = typer.Argument(**settings)
    hint: Any = kind if needed else kind | None
    default = Parameter.empty if needed else None
    return Parameter(row.name, Parameter.KEYWORD_ONLY, annotation=Annotated[hint, declared], default=default)


class SectionedCommand(TyperCommand):
    """A command with its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, and a section for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            heading = "Arguments" if each.param_type_name == "argument" else getattr(each, "rich_help_panel", None)
            if (record := each.get_help_record(ctx)) is not None:
                sections.setdefault(heading or "Options", []).append(record)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
