"""`Nodes`: which node of a run does what. Each node is a number and has a mailbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Nodes(NamedTuple):
    """The nodes of a run, by what they do."""

    coordinator: int
    workers: Sequence[int]
    chains: Sequence[Sequence[int]]
    """For each shard the nodes of its copies, the head first."""
    evaluator: int | None = None
