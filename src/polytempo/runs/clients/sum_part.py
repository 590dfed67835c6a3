"""`SumPart`: a client's side of a round's secure sum, and `Unmasked`, the sums that it has helped to open."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from torch import Tensor

from polytempo.core.strategy import InRounds
from polytempo.federated.secure_sum import Primitives, SecureClient, Words, WrongShares, as_keys
from polytempo.runs.clients.client_messages import SumAsk, SumTell
from polytempo.training.federated.movement_words import words_of

_MOST_ROUNDS = 65_536


class _Leaves(ValueError):
    """The client leaves a sum, for a reason that the server may know."""


class Unmasked:
    """The clients of each round's sum that this client gave shares for.

    Two sums of a round that differ by a client tell its movement. So a second one, as of a server that goes on from an
    earlier checkpoint, has shares for the same clients alone.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, frozenset[int]]] = {}

    def admits(self, mark: str, draw: int, clients: Collection[int], failed: Collection[int]) -> bool:
        """True for the first sum of a round and for one of the same clients. `failed`: sums that cannot be opened."""
        told = self._sums.get(mark)
        if told is not None and told[0] not in failed and told[1] != frozenset(clients):
            return False
        self._sums[mark] = draw, frozenset(clients)
        while len(self._sums) > _MOST_ROUNDS:
            del self._sums[next(iter(self._sums))]
        return True


class SumPart:
    """The phases of one sum. A phase that is asked again, after a broken connection, has the same answer."""

    def __init__(
        self, number: int, draw: int, mark: str, movement: Sequence[Tensor], rounds: InRounds, crypto: Primitives
    ) -> None:
        """`number`: the client's. `mark`: a digest of the round and its model. `movement`: θ - θₖ."""
        self._number, self.draw, self._mark = number, draw, mark
        self._movement, self._rounds = movement, rounds
        self._side = SecureClient(number, crypto)
        self.keys = b"".join(self._side.keys())
        self._words: Words | None = None
        self._least = 2
        self._told: dict[int, SumTell] = {}

    def tells(self, asked: SumAsk, unmasked: Unmasked) -> SumTell:
        """The answer to the server, which may be that this client leaves the sum."""
        if asked.phase not in self._told:
            content, why, wrong = dict[int, bytes](), "", list[int]()
            try:
                content = self._content(asked, unmasked)
            except _Leaves as error:
                why = str(error)
            except WrongShares as error:
                why, wrong = str(error)[:200], sorted(error.clients)
            except Exception as error:  # its text may have data
                why = f"it has an error, {type(error).__name__}"
                print(f"polytempo: this client leaves the sum of round {asked.round}: {error}", file=sys.stderr)
            self._told[asked.phase] = SumTell(asked.round, asked.draw, asked.phase, content, why, wrong)
        return self._told[asked.phase]

    def _content(self, asked: SumAsk, unmasked: Unmasked) -> dict[int, bytes]:
        secure = self._rounds.secure
        assert secure is not None
        if asked.phase == 1:
            self._words = self._fitting(asked.share)
            everyone = {other: as_keys(each) for other, each in asked.content.items()}
            self._least = max(2, secure.least(len(everyone)))
            if len(everyone) < self._least:
                raise _Leaves(f"a sum of {len(everyone)} clients would tell of one")
            return self._side.shares(everyone, self._least)
        if self._words is None:
            raise _Leaves("it has no part in this sum")
        if asked.phase == 2:
            return {self._number: self._side.masked(asked.content, self._words).tobytes()}
        if len(asked.content) < self._least:
            raise _Leaves(f"a sum of {len(asked.content)} clients, of {self._least} at least, would tell of one")
        if not unmasked.admits(self._mark, self.draw, asked.content, asked.failed):
            raise _Leaves("it has given shares for other clients of this round, and both sums would tell of one")
        return self._side.unmasking(asked.content)

    def _fitting(self, share: float) -> Words:
        try:
            return words_of(self._movement, share, self._rounds.number, self._rounds)
        except ValueError as error:
            print(f"polytempo: this client leaves the round's sum: {error}", file=sys.stderr)
            raise _Leaves("its movement has NaN, or is too large for the sum's numbers") from error
