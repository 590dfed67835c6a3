"""The reference of the command line, from the program itself."""

from __future__ import annotations

from typing import Any

import typer
from repository_pages import write
from sphinx.application import Sphinx

from polytempo.cli.main import app as program

BEGIN = """# Command line

Made from the program: `polytempo COMMAND --help` says the same. Strategies, codecs, clusters and stragglers are written
as calls, `gossip(graph=exponential, period=2)`, and parsed as such; nothing is evaluated. All options of a command may
come from a file, `--config options.toml`. `--json` prints one JSON value on standard output and nothing else; progress
goes to standard error. The exit code is 0 for success, 1 for a run that failed, and 2 for a mistake in the command.
"""


def generate(app: Sphinx) -> None:
    """Write the page."""
    root = typer.main.get_command(program)
    context = root.context_class(root, info_name="polytempo")
    write("generated/command-line", BEGIN + "".join(_commands(root, context, level=2)))


def _commands(group: Any, context: Any, level: int) -> list[str]:
    """The sections of a group's commands."""
    sections = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = command.context_class(command, info_name=name, parent=context)
        sections.append(_section(command, inner, level))
        if hasattr(command, "list_commands"):
            sections += _commands(command, inner, level + 1)
    return sections


def _section(command: Any, context: Any, level: int) -> str:
    """Heading, usage, description, and a table of options."""
    path = context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    text = f"\n{'#' * level} {path}\n\n```text\n{usage}\n```\n\n{(command.help or '').strip()}\n"
    records = [record for each in command.params if (record := _record(each, context))]
    if records:
        text += "\n| option | effect |\n|---|---|\n" + "".join(f"| {a} | {b} |\n" for a, b in records)
    return text


def _record(parameter: Any, context: Any) -> tuple[str, str] | None:
    """Spelling and help of an option; None without help."""
    if "--help" in parameter.opts:
        return None
    record = parameter.get_help_record(context)
    name, said = record if record else (parameter.human_readable_name, getattr(parameter, "help", None) or "")
    return f"`{name}`".replace("|", "\\|"), " ".join(said.split()).replace("|", "\\|")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True}
