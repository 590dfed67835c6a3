"""`python docs/extensions/check_links.py build/docs`: every link and anchor between the built pages leads somewhere."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """A page's links and anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        """Targets that a browser fetches without a click."""
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
                if name == "src" or tag == "link":
                    self.loads.append(value)
            if value and name == "id":
                self.anchors.add(value)


def broken(folder: Path) -> list[str]:
    """A line for each link that leads nowhere, and for each file that would be loaded from the network."""
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        for link in page.links:
            scheme, host, path, _, anchor = urlsplit(link)
            if (scheme in ("http", "https") or host) and link in page.loads:
                found.append(f"{file.relative_to(folder)}: {link} would be loaded from the network")
            if scheme or host or link == "#":
                continue
            target = (file.parent / unquote(path)).resolve() if path else file
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{file.relative_to(folder)}: {link} does not exist")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                found.append(f"{file.relative_to(folder)}: {link} has no such anchor")
    return found


if __name__ == "__main__":
    lines = broken(Path(sys.argv[1]).resolve())
    print("\n".join(lines) or f"all links within {sys.argv[1]} lead somewhere")
    sys.exit(bool(lines))
