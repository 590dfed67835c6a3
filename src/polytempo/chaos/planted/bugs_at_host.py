"""Bugs of the pushes that workers of a host make together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from polytempo.server.message import Push, Reply, Request
from polytempo.server.shard import shard
from polytempo.server.shard.deduplication import RequestStatus, status_of_all

Patches = list[tuple[Any, str, Any]]


def rest_of_split_push_admitted() -> Patches:
    """A shard takes the sum of a host although it has one of its parts, or its ticket, already."""

    def wrong(number: int, push: Push, *tables: Any) -> RequestStatus:
        found = status_of_all(number, push, *tables)
        return RequestStatus("new") if found.kind == "split" else found

    return [(shard, "status_of_all", wrong)]


def parts_not_remembered() -> Patches:
    """Of a host's push only the sender's request is noted; another worker's counts as new when it comes by itself."""

    def wrong(request: Request) -> Iterator[Request]:
        yield request

    return [(shard, "requests_in", wrong)]


def tickets_of_parts_not_kept() -> Patches:
    """A shard does not note the tickets of the other workers' gradients in a host's push."""
    right = shard.Shard._push_of_host

    def wrong(self: shard.Shard, push: Push, replies: list[Reply]) -> None:
        right(self, replace(push, parts=tuple(replace(part, tickets=()) for part in push.parts)), replies)

    return [(shard.Shard, "_push_of_host", wrong)]


BUGS = (rest_of_split_push_admitted, parts_not_remembered, tickets_of_parts_not_kept)
