"""The table of refusals: each row can be reached, its texts can be filled in, and its error can be copied."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from string import Formatter

import pytest

import polytempo
from polytempo.core.calls.refusals import Incompatible, Refusal, refusal_of, refusals, refuse
from polytempo.spec import run_spec
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

SOURCE = Path(polytempo.__file__).parent
BY_CODE = {row.code: row for row in refusals()}


@pytest.mark.parametrize("row", refusals(), ids=lambda row: row.code)
def test_each_row_is_reached(row: Refusal) -> None:
    """No earlier row has a subset of its features."""
    assert re.fullmatch(r"PT[123]\d{3}", row.code)
    assert refusal_of(row.features) is row


@pytest.mark.parametrize("row", refusals(), ids=lambda row: row.code)
def test_a_refusal_names_its_values(row: Refusal) -> None:
    names = {name for _, name, _, _ in Formatter().parse(f"{row.why}; {row.remedy}") if name}
    values = dict.fromkeys(names, 0.5)
    with pytest.raises(Incompatible) as caught:
        refuse(row.features, **values)
    assert caught.value.code == row.code
    assert "{" not in str(caught.value)
    again = copy.copy(caught.value)
    assert (str(again), again.code) == (str(caught.value), row.code)


def test_features_are_named_where_they_are_found() -> None:
    """A feature that no program adds would make its row dead."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    unknown = {name for row in refusals() for name in row.features if f'"{name}"' not in source}
    assert not unknown, f"no program adds {sorted(unknown)}; CONTRIBUTING.md, Adding a part, says where"


def test_features_that_go_together_are_not_refused() -> None:
    refuse({"elastic", "precision", "own loop"})
    assert refusal_of(frozenset()) is None


def test_a_refusal_of_options_may_name_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run passes all of its options to the texts."""
    passed: dict[str, object] = {}
    monkeypatch.setattr(run_spec, "refuse", lambda features, **values: passed.update(values))
    options = RunOptions(grace_s=7.0)
    RunSpec.of(polytempo.jobs.find("digits"), polytempo.strategies.sync_sgd(), 2, options)
    assert {name: passed[name] for name in vars(options)} == vars(options)
