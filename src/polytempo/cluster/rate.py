"""The rate of a link, as a person writes it."""

from __future__ import annotations

import re

_BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def rate_of(text: str) -> float:
    """Bytes a second of "100mbit", "2.5gbit" or "1gbit/s". Raises ValueError for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", text.strip().lower())
    if not found or not float(found[1]):
        raise ValueError(f"{text}: write a speed like 100mbit, 1gbit or 2.5gbit")
    return float(found[1]) * _BITS_PER_S[found[2]] / 8
