"""Tests that a change reaches, the nearest first: `python tests/reached.py` prints their files, for `make check`.

`python tests/reached.py PATH …` prints the files that a change of these paths would reach; after `--later` come the
files of long tests, which are left out unless it is they that changed or failed.

A test file is reached by a changed file that its imports lead to. A name imported from a package leads to the module
that defines it, not to all that the package exports; `import polytempo as pt` leads to the names used: `pt.run`. A
path or a module's name in a string leads there, too. Tests that failed last come first.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "src", ROOT / "tests", ROOT)
"""The folders that dotted names are looked for in, as Python does for the tests."""

STARTED = {"tests/warm.py": ["src/polytempo/__main__.py"], "src/polytempo/__main__.py": ["src/polytempo/cli/main.py"]}
"""Programs that are started, not imported."""


def changed(since: str = "origin/main") -> list[str]:
    """Paths that differ from where this branch left `since`, committed or not. Without such a branch: from HEAD."""
    base = git("merge-base", since, "HEAD") or ["HEAD"]
    return sorted({*git("diff", "--name-only", base[0]), *git("ls-files", "--others", "--exclude-standard")})


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")[:-1]


def failed_last() -> list[str]:
    """Files with tests that failed in the last run."""
    path = ROOT / ".pytest_cache/v/cache/lastfailed"
    return sorted({name.split("::")[0] for name in json.loads(path.read_text())}) if path.exists() else []


def reached(paths: Iterable[str]) -> dict[str, int]:
    """Test files, each with the number of imports from it to the nearest of `paths`; the nearest and quickest first."""
    users = _users()
    distances = dict.fromkeys(paths, 0)
    queue = list(distances)
    for path in queue:
        for user in users.get(path, set()) | _mentions(path):
            if user not in distances:
                distances[user] = distances[path] + 1
                queue.append(user)
    found = sorted(filter(_is_test, distances), key=lambda path: (distances[path], _FOLDERS.index(_folder(path)), path))
    return {path: distances[path] for path in found}


def _folder(path: str) -> str:
    folder = path.split("/")[1]
    return folder if folder in _FOLDERS else ""


@cache
def _users() -> dict[str, set[str]]:
    """The files that use a file in one step."""
    users: dict[str, set[str]] = {}
    for path in _sources():
        for used in (*_used(path), *STARTED.get(path, [])):
            users.setdefault(used, set()).add(path)
    return users


def _is_test(path: str) -> bool:
    name = Path(path)
    outside = ("tests/engines/", "tests/integrations/", "tests/device/")
    return name.match("tests/**/test_*.py") and not path.startswith(outside) and (ROOT / path).exists()


@cache
def _sources() -> Sequence[str]:
    found = [*ROOT.glob("src/polytempo/**/*.py"), *ROOT.glob("tests/**/*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


MOST = 80
"""Most files named: to import more takes longer than `make check` has."""


_FOLDERS = ("", "unit", "laws", "virtual", "native", "agreement", "commands", "process")
"""Folders of tests, the quickest first: the order of tests that are equally near."""


class Facts(NamedTuple):
    """Facts read from a file: names that imports bind, uses of names with and without attributes, and strings."""

    bound: dict[str, tuple[str, str]]
    attributes: dict[str, set[str]]
    whole: set[str]
    strings: set[str]


@cache
def _facts(path: str) -> Facts:
    """One walk over the file. The inner part of `a.b.c` is met after the whole of it."""
    facts, inner = Facts({}, defaultdict(set), set(), set()), set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            names: list[str] = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute) and id(value) not in inner:
                inner.add(id(value))
                names, value = [value.attr, *names], value.value
            if isinstance(value, ast.Name):
                inner.add(id(value))
                facts.attributes[value.id].add(".".join(names))
        elif isinstance(node, ast.Name):
            if id(node) not in inner:
                facts.whole.add(node.id)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                facts.strings.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            facts.bound.update((each.asname or each.name, (node.module, each.name)) for each in node.names)
        elif isinstance(node, ast.Import):
            facts.bound.update((each.asname or each.name, (each.name, "")) for each in node.names)
    return facts


def _mentions(path: str) -> set[str]:
    """Tests that open a file, or its folder, by its path, if it is not a module of the library."""
    if path.startswith("src/polytempo/") and path.endswith(".py"):
        return set()
    folder, _, name = path.rpartition("/")
    wanted = {path, name, f"{folder}/", folder.split("/")[0]} - {"", "/", "tests", "src"}
    return {user for user in _sources() if user.startswith("tests/") and wanted & _facts(user).strings}


@cache
def _path(module: str) -> str | None:
    """The file of a module of this repository."""
    for folder in SOURCES:
        start = folder / module.replace(".", "/")
        for path in (start.with_suffix(".py"), start / "__init__.py"):
            if path.exists():
                return str(path.relative_to(ROOT))
    return None


def _is_package(module: str) -> bool:
    return (_path(module) or "").endswith("/__init__.py")


def _used(path: str) -> Iterator[str]:
    """The files that a file's imports lead to in one step."""
    facts = _facts(path)
    for bound, (module, name) in facts.bound.items():
        target = f"{module}.{name}" if name and _path(f"{module}.{name}") else module
        if _is_package(target) and (not name or target != module):
            if not path.endswith("/__init__.py"):
                for attribute in facts.attributes[bound]:
                    yield from _defined(target, attribute)
                if bound in facts.whole:
                    yield from _everything(target)
        elif name:
            yield from _defined(module, name)
        elif found := _path(target):
            yield found
    yield from (found for text in facts.strings if text.startswith("polytempo.") and (found := _path(text)))
    if path.startswith("tests/"):
        yield from {"tests/conftest.py", f"{Path(path).parent}/conftest.py"}


def _defined(module: str, dotted: str) -> Iterator[str]:
    """The files that define `dotted` of `module`, through packages that only hand it on."""
    name, _, rest = dotted.partition(".")
    path = _path(module)
    if path is None:
        return
    if not _is_package(module):
        yield path
    elif _facts(path).bound.get(name, (module, name)) != (module, name):
        yield path
        inner, its_name = _facts(path).bound[name]
        yield from _defined(inner, f"{its_name}.{rest}" if rest else its_name)
    elif _path(f"{module}.{name}"):
        yield from _defined(f"{module}.{name}", rest) if rest else _everything(f"{module}.{name}")
    else:
        yield from _everything(module)


def _everything(module: str) -> Iterator[str]:
    """A module, and of a package all that it exports."""
    path = _path(module)
    if path is None:
        return
    yield path
    if _is_package(module) and module != "polytempo":
        for inner, name in _facts(path).bound.values():
            yield from _defined(inner, name) if name else _everything(inner)


def main(arguments: Sequence[str]) -> None:
    """Print the files, and how many there are more."""
    at = arguments.index("--later") if "--later" in arguments else len(arguments)
    paths, later = list(arguments[:at]) or changed(), arguments[at + 1 :]
    distances = dict.fromkeys(filter(_is_test, failed_last()), 0) | reached(paths)
    files = [path for path, distance in distances.items() if distance == 0 or path not in later]
    print(*files[:MOST], sep="\n")
    more = f"the {MOST} nearest of {len(files)}" if len(files) > MOST else len(files)
    print(f"{len(paths)} changed files reach {more} test files", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
