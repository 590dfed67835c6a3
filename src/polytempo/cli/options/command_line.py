"""The command line of the table of options, and its help in sections."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from polytempo.cli.options.command_options import OUTPUT, RUN, table
from polytempo.spec.options import FOLDER, LENGTH, PROCESS, TRAINING

F = TypeVar("F", bound=Callable[..., None])
_SECTIONS = ("", RUN, LENGTH, TRAINING, PROCESS, FOLDER, OUTPUT)
_CONFIG = "A TOML file with these options; the command line overrides it."


def takes_options(program: str) -> Callable[[F], F]:
    """Give a function `(context, config, **given)` a parameter for each option that `program` has in the table."""
    rows = [row for row in table().values() if program in row.option.programs]
    rows.sort(key=lambda row: _SECTIONS.index(row.option.section))
    hints: dict[str, Any] = {row.name: Annotated[row.plain_kind | None, shared(row.name)] for row in rows}
    hints["config"] = Annotated[Path | None, typer.Option(metavar="FILE", help=_CONFIG, rich_help_panel=OUTPUT)]

    def declared(function: F) -> F:
        given = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint, default=None) for name, hint in hints.items()]
        context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        function.__signature__ = Signature([context, *given])  # type: ignore[attr-defined]
        function.__annotations__ = {"context": typer.Context, **hints}
        return function

    return declared


def shared(name: str) -> Any:
    """An option of the table as typer declares it. None means not given."""
    option, about = table()[name].option, table()[name].help
    settings: dict[str, Any] = {"help": about, "autocompletion": option.complete, "metavar": option.value or None}
    if not option.section:
        return typer.Argument(**settings)
    return typer.Option(option.flag or f"--{name.replace('_', '-')}", rich_help_panel=option.section, **settings)


class SectionedCommand(TyperCommand):
    """A command whose options are under headings."""

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
