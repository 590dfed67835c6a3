"""`SampleAccount`: evidence that each sample of an epoch counted exactly once, however many ranks there were and when.

    each rank, each step     its places of the epoch's order ──▶ how many, and the sum of their marks
    the commit point         adds these over all ranks, those included that are lost later
    the account              adds the steps that were applied, epoch by epoch
    the end of an epoch      as many as there are, and the sum of all marks?

A mark is 48 bits that a hash makes of a place, and marks add modulo 2**48. The sum counts every place once; if one is
missing and another is there twice it is the same by chance alone (2**-48).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.data.spans import PlaceSpan, between, without

_MASK = 2**48 - 1
"""A sum of marks over up to 2**15 ranks fits into 63 bits."""
_BLOCK = 1 << 14
"""Places with marks that are computed together: of an epoch of any size a few blocks are held."""
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Counted(NamedTuple):
    """So many samples, and the sum of their places' marks."""

    samples: int = 0
    marks: int = 0

    def __add__(self, other: object) -> Counted:
        """Both together."""
        assert isinstance(other, Counted)
        return Counted(self.samples + other.samples, (self.marks + other.marks) & _MASK)


class SamplesLost(PolytempoError):
    """Samples of an epoch were left out, or counted more than once."""


class SampleAccount:
    """The applied places of each epoch of `num_samples` samples."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self._epochs: dict[int, Counted] = {}

    def add(self, counted: Mapping[int, Counted]) -> None:
        """Count the places that an applied step, or round of steps, used of each epoch."""
        for epoch, more in counted.items():
            self._epochs[epoch] = self._epochs.get(epoch, Counted()) + more

    def check(self, epoch: int, consumed: int, left: Sequence[PlaceSpan] = ()) -> None:
        """Raise `SamplesLost` unless the account has all earlier epochs, and the first `consumed` places of `epoch`
        without the `left` ones, exactly once.
        """
        due = _due(epoch, consumed, left, self.num_samples)
        for each in sorted(due.keys() | self._epochs.keys()):
            expected = due.get(each, Counted())
            found = self._epochs.get(each, Counted())
            if found != expected:
                raise SamplesLost(
                    f"epoch {each} should have used {expected.samples} samples exactly once, and used {found.samples}"
                    + ("" if found.samples != expected.samples else ", some of them twice and others never")
                )

    def to_plain(self) -> list[list[int]]:
        """The account as plain data for JSON."""
        return [[epoch, *counted] for epoch, counted in sorted(self._epochs.items())]

    def load_plain(self, plain: list[list[int]]) -> None:
        """Go on from the value of `to_plain`."""
        self._epochs = {epoch: Counted(*counted) for epoch, *counted in plain}

    def begin_at(self, epoch: int, consumed: int, left: Sequence[PlaceSpan] = ()) -> None:
        """Take for granted the samples of an earlier run."""
        self._epochs = _due(epoch, consumed, left, self.num_samples)


def _due(epoch: int, consumed: int, left: Sequence[PlaceSpan], num_samples: int) -> dict[int, Counted]:
    used = without(between((0, 0), (epoch, consumed), num_samples), left)
    return counted_by_epoch(used, {span.epoch for span in used})


def counted_by_epoch(spans: Iterable[PlaceSpan], epochs: Iterable[int]) -> dict[int, Counted]:
    """The counts of each of `epochs` in `spans`, which have no other epochs."""
    found = dict.fromkeys(epochs, Counted())
    for span in spans:
        found[span.epoch] += counted_of(range(span.start, span.stop))
    return found


def counted_of(places: range) -> Counted:
    """The counts of `places` of an epoch.

    >>> counted_of(range(0, 3)) + counted_of(range(3, 10)) == counted_of(range(0, 10))
    True
    """
    marks = 0
    for block in range(places.start // _BLOCK, -(-places.stop // _BLOCK)) if places else ():
        begin = max(0, places.start - block * _BLOCK)
        end = min(_BLOCK, places.stop - block * _BLOCK)
        marks += _whole(block) if (begin, end) == (0, _BLOCK) else int(_sums(block)[end] - _sums(block)[begin])
    return Counted(len(places), marks & _MASK)


@lru_cache(maxsize=1 << 14)
def _whole(block: int) -> int:
    return int(_sums(block)[-1])


@lru_cache(maxsize=64)
def _sums(block: int) -> Tensor:
    """The sum of the marks of a block's places before each, shape (_BLOCK + 1,), int64.

    It may wrap around, which the mask of a difference does not see.
    """
    first = block * _BLOCK + 1
    marks = torch.arange(first, first + _BLOCK, dtype=torch.int64) * _signed(_GOLDEN)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        marks = (marks ^ _shifted(marks, shift)) * _signed(factor)
    marks = (marks ^ _shifted(marks, 31)) & _MASK
    return torch.cat([torch.zeros(1, dtype=torch.int64), marks.cumsum(0)])


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A right shift that does not copy the sign, as torch does."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """64 bits as torch takes them."""
    return word - 2**64 if word >= 2**63 else word
