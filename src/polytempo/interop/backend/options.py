"""`Options`: what a user may say about a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Options:
    """`dist.init_process_group("polytempo", pg_options=Options(order="tree"))`.

    `order`: how sums are added within a host, see `native.group.Group`.
    """

    order: Literal["linear", "tree"] = "linear"
