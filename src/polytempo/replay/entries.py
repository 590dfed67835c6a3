"""Entries of a record and the messages that they stand for: keys, words, differences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from msgspec.structs import asdict, replace

from polytempo.server.message import COORDINATOR, Ask, Message, Noted, Push, PushPart, Request
from polytempo.server.record import (
    Asking,
    Elapsing,
    Enrolling,
    Entry,
    HostPushEntry,
    Inquiring,
    Lost,
    Noting,
    PullEntry,
    PushEntry,
    Saving,
    Stopping,
)
from polytempo.server.step_rates import common
from polytempo.server.worker.host.lent_gradients import add_all_
from polytempo.server.worker.next_push import mean_rates

Key = tuple[str | int, int, int]
"""The common key of a message and its entry."""


def key_of_message(message: Message) -> Key | None:
    """The key of a message; None for messages that are in no record."""
    if isinstance(message, Request | Ask):
        return message.worker, 0 if message.worker == COORDINATOR else message.incarnation, message.sequence
    return ("noted", message.shard, message.sequence) if isinstance(message, Noted) else None


def key_of_entry(entry: Entry) -> Key | None:
    """The key of an entry; None for an entry without a message."""
    match entry:
        case PushEntry() | PullEntry() | Asking():
            return entry.worker, entry.incarnation, entry.sequence
        case Noting():
            return "noted", entry.shard, entry.sequence
        case Enrolling() | Inquiring() | Saving() if entry.sequence:
            return COORDINATOR, 0, entry.sequence
    return None


def keys_of_parts(entry: Entry) -> list[Key]:
    """The keys of the messages that were summed with an entry's message."""
    parts = entry.parts if isinstance(entry, HostPushEntry) else ()
    return [(part.worker, part.incarnation, part.sequence) for part in parts]


def together(entry: HostPushEntry, pushes: Sequence[Push]) -> Push:
    """The push of a host, of its workers' own `pushes`, as their leader made it: summed in the same order."""
    first = pushes[0]
    parts = tuple(
        PushPart(
            each.worker,
            each.incarnation,
            each.sequence,
            each.clock,
            told.basis,
            each.samples,
            each.tickets,
            each.running,
        )
        for each, told in zip(pushes[1:], entry.parts, strict=True)
    )
    gradients = [push.gradient for push in pushes]
    total = add_all_(torch.empty_like(gradients[0]), gradients[0], gradients[1:])
    lrs = mean_rates([push.lrs for push in pushes])
    unused = reduce(common, (push.unused for push in pushes[1:]), first.unused)
    return replace(first, basis=entry.basis, gradient=total, lrs=lrs, parts=parts, unused=unused)


def as_recorded(entry: Entry, messages: Sequence[Message]) -> Message | None:
    """The message of an entry, with those fields as recorded that depend on when answers arrived (see `message_order`).

    `messages`: the workers' messages of the entry, several for the push of a host. None if the entry needs none.
    """
    if not messages:
        return None
    message = messages[0]
    if isinstance(entry, HostPushEntry):
        return together(entry, [each for each in messages if isinstance(each, Push)])
    if isinstance(entry, PushEntry) and isinstance(message, Push):
        return replace(message, basis=entry.basis)
    if isinstance(entry, Asking) and isinstance(message, Ask):
        return replace(message, done=entry.done)
    return message


def words(entry: Entry) -> str:
    """An entry in words."""
    match entry:
        case HostPushEntry():
            workers = [entry.worker, *(part.worker for part in entry.parts)]
            tickets = [*entry.tickets, *(ticket for part in entry.parts for ticket in part.tickets)]
            return f"push of workers {workers} together (life {entry.incarnation}, tickets {tickets})"
        case PushEntry():
            return f"push of worker {entry.worker} (life {entry.incarnation}, tickets {list(entry.tickets)})"
        case PullEntry():
            return f"pull of worker {entry.worker} (life {entry.incarnation}, step {entry.clock})"
        case Asking():
            return f"call number {entry.sequence} for work by worker {entry.worker} (life {entry.incarnation})"
        case Elapsing():
            return f"the end of the window that opened at version {entry.opened}"
        case Lost():
            return f"loss of node {entry.node}"
        case Stopping():
            return "the end of the run, for a score was good enough"
        case Noting():
            return f"shard {entry.shard}'s answer to request {entry.sequence} of the coordinator"
    return f"request {entry.sequence} of the coordinator ({type(entry).__struct_config__.tag})"


def difference_of(recorded: Entry, replayed: Entry) -> str:
    """The differing fields, with both values."""
    if type(recorded) is not type(replayed):
        return f"recorded as {words(recorded)}, replayed as {words(replayed)}"
    other = asdict(replayed)
    fields = [f"{k} recorded as {v}, replayed as {other[k]}" for k, v in asdict(recorded).items() if v != other[k]]
    return f"{words(recorded)}: {'; '.join(fields)}"
