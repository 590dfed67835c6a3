"""`OpenedSums`: a client's record of the secure sums that it has helped to open, in its folder of states.

state/<ticket>/opened.jsonl   ["3 5f1c…", 77120945, "9b0e…"]   round and model, the sum's draw, a digest of its clients

Two sums of a round that differ by a client tell its movement. So a second one, as of a server that goes on from an
earlier checkpoint, has shares for the same clients alone, also from a client that was started again.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TextIO, final

import msgspec

from polytempo.core.errors import PolytempoError
from polytempo.core.system.durable_lines import DurableLines
from polytempo.runs.clients.client_memory import locked_folder
from polytempo.runs.clients.client_messages import digest

MOST_SUMS = 65_536
_FILE = "opened.jsonl"


class _Line(msgspec.Struct, array_like=True, frozen=True):
    mark: str
    draw: int
    clients: str


@final
class OpenedSums:
    """The clients of the sums that this client gave shares for, of its last `MOST_SUMS` rounds.

    Cost: 100 bytes a sum, on the disk before its shares are given; the file has `2 * MOST_SUMS` lines at most.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: this client's own, which is made. None: in memory. `PolytempoError` where another process uses it,
        or where its record cannot be read."""
        self._sums, self._length = dict[str, _Line](), 0
        self._lock: TextIO | None = None
        self._lines: DurableLines | None = None
        if folder is None:
            return
        self._lock = locked_folder(folder)
        self._lines = DurableLines(folder / _FILE)
        try:
            found = [msgspec.json.decode(line, type=_Line) for line in self._lines.read()]
        except (OSError, ValueError) as error:
            self.close()
            raise PolytempoError(
                f"{folder / _FILE} is not a record of opened sums ({error}); without it this client could open a round "
                "twice, so it begins with another folder for a new run of its server alone"
            ) from error
        self._length = len(found)
        for line in found:
            self._put(line)

    def close(self) -> None:
        """Let another process use the folder."""
        if self._lock is not None:
            self._lock.close()

    def admits(self, mark: str, draw: int, clients: Collection[int], failed: Collection[int]) -> bool:
        """True for the first sum of a round and for one of the same clients: it is kept before this returns.

        `mark`: the round and its model. `draw`: the sum's. `failed`: sums that cannot be opened, as the server says. No
        client can verify that, so the rule holds against a server that keeps to the protocol.
        """
        line, told = _Line(mark, draw, digest(msgspec.json.encode(sorted(clients)))), self._sums.get(mark)
        if told is not None and told.draw not in failed and told.clients != line.clients:
            return False
        if line != told:
            self._write(line)
            self._put(line)
        return True

    def _put(self, line: _Line) -> None:
        self._sums.pop(line.mark, None)
        self._sums[line.mark] = line
        while len(self._sums) > MOST_SUMS:
            del self._sums[next(iter(self._sums))]

    def _write(self, line: _Line) -> None:
        if self._lines is None:
            return
        if self._length >= 2 * MOST_SUMS:
            self._lines.replace(map(msgspec.json.encode, self._sums.values()))
            self._length = len(self._sums)
        self._lines.append(msgspec.json.encode(line))
        self._length += 1
