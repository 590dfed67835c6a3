"""Tags of a run: from its start, or as the page has changed them, in `tags.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from polytempo.core.system import files
from polytempo.core.system.files import EVENTS
from polytempo.core.system.url_path import Place
from polytempo.report.status.rows import first_rows, last_rows
from polytempo.report.status.stream import ends_of
from polytempo.spec.text.tags import Tags, tags_of

TAGS = "tags.json"
_MOST_BYTES = 1 << 14


def tags_in(folder: Place, settings: Mapping[str, str]) -> list[str]:
    """The tags in the run's file; without a readable file the tags in its settings at the start. Empty for a text that
    is not a tag."""
    kept = [settings.get("tags", "")]
    if isinstance(folder, Path):  # at a URL no page changes tags
        with suppress(ValueError, OSError, RecursionError):
            kept = msgspec.json.decode(files.read(folder / TAGS, _MOST_BYTES), type=list[str])
    try:
        return list(tags_of([each for each in kept if each]))
    except ValueError:
        return []


def settings_at_start(folder: Place) -> dict[str, str]:
    """The settings at the run's last start, with the tags of the last start that gave some; {} before there is one."""
    start, _ = ends_of(folder)
    if start is None:
        return {}
    told = [row.get("settings") for rows in (first_rows, last_rows) for row in rows(folder, EVENTS)]
    given = [each["tags"] for each in told if isinstance(each, dict) and isinstance(each.get("tags"), str)]
    return {"tags": next(filter(None, reversed(given)), "")} | start.settings


def change_tags(folder: Path, add: Sequence[str], remove: Sequence[str]) -> None:
    """Give a run tags, and take some from it. ValueError for a text that is not a tag."""
    present = tags_in(folder, settings_at_start(folder))
    kept = tags_of([*(each for each in present if each not in remove), *add] or None)
    files.replace(folder / TAGS, msgspec.json.encode(list(Tags(kept))))
