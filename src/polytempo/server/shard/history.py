"""`history`: the log of one shard, from the records of all its copies.

    node 4, the first head     1 2 3 4 5 6'          killed before it had sent entry 6' to the next copy
    node 5, the next copy      1 2 3 4 5 6 7 8       promoted; it had another request as entry 6
    node 9, started later              5 6 7 8 9     joined with the state after entry 4
    history                    1 2 3 4 5 6 7 8 9

Where the entries of two copies differ, the acknowledged one is that of the copy further down the chain. Chains grow at
their end only, and nodes are numbered as they are started, so it is the copy with the higher number.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from polytempo.server.record import Entry, Record


class History(NamedTuple):
    """The entries of a log after the first `begin`. `whole`: no gap and no torn line hides its end."""

    begin: int
    entries: list[Entry]
    whole: bool


def history(records: Sequence[Record], begin: int, lost: Collection[int]) -> History:
    """One shard's history from entry `begin` + 1 on.

    `lost`: nodes that were given up. What only they have was never acknowledged, unless all copies are lost; then the
    record ends where it ends. A gap (copies that died with unwritten lines, one after the other) ends it, too.
    """
    survivors = [record for record in records if record.node not in lost] or list(records)
    end = max((record.first + len(record.entries) - 1 for record in survivors), default=begin)
    entries: list[Entry] = []
    newest_first = sorted(records, key=lambda record: -record.node)
    for index in range(begin + 1, end + 1):
        entry = _entry(newest_first, index)
        if entry is None:
            return History(begin, entries, whole=False)
        entries.append(entry)
    return History(begin, entries, whole=not any(record.torn for record in survivors))


def _entry(records: Sequence[Record], index: int) -> Entry | None:
    for record in records:
        if 0 <= index - record.first < len(record.entries):
            return record.entries[index - record.first]
    return None
