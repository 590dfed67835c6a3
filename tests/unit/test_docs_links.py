"""`make docs` finds links between built pages that lead nowhere."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

broken: Callable[[Path], list[str]] = runpy.run_path(
    str(Path(__file__).parents[2] / "docs/extensions/check_links.py"), run_name="check_links"
)["broken"]


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("other.html", None),
        ("other.html#here", None),
        ("#top", None),
        ("folder/", None),
        ("https://example.org/missing", None),
        ("missing.html", "page.html: missing.html does not exist"),
        ("other.html#there", "page.html: other.html#there has no such anchor"),
        ("#bottom", "page.html: #bottom has no such anchor"),
    ],
)
def test_a_link_is_followed(link: str, found: str | None, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f'<h1 id="top">A</h1><a href="{link}">b</a>', encoding="utf-8")
    (tmp_path / "other.html").write_text('<h1 id="here">B</h1>', encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/index.html").write_text("<h1>C</h1>", encoding="utf-8")
    assert broken(tmp_path) == ([found] if found else [])


@pytest.mark.parametrize("tag", ['<script src="https://cdn.example.org/a.js">', '<img src="//cdn.example.org/a.png">'])
def test_nothing_is_loaded_from_the_network(tag: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(tag, encoding="utf-8")
    assert len(broken(tmp_path)) == 1
