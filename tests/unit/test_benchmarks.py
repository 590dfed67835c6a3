"""Every name that a benchmark imports of the library is there: benchmarks run by hand, so nothing else would say so."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(FOLDER.rglob("*.py"))


def _is_there(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_what_it_imports_is_there(program: Path) -> None:
    found = [
        (node.module, name.name)
        for node in ast.walk(ast.parse(program.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "polytempo"
        for name in node.names
    ]
    assert [f"{module}: {name}" for module, name in found if not _is_there(module, name)] == []
