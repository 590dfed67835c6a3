"""The page of refusals, from the table that the library reads."""

from __future__ import annotations

from repository_pages import write
from sphinx.application import Sphinx

from polytempo.core.calls.refusals import Refusal, refusals

CHAPTERS = {
    "PT10": "Optimizers",
    "PT11": "Loops of your own",
    "PT12": "Elastic runs",
    "PT13": "Simulations",
    "PT14": "16-bit parameters",
    "PT15": "Noise scale and batches",
    "PT16": "Averages of weights, drift, threads",
    "PT17": "Strategies inside strategies, merges",
    "PT18": "Map and reduce",
    "PT19": "Devices",
    "PT20": "Starts from other runs",
    "PT21": "Compiled models",
    "PT22": "Trackers",
    "PT23": "Callbacks",
    "PT24": "Profiles",
    "PT25": "Rounds of clients",
    "PT26": "Data sources",
    "PT27": "Loops of other libraries",
    "PT28": "Codecs",
    "PT29": "Object stores",
    "PT30": "Files",
}
HEAD = """# Refusals

Look up the code of an error here. Each row is a combination that no run can have; the error says the same, with the
values of your run. In a program catch `ValueError` and read its `code`.
"""


def generate(app: Sphinx) -> None:
    """Write the page, a chapter for each part of a run."""
    chapters = [
        f"## {title}\n\n| code | together | why | instead |\n|---|---|---|---|\n"
        + "\n".join(_line(row) for row in refusals() if row.code.startswith(prefix))
        for prefix, title in CHAPTERS.items()
    ]
    write("generated/refusals", "\n\n".join([HEAD, *chapters]) + "\n")


def _line(row: Refusal) -> str:
    cells = (row.code, " + ".join(sorted(row.features)), row.why, row.remedy)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True}
