"""Clients of each round in a run's stream, and the turns of all of them as a table that stays small.

The text `clients/round`, of simulated and of real clients, is the first of these that fits:

round 7 of 6 clients: client-3 client-0 (age 1)        up to 100 clients, in the order of the round
round 7 of 900 clients: 250 by steps: 3 1 12; age 1: 5     clients 3 4 16, and 5 with an older model, and so on
round 7 of 9000000 clients: 50000 took part            more than a text of the stream holds: not drawn by client

            rounds 0 ───────────────▶ 640            turns of client-0 to client-199 in rounds 0 to 9, …: a run with
clients 0   ▓ ▒ ░ …                                  more rounds or clients than fit has more of them in a cell
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, final

import numpy as np

from polytempo.report.status.records import MOST_TEXT

ROUND = "clients/round"
"""The name of a round's text."""
MOST_ROWS, MOST_COLUMNS, MOST_CLIENTS = 50, 64, 10_000_000
MOST_NAMED, MOST_COUNTED = 100, 1_000_000
"""The most clients of a round for their names in its text, and of a run for counts of each client's turns."""
_TEXT = re.compile(r"round (\d{1,15}) of (\d{1,15}) clients: (.*)", re.DOTALL)
_NAMES = re.compile(r"given up|client-\d{1,15}(?: \(age \d+\))?(?: client-\d{1,15}(?: \(age \d+\))?)*")
_RUN = r"\d{1,15}(?: \d{1,15})*"
_STEPS = re.compile(rf"(\d{{1,15}}) by steps: ((?:age \d+: )?{_RUN}(?:; age \d+: {_RUN})*)")
_NUMBER = re.compile(r"(\d{1,15}) took part")


def round_text(number: int, clients: int, ages: Mapping[int, int]) -> str:
    """The text of a round of some of `clients`. `ages`: of the models that its clients began with."""
    begin = f"round {number} of {clients} clients:"
    if len(ages) <= MOST_NAMED:
        names = " ".join(f"client-{each}" + (f" (age {age})" if age else "") for each, age in ages.items())
        return f"{begin} {names or 'given up'}"
    parts = []
    for age in sorted(set(ages.values())):
        steps = np.diff(sorted(each for each, own in ages.items() if own == age), prepend=0)
        parts.append((f"age {age}: " if age else "") + " ".join(map(str, steps)))
    text = f"{begin} {len(ages)} by steps: {'; '.join(parts)}"
    return text if len(text) <= MOST_TEXT else f"{begin} {len(ages)} took part"


def _of_text(text: str) -> tuple[list[int] | None, int | None]:
    """The clients of a round, and how many they are; None: the text does not say it, or not to its end."""
    if _NAMES.fullmatch(text):
        named = [int(each) for each in re.findall(r"client-(\d+)", text)]
        return named, len(named)
    if found := _STEPS.fullmatch(text):
        runs = [part.rpartition(": ")[2].split() for part in found[2].split("; ")]
        stepped = [each for run in runs for each in accumulate(map(int, run))]
        return (stepped if len(stepped) == int(found[1]) else None), int(found[1])
    found = _NUMBER.fullmatch(text)
    return None, None if found is None else int(found[1])


@final
class ClientRounds:
    """The turns of clients in the rounds so far. Memory: 26 kB, and 4 bytes a client, of at most `MOST_COUNTED`."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, clients: int) -> None:
        self._clients, self._lines = clients, min(clients, MOST_ROWS)
        self._turns = np.zeros(clients if clients <= MOST_COUNTED else 0, np.uint32)
        self._table = np.zeros((self._lines + 1, MOST_COLUMNS), np.int64)  # the last line: rounds that are not drawn
        self._width, self._rounds, self._said, self._took = 1, 0, 0, 0
        self._told: dict[str, Any] | None = None

    def add(self, text: str) -> None:
        """Count a round, once; a text of another form has none."""
        found = _TEXT.fullmatch(text)
        if found is None or not 0 < (clients := int(found[2])) <= MOST_CLIENTS:
            return
        if self._clients != clients:  # the first round, or another run's tickets
            self._begin(clients)
        number = int(found[1])
        if number < self._rounds:  # again, after a resume
            return
        self._rounds, self._told = number + 1, None
        while number >= MOST_COLUMNS * self._width:
            pairs = self._table.reshape(len(self._table), -1, 2).sum(2)
            self._table = np.concatenate([pairs, np.zeros_like(pairs)], axis=1)
            self._width *= 2
        named, took = _of_text(found[3])
        column = self._table[:, number // self._width]
        if named is None:
            column[-1] += 1
        else:
            own = np.array(sorted({each for each in named if each < clients}), np.int64)
            column[:-1] += np.bincount(own * self._lines // clients, minlength=self._lines)
            if len(self._turns):
                self._turns[own] += 1
        if took is not None:
            self._said, self._took = self._said + 1, self._took + took

    def plain(self) -> dict[str, Any] | None:
        """The table for pages, None before the first round; the same one until the next round.

        `parts[row][column]`: turns of a row's clients in a column's rounds, as a part of all possible ones. `width`: a
        column's rounds. `undrawn`: rounds without clients in their texts. `a_round`: clients of a round, the
        mean. `took_part`, `least`, `median`, `most`: clients with a turn, and the turns of a client; None where some
        rounds are undrawn, or for more than `MOST_COUNTED` clients.
        """
        if self._told is None and self._rounds:
            self._told = self._made()
        return self._told

    def _made(self) -> dict[str, Any]:
        columns = -(-self._rounds // self._width)
        last = self._rounds - (columns - 1) * self._width
        table = self._table[:, :columns]
        rounds = np.array([self._width] * (columns - 1) + [last]) - table[-1]
        ends = -(-np.arange(self._lines + 1) * self._clients // self._lines)
        parts = table[:-1] / (np.diff(ends)[:, None] * np.maximum(1, rounds))
        undrawn, turns = int(table[-1].sum()), self._turns
        known = len(turns) > 0 and not undrawn
        return {
            "clients": self._clients,
            "rounds": self._rounds,
            "width": self._width,
            "parts": [[float(f"{part:.4g}") for part in line] for line in parts.tolist()],
            "undrawn": undrawn,
            "a_round": self._took / self._said if self._said else None,
            "took_part": int((turns > 0).sum()) if known else None,
            "least": int(turns.min()) if known else None,
            "median": float(np.median(turns)) if known else None,
            "most": int(turns.max()) if known else None,
        }
