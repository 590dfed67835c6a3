"""Errors of msgspec in plain words: `must be a whole number >= 1`."""

from __future__ import annotations

import re
import sys

import msgspec

_WORDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
_WORDS |= {"object": "a table", "array": "a list"}


def requirement(error: msgspec.ValidationError) -> str:
    """What the value must be, and behind " - at " its place."""
    said = str(error).replace("Expected", "must be", 1).replace(" | null", "")
    said = said.replace(f"`float` <= {sys.float_info.max!r}", "a finite number")
    said = said.replace("Number out of range", "must be a finite number")
    return re.sub(r"`(\w+)`", lambda kind: _WORDS.get(kind[1], kind[0]), said)
