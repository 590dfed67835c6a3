"""`Listeners`: what the engine and the record learn of a coordinator's decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from polytempo.server.record import Entry


class Listeners(NamedTuple):
    """The functions that a coordinator calls when something happens."""

    on_row: Callable[[bytes], None] = lambda row: None
    """Takes each row of metrics (JSON) that a worker or the evaluator sends."""
    on_event: Callable[[tuple[str, int]], None] = lambda event: None
    """Takes ("lost", worker), ("joined", worker), ("promoted", shard), ("shortened", shard), ("deposed", node),
    ("copied", shard), ("saved", shard), ("reshaped", layout), and ("silent", node) before a node is given up: its
    process must not go on."""
    on_entry: Callable[[Entry], None] = lambda entry: None
    """Takes, in their order, calls for work, losses, saves, an early end, and what shards noted: nothing else decides
    what the coordinator deals and says."""
