"""`Options`: a user's options of a process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Options:
    """`dist.init_process_group("polytempo", pg_options=Options(order="tree"))`.

    `order`: how sums are added within a host, see `native.group.Group`.
    """

    order: Literal["linear", "tree"] = "linear"
    while_connecting: Callable[[], object] | None = None
    """A function that is called again and again while hosts connect to each other; an error that it raises ends the
    wait. None: it lasts until all have come, or the group's timeout."""
