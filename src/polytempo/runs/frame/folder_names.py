"""Names of folders."""

from __future__ import annotations

import re


def slug(text: str) -> str:
    """`text` as part of a file name: `local_sgd(period=8)` is `local_sgd-period-8`."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[:80] or "run"
