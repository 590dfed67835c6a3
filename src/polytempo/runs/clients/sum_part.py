"""`SumPart`: a client's side of a round's secure sum."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from polytempo.core.strategy import InRounds
from polytempo.federated.secure_sum import Primitives, SecureClient, Words, WrongShares, as_keys
from polytempo.runs.clients.client_messages import SumAsk, SumTell, agreement
from polytempo.runs.clients.opened_sums import OpenedSums
from polytempo.runs.clients.tickets import MOST_SAMPLES
from polytempo.training.federated.movement_words import weights_of, words_of


class _Leaves(ValueError):
    """The client leaves a sum, for a reason that the server may know."""


class _Opened(_Leaves):
    """The client has given shares for other clients of the round."""


class SumPart:
    """The phases of one sum. A phase that is asked again, after a broken connection, has the same answer."""

    def __init__(
        self,
        number: int,
        samples: int,
        draw: int,
        mark: str,
        movement: Sequence[Tensor],
        rounds: InRounds,
        crypto: Primitives,
        order: str = "",
    ) -> None:
        """`number`: the client's. `mark`: a digest of the round and its model. `movement`: θ - θₖ. `order`: the digest
        of the order that it has trained by."""
        self._order = order
        self._number, self._samples, self.draw, self._mark = number, samples, draw, mark
        self._movement, self._rounds = movement, rounds
        self._side = SecureClient(number, crypto)
        self.keys = b"".join(self._side.keys())
        self._words: Words | None = None
        self._least = 2
        self._told: dict[int, SumTell] = {}

    def tells(self, asked: SumAsk, opened: OpenedSums) -> SumTell:
        """The answer to the server, which may be that this client leaves the sum."""
        if asked.phase not in self._told:
            content, why, wrong, opened_before = dict[int, bytes](), "", list[int](), False
            try:
                content = self._content(asked, opened)
            except _Leaves as error:
                why, opened_before = str(error), isinstance(error, _Opened)
            except WrongShares as error:
                why, wrong = str(error)[:200], sorted(error.clients)
            except Exception as error:  # its text may have data
                why = f"it has an error, {type(error).__name__}"
                print(f"polytempo: this client leaves the sum of round {asked.round}: {error}", file=sys.stderr)
            told = asked.round, asked.draw, asked.phase, content, why, wrong, opened_before
            self._told[asked.phase] = SumTell(*told)
        return self._told[asked.phase]

    def _content(self, asked: SumAsk, opened: OpenedSums) -> dict[int, bytes]:
        secure = self._rounds.secure
        assert secure is not None
        if asked.phase == 1:
            everyone = {other: as_keys(each) for other, each in asked.content.items()}
            self._least = max(2, secure.least(len(everyone)))
            if len(everyone) < self._least:
                raise _Leaves(f"a sum of {len(everyone)} clients would tell of one")
            self._words = self._fitting(self._own_share(asked))
            agreed = agreement(asked.round, self.draw, self._order, asked.content, asked.samples)
            return self._side.shares(everyone, self._least, agreed)
        if self._words is None:
            raise _Leaves("it has no part in this sum")
        if asked.phase == 2:
            return {self._number: self._side.masked(asked.content, self._words).tobytes()}
        if len(asked.content) < self._least:
            raise _Leaves(f"a sum of {len(asked.content)} clients, of {self._least} at least, would tell of one")
        if not opened.admits(self._mark, self.draw, asked.content, asked.failed):
            raise _Opened("it has given shares for other clients of this round, and both sums would tell of one")
        return self._side.unmasking(asked.content)

    def _own_share(self, asked: SumAsk) -> float:
        """This client's weight, which it makes itself: a server that sets weights could weigh all others by 0."""
        number, samples = self._number, asked.samples
        if asked.content.get(number) != self.keys or samples.get(number) != self._samples:
            raise _Leaves("its keys and its number of samples are others at the server")
        if samples.keys() != asked.content.keys() or not all(1 <= each <= MOST_SAMPLES for each in samples.values()):
            raise _Leaves(f"the numbers of samples are not of the sum's clients, or not from 1 to {MOST_SAMPLES:,}")
        return weights_of(list(samples.values()), self._rounds)[list(samples).index(number)]

    def _fitting(self, share: float) -> Words:
        try:
            return words_of(self._movement, share, self._rounds.number, self._rounds)
        except ValueError as error:
            print(f"polytempo: this client leaves the round's sum: {error}", file=sys.stderr)
            raise _Leaves("its movement has NaN, or is too large for the sum's numbers") from error
