"""Pages of the site that live elsewhere in the repository: benchmarks, examples, ARCHITECTURE, CONTRIBUTING, CHANGELOG.

Links are written as paths of files, so that they work in the repository, too: `../benchmarks/attach/README.md`. While
the site is built they are turned into links between its pages. A link to a file that has no page is a warning, but
a link to source becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from sphinx.application import Sphinx
from sphinx.util import logging

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
GENERATED = DOCS / "generated"
DOCUMENTS = {"ARCHITECTURE.md": "architecture", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}
PICTURES = (".png", ".svg")
FENCE = re.compile(r"^(```.*?^```\s*?$)", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")

log = logging.getLogger(__name__)
written: set[Path] = set()
"""The generated pages of this build."""


def pages() -> dict[Path, str]:
    """The site's page of each file of the repository that has one."""
    mirrored = {ROOT / name: f"generated/{page}" for name, page in DOCUMENTS.items()}
    for readme in (ROOT / "benchmarks").rglob("README.md"):
        folder = readme.parent.relative_to(ROOT)
        mirrored[readme] = f"generated/{folder}" if folder.name != "benchmarks" else "generated/benchmarks/index"
    own = {file: str(file.relative_to(DOCS).with_suffix("")) for file in DOCS.rglob("*.md")}
    return own | mirrored | {ROOT / "README.md": "index", ROOT / "examples": "generated/examples"}


def example_title(file: Path) -> str:
    """The heading of an example; its anchor follows from it."""
    return str(file.relative_to(ROOT / "examples"))


def anchor_of(title: str) -> str:
    """The anchor that MyST gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def linked(text: str, origin: Path, page: str) -> str:
    """`text` of the file `origin` with the links that it needs as `page` of the site."""
    known = pages()

    def link(match: re.Match[str]) -> str:
        bang, words, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        file = Path(os.path.normpath(origin.parent / unquote(path)))
        if bang or file.suffix in PICTURES:
            return f"{bang}[{words}]({relative(os.path.relpath(file, DOCS), page)})"
        if file in known:
            return f"[{words}]({relative(known[file] + '.md', page)}{hash_sign}{anchor})"
        if file.suffix == ".py" and file.is_relative_to(ROOT / "examples"):
            return f"[{words}]({relative('generated/examples.md', page)}#{anchor_of(example_title(file))})"
        if not file.exists():
            log.warning("%s links to %s, which does not exist", origin.relative_to(ROOT), target)
        return words

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def relative(target: str, page: str) -> str:
    """`target`, relative to docs/, as a link on `page` writes it."""
    return os.path.relpath(target, PurePosixPath(page).parent)


def write(page: str, text: str) -> None:
    """Write a generated page if it has changed, so that an unchanged page is not read again."""
    file = DOCS / f"{page}.md"
    written.add(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def generate(app: Sphinx) -> None:
    """Write the pages of files outside docs/."""
    for file, page in pages().items():
        if file.is_file() and not file.is_relative_to(DOCS) and file.name != "README.md":
            write(page, linked(file.read_text(encoding="utf-8"), file, page))
        elif file.name == "README.md" and file.parent.is_relative_to(ROOT / "benchmarks"):
            write(page, linked(file.read_text(encoding="utf-8"), file, page) + _contents(file))
    write("generated/examples", _examples())


def remove_stale(app: Sphinx) -> None:
    """Remove generated pages of an earlier build that this one has not written."""
    for file in set(GENERATED.rglob("*.md")) - written:
        file.unlink()


def _contents(readme: Path) -> str:
    """The index of benchmarks lists its pages."""
    if readme.parent.name != "benchmarks":
        return ""
    names = sorted(each.parent.name for each in readme.parent.glob("*/README.md"))
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def _examples() -> str:
    """Every example with its source."""
    folder = ROOT / "examples"
    text = "# Examples\n\nRun one as `python examples/NAME.py`. Its first lines name its subject.\n"
    for file in [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))]:
        code = file.read_text(encoding="utf-8")
        text += f"\n## {example_title(file)}\n\n````python\n{code}````\n"
    return text


def on_source_read(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn paths of files into links between pages."""
    if not page.startswith("generated/"):
        source[0] = linked(source[0], DOCS / f"{page}.md", page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", generate)
    app.connect("builder-inited", remove_stale, priority=900)
    app.connect("source-read", on_source_read)
    return {"parallel_read_safe": True}
