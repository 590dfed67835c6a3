"""Movements of clients as fixed-point integers, which `secure` adds: the same bits in any order.

client 17   share Δ ──▶ x₁₇ ─┐
client  4   share Δ ──▶ x₄  ─┴▶ Σ x mod 2^bits, over this worker's clients and then over workers ──▶ gradient
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from polytempo.collectives import tree
from polytempo.core import Port
from polytempo.core.strategy import InRounds, SecureSum
from polytempo.federated.secure_sum import FixedPoint, Words


def words_of(movement: Sequence[Tensor], share: float, clients: int, rounds: InRounds) -> Words:
    """The words of share · Δ, all tensors one after the other; ValueError where a sum of `clients` could overflow.

    Of private clients numbers are rounded towards 0, so that no movement is longer than its norm allows.
    """
    assert rounds.secure is not None
    point = point_of(rounds.secure)
    flat = torch.cat([(each.detach() * share).to("cpu").double().flatten() for each in movement])
    if rounds.privacy is not None:
        unit = 2.0**point.fraction
        flat = flat.mul_(unit).trunc_().div_(unit)
    return point.encode(flat.numpy(), clients)


def weights_of(samples: Sequence[int], rounds: InRounds) -> list[float]:
    """Weights of clients with so many samples: Σ weight · Δ is the round's gradient."""
    return [float(each) for each in rounds.shares(torch.tensor(samples, dtype=torch.float64), rounds.local)]


def movement_of(words: Words, secure: SecureSum, like: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
    """The sum of movements in a sum of their words, divided by `scale`, shaped as `like`."""
    flat = torch.from_numpy(point_of(secure).decode(words)).div_(scale)
    pieces = flat.split([each.numel() for each in like])
    return [piece.view(each.shape).to(each.dtype).to(each.device) for piece, each in zip(pieces, like, strict=True)]


def point_of(secure: SecureSum) -> FixedPoint:
    """The fixed point of a strategy's sums."""
    return FixedPoint(secure.bits, secure.fraction)


class WordSums:
    """The sum of a worker's clients in a round, and of all workers'."""

    def __init__(self, rounds: InRounds, parameters: Mapping[str, nn.Parameter]) -> None:
        assert rounds.secure is not None
        self._rounds, self._secure, self._parameters = rounds, rounds.secure, list(parameters.values())
        numel = sum(parameter.numel() for parameter in self._parameters)
        self._words: Words = np.zeros(numel, point_of(rounds.secure).words)

    def begin(self) -> None:
        """A round begins."""
        self._words[:] = 0

    def add(self, movement: Sequence[Tensor], share: float) -> None:
        """Add a client's share of its movement."""
        self._words += words_of(movement, share, self._rounds.number, self._rounds)

    async def meet(self, port: Port) -> list[Tensor]:
        """Σₖ shareₖ Δₖ over all workers' clients. Cost: a `tree` of the words."""
        signed = torch.from_numpy(self._words.view(np.dtype(f"i{self._words.itemsize}")))
        whole = await tree(port, signed.clone())
        return movement_of(whole.numpy().view(self._words.dtype), self._secure, self._parameters)
