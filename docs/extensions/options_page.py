"""The reference of the options of a run, from their table."""

from __future__ import annotations

from repository_pages import write
from sphinx.application import Sphinx

from polytempo.cli.options.command_options import table
from polytempo.spec.table.option import OptionRow
from polytempo.spec.table.option_keywords import OptionKeywords

BEGIN = """# Options of a run

Made from their table. Each has one name: `batch_size=64` in `pt.run`, `pt.simulate`, `pt.compare` and `pt.Trainer`,
or in `pt.RunOptions`; `--batch-size 64` on the command line; `batch_size = 64` in a TOML file (`--config
options.toml`), and the command line overrides it. One file may serve all commands: each takes its options.

```toml
job = "digits"
strategy = "local_sgd(period=8)"
workers = 4
batch_size = 64
until = { accuracy = 0.97 }
```
"""


def generate(app: Sphinx) -> None:
    """Write the page."""
    sections: dict[str, list[str]] = {}
    for row in table().values():
        sections.setdefault(row.option.section or "Run", []).append(_record(row))
    head = "| option | value | default | commands | effect |\n|---|---|---|---|---|\n"
    tables = "".join(f"\n## {name}\n\n{head}{''.join(rows)}" for name, rows in sections.items())
    write("generated/options", BEGIN + tables)


def _record(row: OptionRow) -> str:
    keyword = OptionKeywords.__annotations__.get(row.name)
    kind = row.plain_kind.__name__ if keyword is None else keyword.__forward_arg__
    where = ", ".join(row.option.programs) or "Python and files"
    cells = [f"`{row.name}`", f"`{kind}`", f"`{row.default!r}`", where, f"{row.help} {row.more}".strip()]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True}
