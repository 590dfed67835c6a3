"""The types of the options as keywords, written from the table: `python tests/option_keywords.py`, as `make fmt` does.

mypy and editors read types from source, so the keywords of `run(…, epochs=3)` are written out.
"""

from __future__ import annotations

import ast
from inspect import get_annotations
from pathlib import Path

from polytempo.spec.run_options import RunOptions
from polytempo.spec.table import option_keywords
from polytempo.spec.table.option import entries

FILE = Path(option_keywords.__file__)
BEGIN = '''"""`OptionKeywords`: options as keywords. `make fmt` writes this file from the table `RunOptions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from polytempo.spec.batch_growth import BatchGrowth
from polytempo.spec.precision import Precision
from polytempo.spec.rates.schedules import NamedSchedule
from polytempo.spec.text.profiled_steps import ProfiledSteps

if TYPE_CHECKING:
    from polytempo.core.system.url_path import Place  # imports torch, which the command line reads options without


class OptionKeywords(TypedDict, total=False):
    """Options by name, as `run`, `compare`, `simulate` and `Trainer` take them; `RunOptions` describes them."""

'''
PLAIN = {"Positive": "float", "Count": "int", "NumThreads": "int", "Annotated[float, Meta(gt=0, lt=1)]": "float"}
PLAIN |= {"ScoreInterval": "int"}


def written() -> str:
    """The file's text."""
    return BEGIN + "".join(
        f"    {name}: {_kind(name, str(text))}\n" for name, text in get_annotations(RunOptions).items()
    )


def _kind(name: str, annotation: str) -> str:
    """A field's type without its bounds, or text where the option is read from text."""
    found = ast.parse(annotation, mode="eval").body
    assert isinstance(found, ast.Subscript)
    assert isinstance(found.slice, ast.Tuple)
    kind = ast.unparse(found.slice.elts[0]).replace("'", '"')
    for bounded, plain in PLAIN.items():
        kind = kind.replace(bounded, plain)
    assert "Annotated" not in kind, f"{name}: give PLAIN of tests/option_keywords.py a line for {kind}"
    if entries(RunOptions)[name].option.read is None or "str" in kind.split(" | "):
        return kind
    return f"{kind.removesuffix(' | None')} | str" + " | None" * kind.endswith(" | None")


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
