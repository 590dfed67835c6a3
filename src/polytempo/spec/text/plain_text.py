"""Text of a file or of another process as a terminal may show it: control characters are spelled out."""

from __future__ import annotations

import re

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, marks that change the direction of writing, and halves of characters."""


def plain_text(text: str) -> str:
    r"""The same with each such character as Python writes it: `"\x1b[2J"` becomes the text `\x1b[2J`."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)
