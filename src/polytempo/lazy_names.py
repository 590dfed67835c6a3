"""Public names of a package that load when they are first used: `import polytempo` alone does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package, from lines `from module import name as name` of its stub.

    The stub is `__init__.pyi` beside `file`, the package's `__file__`; type checkers read the same lines.
    """
    lines = [line.split() for line in Path(f"{file}i").read_text(encoding="utf-8").splitlines()]
    homes = {line[3]: line[1] for line in lines if line[:1] == ["from"]}

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes[name]), name)

    return found, sorted(homes)
