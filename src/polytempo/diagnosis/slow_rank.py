"""`SlowRankJudge`: names ranks that compute longer than their peers, from windows of their paces. It does no I/O.

    windows ──▶ log(busy / the others' median) ──▶ above the noise for long enough ──▶ named ──▶ as the others: free

A rank is named if its excess is above `LEAST` and above the noise, either in each of the last 3 windows (3σ) or more,
where chance would not do that, or in the mean of the last 12 (5σ of a mean). σ is the median deviation of all ranks
from their own medians, so a rank that is always slow, or has become slow, is not taken for noise.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np

from polytempo.diagnosis.pace import PaceWindow

LEAST = 0.12
"""A rank is named if it takes so much longer than its peers, as a part of their time."""
KEPT = 64
"""Windows that the judge looks at."""
SHORT, LONG = 3, 12
_SHORT_DEVIATIONS, _LONG_DEVIATIONS = 3.0, 5.0
_LEAST_NOISE = 0.015
_CHANCE = 2e-4
"""The largest chance, over all ranks, of the excess of a rank that is named after fewer than `LONG` windows."""
_REST = 8
"""Windows from the end of a slow time until the same rank may be named again."""
_MAD = 1.4826
_FEW_RANKS = 16


class SlowRank(NamedTuple):
    """A rank that its peers wait for."""

    rank: int
    since_step: int
    step: int
    slower: float
    """The ratio of busy seconds to the median of its peers, less 1."""
    lost_s: float
    """Seconds in a step that it takes longer than the median of its peers."""
    read_share: float
    """Part of its busy seconds that gets batches, 0 to 1."""
    peers_read_share: float


class SlowRankJudge:
    """Takes one window after the other. `least_lost_s`: a shorter loss in a step is not worth a word.

    Cost: 0.03 ms a window with 8 ranks while none is slow, else 0.5 ms.
    """

    def __init__(self, least_lost_s: float = 0.0) -> None:
        self._least_lost_s = least_lost_s
        self._windows: deque[PaceWindow] = deque(maxlen=KEPT)
        self._ratios: deque[np.ndarray] = deque(maxlen=KEPT)
        self._named: dict[int, float] = {}
        """The excess of each named rank, as a logarithm."""
        self._resting: dict[int, int] = {}

    @property
    def named(self) -> frozenset[int]:
        """The ranks that are slow now."""
        return frozenset(self._named)

    def take(self, window: PaceWindow) -> list[SlowRank]:
        """The ranks that this window shows to be slow, and that were not named before."""
        if self._windows and window.busy_s.keys() != self._windows[-1].busy_s.keys():
            self._forget()  # other ranks: another group
        if len(window.busy_s) < 2 or min(window.busy_s.values()) <= 0:
            return []
        ranks = sorted(window.busy_s)
        self._windows.append(window)
        self._ratios.append(_excess(np.array([window.busy_s[rank] for rank in ranks])))
        recent = np.array(list(self._ratios)[-LONG:])
        self._release(ranks, recent)
        self._resting = {rank: left - 1 for rank, left in self._resting.items() if left > 1}
        if not _may_be_slow(recent):
            return []
        ratios = np.array(self._ratios)
        named = frozenset(place for place, rank in enumerate(ranks) if rank in self._named)
        slow = [place for place in _slow_places(ratios, named) if ranks[place] not in self._resting]
        found = [self._verdict(ranks, place, ratios) for place in slow]
        found = [each for each in found if each.lost_s >= self._least_lost_s]
        for each in found:
            self._named[each.rank] = math.log1p(each.slower)
        return found

    def _forget(self) -> None:
        self._windows.clear()
        self._ratios.clear()
        self._named.clear()
        self._resting.clear()

    def _release(self, ranks: list[int], ratios: np.ndarray) -> None:
        """Free named ranks that compute nearly as their peers do again."""
        for place, rank in enumerate(ranks):
            named = self._named.get(rank)
            if named is not None and ratios[-SHORT:, place].max() < max(named / 2, math.log1p(LEAST) / 2):
                del self._named[rank]
                self._resting[rank] = _REST

    def _verdict(self, ranks: list[int], place: int, ratios: np.ndarray) -> SlowRank:
        column = ratios[:, place]
        level = max(float(np.median(column[-SHORT:])), float(np.mean(column[-LONG:]))) / 2
        first = len(column) - 1
        while first > 0 and (column[first - 1] > level or (first > 1 and column[first - 2] > level)):
            first -= 1
        slow = float(np.mean(column[first:]))
        rank, windows = ranks[place], list(self._windows)[-(len(column) - first) :]
        own = float(np.mean([each.busy_s[rank] for each in windows]))
        read = [(each.read_share[rank], _median_of_others(each, rank)) for each in windows]
        return SlowRank(
            rank=rank,
            since_step=windows[0].first_step,
            step=windows[-1].step,
            slower=math.expm1(slow),
            lost_s=own * (1 - math.exp(-slow)),
            read_share=float(np.mean([each for each, _ in read])),
            peers_read_share=float(np.mean([each for _, each in read])),
        )


def _median_of_others(window: PaceWindow, rank: int) -> float:
    return float(np.median([share for each, share in window.read_share.items() if each != rank]))


def _excess(busy_s: np.ndarray) -> np.ndarray:
    """The logarithm of each rank's seconds over the median of the others. Shape (ranks,)."""
    values: np.ndarray = np.log(busy_s)
    if len(values) == 2:
        mirrored: np.ndarray = values - values[::-1]
        return mirrored
    if len(values) > _FEW_RANKS:  # one more hardly moves a median of many
        centred: np.ndarray = values - np.median(values)
        return centred
    held = values.tolist()
    return np.array([value - median(held[:place] + held[place + 1 :]) for place, value in enumerate(held)])


def _may_be_slow(recent: np.ndarray) -> bool:
    """False if no rank's excess in the last windows, shape (at most `LONG`, ranks), is above `LEAST`: most windows."""
    least = math.log1p(LEAST)
    return len(recent) >= SHORT and bool(((recent[-SHORT:] > least).all(0) | (recent.mean(0) > least)).any())


def _slow_places(ratios: np.ndarray, named: frozenset[int]) -> list[int]:
    """The columns of `ratios`, shape (windows, ranks), with an excess that is above the noise. `named`: slow ones."""
    if len(ratios) < SHORT:
        return []
    noise, longer = _noise(ratios)
    short = max(math.log1p(LEAST), _SHORT_DEVIATIONS * noise)
    candidates = [int(place) for place in np.flatnonzero((ratios[-SHORT:] > short).all(0)) if place not in named]
    slow = {place for place in candidates if _is_rare(ratios > short, place, named)}
    if len(ratios) >= LONG:
        recent = ratios[-LONG:]
        level = max(math.log1p(LEAST), _LONG_DEVIATIONS * noise * longer / math.sqrt(LONG))
        slow |= {int(place) for place in np.flatnonzero(np.minimum(recent.mean(0), np.median(recent, 0)) > level)}
    return sorted(slow - named)


def _is_rare(above: np.ndarray, place: int, named: frozenset[int]) -> bool:
    """True if chance would hardly hold any rank above the level for as many windows as this one now is.

    The chance is P(above) P(above | above before)ᵏ⁻¹ a rank, from the windows of all other ranks that are not slow.
    `above`: shape (windows, ranks).
    """
    ends = np.flatnonzero(~above[:, place])
    run = len(above) - (int(ends[-1]) + 1 if len(ends) else 0)
    others = np.delete(above, [place, *named], 1)
    count, total = int(others.sum()), others.size
    often = (count + 0.5) / (total + 1)
    again = (int((others[1:] & others[:-1]).sum()) + often) / (int(others[:-1].sum()) + 1)
    return bool(above.shape[1] * often * again ** (run - 1) < _CHANCE)


def _noise(ratios: np.ndarray) -> tuple[float, float]:
    """σ of one window, and how many times larger the deviation of means is because windows resemble the ones before."""
    count = len(ratios)
    residuals = ratios - np.median(ratios, 0)
    deviation = _MAD * float(np.median(np.abs(residuals))) * math.sqrt(count / (count - 1.5))
    clipped = np.clip(residuals, -3 * deviation, 3 * deviation)
    square = float((clipped**2).mean())
    alike = float((clipped[1:] * clipped[:-1]).mean()) / square if square > 0 else 0.0
    alike = min(0.9, max(0.0, alike))
    return max(_LEAST_NOISE, deviation), math.sqrt((1 + alike) / (1 - alike))
