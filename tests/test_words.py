"""Prose that a reader need not turn around: no folder's count of riddles grows (words.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from words import RIDDLES, allowed, counts, prose, riddles_of


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Set the members."""', []),
        ('"""Of the members."""', ["first word"]),
        ('"""Say what is to be said."""', ["what"]),
        ('def f():\n    """Send.\n\n    Is this what it sends? No.\n    """', []),
        ("x = 1  # the rank whose\n# turn it is", ["whose"]),
        ('raise ValueError(f"{rank} is one of those "\n    f"that wait at " "once")', ["those that", "at once"]),
        ('raise ValueError("`what` has a value")', []),
        ("name = 'what it is'", []),
        ('x = b"what is sent in the end"', []),
        ('"""Ranks which send to a rank which waits."""', ["two clauses"]),
    ],
)
def test_riddles_are_found_in_docstrings_comments_and_messages(source: str, found: list[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [riddle.name for text in prose(path) for _, _, riddle in riddles_of(text)] == found


def test_code_of_a_page_is_not_read_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("Text.\n\n```python\nwhat = 1\n```\n\n    what is it\n\n`what` [x](what.md)\n\nAll besides this.\n")
    assert [(line, riddle.name) for text in prose(path) for line, _, riddle in riddles_of(text)] == [(11, "besides")]


def test_every_riddle_has_a_remedy_and_a_name_of_its_own() -> None:
    assert len({riddle.name for riddle in RIDDLES}) == len(RIDDLES)
    assert all(riddle.remedy for riddle in RIDDLES)


def test_no_folder_has_more_riddles_than_its_entry() -> None:
    most = allowed()
    grown = {folder: each.found for folder, each in counts().items() if len(each.found) > most.get(folder, 0)}
    lines = [
        f"{folder}: {len(found)} riddles, {most.get(folder, 0)} allowed; mend some of these:\n  "
        + "\n  ".join(map(str, found))
        for folder, found in grown.items()
    ]
    assert not grown, "\n".join(lines)
