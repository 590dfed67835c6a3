"""Planted bugs."""

from __future__ import annotations

from typing import Any

BUGS: dict[str, Any] = {}
