"""`NoiseRecord`: the secret of private rounds with real clients, noisy rounds, and turns of clients with noise.

out/noise.jsonl   {"secret": …, "clients": 40}      drawn once for a run; clients know the run's seed, and not this
                  [0, "9f3a…"]                      round 0, and a digest of its answers, written before its noise
                  [1, "04c1…"]
                  [1, "77e0…"]                      after a resume the round had other answers, and so other noise
                  [2, [17, 4]]                      clients 17 and 4 are asked for movements in round 2 (`dp_sgd`)

A line is written before its noise is added, or before its orders travel, so that after a crash the record has at least
the spent privacy. Two sums of different answers with the same noise would tell the difference of the answers without
any.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from polytempo.core.calls.refusals import refuse
from polytempo.core.system.durable_lines import DurableLines
from polytempo.core.system.url_path import Place
from polytempo.federated.privacy import Releases

FILE = "noise.jsonl"


class NoiseRecord:
    """The record of a run, in its folder, or in memory where it has none."""

    def __init__(self, folder: Place | None, clients: int, *, resume: bool) -> None:
        """`clients`: all clients that may be drawn. `resume`: go on with the folder's record."""
        self._path = None if folder is None else folder / FILE
        self._kept = None if self._path is None else DurableLines(self._path)
        self._clients, self._resume = clients, resume
        self._digests: dict[int, list[str]] = {}
        self._secret: int | None = None
        self._turns = Counter[int]()
        self._earlier = frozenset[int]()
        """Rounds of earlier processes."""

    def secret(self, rounds: int) -> int:
        """The seed of draws and noise. Call it when the run holds its folder.

        `rounds`: the rounds that the run has made. `Incompatible` (PT2533) where a resumed run cannot go on with it.
        """
        if self._secret is None:
            lines = self._lines(rounds)
            self._secret = int(lines[0]["secret"], 16)
            for number, told in lines[1:]:
                if isinstance(told, str):
                    self._digests.setdefault(number, []).append(told)
                else:
                    self._turns.update(told)
            self._earlier = frozenset(self._digests)
        return self._secret

    def attempt(self, number: int, digest: str) -> int:
        """The number of other answers that this round has had before, written down before it returns.

        Call `secret` before. Cost: a line, see `DurableLines`.
        """
        known = self._digests.setdefault(number, [])
        if digest not in known:
            self._write([number, digest])
            known.append(digest)
        return known.index(digest)

    def ask(self, number: int, clients: Sequence[int]) -> None:
        """Clients are asked for their movements in a round, written down before it returns; see `attempt`."""
        self._write([number, list(clients)])
        self._turns.update(clients)

    def most_turns(self, rounds: int) -> int:
        """Movements that a client has been asked for, of the client with most, and lost rounds included."""
        self.secret(rounds)
        return max(self._turns.values(), default=0)

    def releases(self, rounds: int) -> Releases:
        """Noisy sums before round `rounds`, and noisy sums of earlier processes."""
        self.secret(rounds)
        lost = [number for number in self._earlier if number >= rounds]
        seen = [*range(rounds), *lost]
        counts = Counter(len(self._digests.get(number, ())) for number in seen)
        repeated = tuple(sorted((sums, count) for sums, count in counts.items() if sums > 1))
        return Releases(self._clients, len(seen), repeated)

    def _lines(self, rounds: int) -> list[Any]:
        """The lines of the file, which is made where the run begins."""
        told = self._read() if self._resume else []
        if told and told[0]["clients"] == self._clients:
            return told
        if told or (rounds and self._resume):
            problem = f"it is of {told[0]['clients']} clients" if told else "there is none"
            refuse({"real clients", "other noise"}, path=self._path, problem=problem, clients=self._clients)
        head = {"secret": f"{drawn_secret():x}", "clients": self._clients}
        if self._kept is not None:
            self._kept.replace([_encode(head)])
        return [head]

    def _read(self) -> list[Any]:
        try:
            return [] if self._kept is None else [json.loads(line) for line in self._kept.read()]
        except ValueError as error:
            raise ValueError(f"{self._path} is not a record of noise ({error})") from error

    def _write(self, line: Any) -> None:
        if self._kept is not None:
            self._kept.append(_encode(line))


def _encode(line: Any) -> bytes:
    return json.dumps(line).encode()


def drawn_secret() -> int:
    """A number that no client can guess."""
    return secrets.randbits(128)
