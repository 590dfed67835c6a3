"""`SumRound`: the server's side of a round's secure sum, its questions and answers of each phase, without I/O.

phase 0 keys       with the answer of a client that has trained
phase 1 shares     ask: everyone's keys and numbers of samples    tell: sealed Shamir shares for each other client
phase 2 vector     ask: the others' sealed shares for it          tell: masked words of its movement, by its own weight
phase 3 unmasking  ask: the clients with words                    tell: a Shamir share of each client of phase 1
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from polytempo.federated.secure_sum import (
    PHASES,
    Primitives,
    PublicKeys,
    Words,
    WrongShares,
    as_keys,
    sealed_bytes,
    secrets_of,
    share_bytes,
    without_masks,
)
from polytempo.runs.clients.client_messages import SumAsk, SumTell, agreement
from polytempo.runs.clients.tickets import name_of
from polytempo.spec.text.plain_text import plain_text
from polytempo.training.federated.movement_words import point_of
from polytempo.training.federated.remote_rounds import SumTask

_LAST_PHASE = len(PHASES) - 1
_MOST_WHY = 200


class Summed(NamedTuple):
    """An opened sum."""

    words: Words
    clients: frozenset[int]
    """Clients with their movement in it."""


class SumRound:
    """A sum of clients' movements, from their keys on."""

    def __init__(
        self, number: int, task: SumTask, crypto: Primitives, failed: list[int] | None = None, order: str = ""
    ) -> None:
        """`number`: the round's. `failed`: earlier sums of the round that cannot be opened, and this one, if so.
        `order`: the digest of the order that the clients have trained by."""
        self._order = order
        self._number, self._task, self._crypto = number, task, crypto
        self._failed = [] if failed is None else failed
        self.draw = secrets.randbits(52)
        self.phase = 0
        self._samples: Mapping[int, int] = {}
        self._keys: dict[int, PublicKeys] = {}
        self._told: list[dict[int, dict[int, bytes]]] = [{}]
        self._accusers: dict[int, set[int]] = {}
        self.opened = set[int]()
        """Clients that have given shares for other clients of the round."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The round, the draw and the phase."""
        return self._number, self.draw, self.phase

    @property
    def there(self) -> set[int]:
        """Clients that are asked in this phase."""
        return set(self._told[max(0, self.phase - 1)])

    @property
    def is_last(self) -> bool:
        """True in the phase that clients give shares in."""
        return self.phase == _LAST_PHASE

    @property
    def told(self) -> int:
        """The number of clients that have told their part of this phase."""
        return len(self._told[self.phase])

    @property
    def least(self) -> int:
        """The clients that must stay."""
        return max(2, self._task.secure.least(len(self._keys)))

    def joins(self, client: int, content: bytes) -> str | None:
        """Take a client's keys; the reason to refuse them, or None."""
        try:
            keys = as_keys(content)
            # others could not go on with a key that has no secret with theirs
            for each in (keys.sealing, keys.masking):
                self._crypto.agree(secrets.token_bytes(32), each)
        except Exception as error:
            return f"its message has no keys ({error})"
        if any({keys.sealing, keys.masking} & {each.sealing, each.masking} for each in self._keys.values()):
            return "its keys are another client's"
        self._keys[client], self._told[0][client] = keys, {}
        return None

    def has(self, client: int) -> bool:
        """True for a client that has sent its keys."""
        return client in self._keys

    def contradicts(self, client: int, content: bytes) -> bool:
        """True for other keys than the client has sent."""
        return content != b"".join(self._keys[client])

    def begins(self, samples: Mapping[int, int]) -> bool:
        """Begin the next phase; False after the last one, or where too few clients stay.

        `samples`: numbers of samples of clients with keys, in the order of draws.
        """
        if self.is_last or self.told < self.least:
            return False
        self._samples = samples
        self.phase += 1
        self._told.append({})
        return True

    def asks(self, client: int) -> SumAsk | None:
        """The message to a client in this phase; None in the first one, which an order begins."""
        if not self.phase:
            return None
        told = self._told[self.phase - 1]
        if self.phase == 1:
            content = self._joined_keys()
        elif self.phase == 2:
            content = {other: each[client] for other, each in told.items() if other != client}
        else:
            content = dict.fromkeys(told, b"")
        samples = dict(self._samples) if self.phase == 1 else {}
        return SumAsk(self._number, self.draw, self.phase, content, samples, self._failed)

    def _joined_keys(self) -> dict[int, bytes]:
        return {client: b"".join(self._keys[client]) for client in self._samples}

    def takes(self, client: int, message: SumTell) -> str | None:
        """Take a client's message of this phase; the reason to refuse it, or None."""
        if message.why:
            if message.opened:
                self.opened.add(client)
            for other in self._accused_by(message):
                self._accusers.setdefault(other, set()).add(client)
            return f"it leaves the sum: {plain_text(message.why[:_MOST_WHY])}"
        if self.phase == 1:
            sizes = dict.fromkeys(self._keys.keys() - {client}, sealed_bytes())
        elif self.phase == 2:
            sizes = {client: self._task.numel * self._task.secure.bits // 8}
        else:
            sizes = dict.fromkeys(self._told[1], share_bytes())
        if {key: len(each) for key, each in message.content.items()} != sizes:
            return f"its message of the phase {PHASES[self.phase]!r} has another size than the sum's"
        self._told[self.phase][client] = message.content
        return None

    def accuses(self, message: SumTell) -> bool:
        """True for a client that leaves because it cannot read another one's shares."""
        return bool(message.why and self._accused_by(message))

    def _accused_by(self, message: SumTell) -> set[int]:
        return self._told[1].keys() & set(message.wrong) if self.phase == 2 else set()

    @property
    def silent(self) -> set[int]:
        """Clients without an answer in the last phase. A client that accuses others has answered."""
        return self.there - self._told[self.phase].keys() - set().union(*self._accusers.values())

    def ends(self) -> tuple[Summed | None, dict[int, str]]:
        """The sum, None where it cannot be opened, and clients with wrong shares: the reasons to refuse them."""
        if self.told < self.least:
            return None, self._accusations()
        words = point_of(self._task.secure).words
        sent = {client: np.frombuffer(told[client], words) for client, told in self._told[2].items()}
        try:
            found, wrong = secrets_of(self._keys, sent, self._told[3], self.least, self._crypto)
        except WrongShares as error:
            self._failed.append(self.draw)
            return None, dict.fromkeys(error.clients, "its shares do not give its key")
        agreed = agreement(self._number, self.draw, self._order, self._joined_keys(), self._samples)
        summed = Summed(without_masks(self._keys, sent, found, self._crypto, agreed), frozenset(sent))
        return summed, dict.fromkeys(wrong, "it has told wrong shares of others")

    def _accusations(self) -> dict[int, str]:
        """Clients that most others have wrong shares of, and clients that accuse others alone: the reasons."""
        found = dict[int, str]()
        for client, by in self._accusers.items():
            if 2 * len(by) >= len(self._told[1]):
                found[client] = f"{', '.join(map(name_of, sorted(by)))} cannot read its shares"
        for client, by in self._accusers.items():
            if client not in found:
                found |= {each: f"most clients can read the shares of {name_of(client)}" for each in by - found.keys()}
        return found
