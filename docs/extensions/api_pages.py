"""The reference of the Python interface, from signatures and docstrings: a page for each public module.

Docstrings of this project are plain text with `code` and indented blocks; `restructured` turns them into
reStructuredText.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from itertools import groupby
from types import ModuleType
from typing import Any

from repository_pages import write
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import polytempo

HEADINGS = ("Cost", "Errors", "Memory", "Source", "Raises", "Returns")
CODE = re.compile(r"(``.+?``|`[^`]+`|\*\*[^*]+\*\*)", flags=re.DOTALL)
DRAWN = re.compile(r"[─│┌└├▶◀▼▲]")
GENERATED_DOC = ("Alias for field number", "Return self", "Initialize self", "Create and return a new object")


def generate(app: Sphinx) -> None:
    """Write a page for `polytempo` and one for each public module of it."""
    modules = [name for name in polytempo.__all__ if _has_names(getattr(polytempo, name))]
    names = [name for name in polytempo.__all__ if not isinstance(getattr(polytempo, name), ModuleType)]
    documented: dict[tuple[int, str], str] = {}
    write("generated/api/polytempo", _page(polytempo, names, documented))
    for name in modules:
        module = import_module(f"polytempo.{name}")
        write(f"generated/api/{name}", _page(module, sorted(module.__all__, key=str.lower), documented))
    listed = "\n".join(["polytempo", *modules])
    rows = "\n".join(
        f"| [polytempo.{name}]({name}.md) | {_summary(import_module(f'polytempo.{name}'))} |" for name in modules
    )
    write(
        "generated/api/index",
        "# Python interface\n\nMade from the signatures and docstrings of the public names.\n\n"
        f"| module | content |\n|---|---|\n| [polytempo](polytempo.md) | {_summary(polytempo)} |\n{rows}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n",
    )


def _has_names(value: Any) -> bool:
    return isinstance(value, ModuleType) and hasattr(value, "__all__")


def _summary(module: ModuleType) -> str:
    """The first sentence of a module's docstring."""
    return (module.__doc__ or "").strip().splitlines()[0]


def _page(module: ModuleType, names: list[str], documented: dict[tuple[int, str], str]) -> str:
    """The page of `module` with `names`; names of another page are links."""
    here, elsewhere = [], []
    for name in names:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            continue
        key = (id(value), "" if inspect.isclass(value) or inspect.isroutine(value) else name)
        if key in documented:
            elsewhere.append(documented[key])
        else:
            documented[key] = f"{module.__name__}.{name}"
            here.append(_entry(module.__name__, name, value))
    also = ", ".join(f"{{py:obj}}`{name}`" for name in elsewhere)
    body = "\n".join(here)
    said = "\n".join(restructured(inspect.getdoc(module).splitlines() if module.__doc__ else []))
    return (
        f"# {module.__name__}\n\n````{{eval-rst}}\n{said}\n````\n\n"
        + (f"Also here: {also}.\n\n" if also else "")
        + f"````{{eval-rst}}\n.. py:module:: {module.__name__}\n\n{body}\n````\n"
    )


def _entry(module: str, name: str, value: Any) -> str:
    """The directive that documents one name."""
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        members = "" if value is polytempo.RunOptions else "   :members:\n"  # its fields have the page of options
        return f".. {kind}:: {module}.{name}\n{members}"
    if inspect.isroutine(value):
        return f".. autofunction:: {module}.{name}\n"
    said = "\n".join(f"   {line}" for line in restructured(_comment_of(name, value)))
    return f".. py:data:: {module}.{name}\n   :no-index-entry:\n\n{said}\n"


def _comment_of(name: str, value: Any) -> list[str]:
    """The string below the assignment of a constant or a type."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith("polytempo") and vars(module).get(name) is value:
            analyzer = ModuleAnalyzer.for_module(module_name)
            analyzer.analyze()
            if ("", name) in analyzer.attr_docs:
                return list(analyzer.attr_docs["", name])
    return []


def restructured(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText: code as literals, indented blocks as they are, everything else as plain text."""
    out: list[str] = []
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            out += [*_paragraph(block), ""]
            block = []
    return out


def _paragraph(block: list[str]) -> list[str]:
    """One paragraph: its indented lines are code, unless they belong to a list item; so are drawings and calls."""
    out: list[str] = []
    if DRAWN.search("\n".join(block)) or (block[0].endswith("(") and block[-1].strip() == ")"):
        return ["::", "", *(f"    {line}" for line in block)]
    for indented, lines in groupby(block, lambda line: line.startswith("    ") and not _in_list(block)):
        text = list(lines)
        out += ["", "::", "", *text, ""] if indented else _escaped("\n".join(text)).splitlines()
    return out


def _in_list(block: list[str]) -> bool:
    return any(line.lstrip().startswith("- ") for line in block)


def _escaped(text: str) -> str:
    """Plain text and `code` as reStructuredText."""
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        if i % 2 and part.startswith("`"):
            parts[i] = f"``{part.strip('`').strip()}``\\ "
        elif not i % 2:
            parts[i] = re.sub(r"([\\*_|`])", r"\\\1", part).replace("::", "\\:\\:")
    text = "".join(parts)
    text = re.sub(r"^(\w{1,3}[.)] )", r"\\\1", text, flags=re.MULTILINE)
    return re.sub(rf"^({'|'.join(HEADINGS)}): ", r"**\1.** ", text)


def on_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring into reStructuredText."""
    lines[:] = restructured(lines)


def skipped(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out docstrings that Python generates."""
    return True if (inspect.getdoc(obj) or "").startswith(GENERATED_DOC) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("autodoc-skip-member", skipped)
    return {"parallel_read_safe": True}
