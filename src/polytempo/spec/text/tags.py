"""`Tags`: short words that a run is found by, in the list of runs."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TAG = re.compile(r"[\w.:/+-]{1,40}")
MOST_TAGS = 20


class Tags(tuple[str, ...]):
    """Different tags, in their order."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(self)


def tags_of(given: object) -> Tags:
    """The value of an option `tags`: a text with commas, or several texts. ValueError for other values.

    >>> str(tags_of(["baseline", "paper,baseline"]))
    'baseline,paper'
    """
    if given is None or given == "":
        return Tags()
    several = [given] if isinstance(given, str) else given
    if not isinstance(several, Iterable) or not all(isinstance(each, str) for each in several):
        raise ValueError("must be a list of tags, or a text such as baseline,paper")
    found = [part.strip() for text in several for part in text.split(",")]
    for each in found:
        if _TAG.fullmatch(each) is None:
            raise ValueError(f"{each!r} is not a tag; write up to 40 letters, digits, and any of _ . : / + -")
    if len(kept := Tags(dict.fromkeys(found))) > MOST_TAGS:
        raise ValueError(f"{len(kept)} tags are too many; give at most {MOST_TAGS}")
    return kept
