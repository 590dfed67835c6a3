"""`Scheduler`: draws the candidates of a round, and keeps a set that may be updated together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ORDERS = ("priority", "last_change", "round_robin", "random")

FLOOR = 0.1
"""Part of the mean weight that each parameter has in addition, so that unmoved ones are drawn, too."""
CANDIDATES = 3
"""Candidates for each place of a set: U' of the paper is 3 U. Some of them interfere."""
_MOST_WEIGHTS = 1 << 24
"""The most weights that torch draws from."""


class SetRule(NamedTuple):
    """The choice of a round's parameters."""

    order: str = "priority"
    at_once: int = 32
    bound: float | None = 0.1
    """The bound on the correlation of any two of a set; None: all drawn parameters are updated together."""
    candidates: int | None = None
    """Parameters drawn for a set; None: 3 for each of `at_once` with a bound, and else one."""

    @property
    def drawn(self) -> int:
        """Parameters drawn for a set."""
        return self.candidates or self.at_once * (1 if self.bound is None else CANDIDATES)

    def checked(self) -> SetRule:
        """This rule. ValueError where it chooses nothing."""
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.at_once < 1:
            raise ValueError(f"at_once={self.at_once}: a round needs at least one parameter")
        if self.candidates is not None and self.candidates < self.at_once:
            raise ValueError(f"candidates={self.candidates}: a round that updates {self.at_once} draws as many or more")
        if self.bound is not None and not 0 < self.bound <= 1:
            raise ValueError(f"bound={self.bound:g}: correlations are above 0 and up to 1; None leaves them unbounded")
        return self


class Scheduler:
    """Draws candidates of `num_parameters` and keeps a set; the same on each worker that sees the same changes.

    Candidates are drawn with repetition, three for each place of the set, and considered in random order: the paper
    draws U' > U, as some of them interfere with others. `priority` and `last_change` draw each parameter once, and then
    with weight wⱼ + mean w / 10. `last_change` is the paper's: wⱼ = |Δβⱼ|, by its last update.
    `priority` adds up the moves since then of others that interfere, wⱼ = Σₖ |corr(xⱼ, xₖ)| |Δβₖ| over correlations of
    at least `bound`: about the most that βⱼ will move. `random` gives all the same weight; the candidates of
    `round_robin` are the head of a queue, and updated parameters join its end.
    """

    def __init__(self, rule: SetRule, drawable: Tensor, seed: int) -> None:
        if not drawable.any():
            raise ValueError("every column of the data is zero, so no parameter has anything to learn from")
        if len(drawable) > _MOST_WEIGHTS and rule.order != "round_robin":
            raise ValueError(f"{len(drawable)} parameters: at most {_MOST_WEIGHTS} are drawn; use order=round_robin")
        self._rule, self._drawable = rule, drawable
        self._moved = torch.zeros(len(drawable), dtype=torch.float64)
        self._untouched = drawable.clone()
        self._queue = drawable.nonzero().flatten()
        self._random = torch.Generator().manual_seed(seed)

    def candidates(self) -> Tensor:
        """Some parameters in the order of their consideration, int64."""
        if self._rule.order == "round_robin":
            return self._queue[: self._rule.drawn]
        drawn = torch.multinomial(self._weights(), self._rule.drawn, replacement=True, generator=self._random)
        distinct: Tensor = torch.unique(drawn)
        return distinct[torch.randperm(len(distinct), generator=self._random)]

    def _weights(self) -> Tensor:
        if self._rule.order == "random":
            return self._drawable.double()
        if self._untouched.any():
            return self._untouched.double()
        floor = FLOOR * self._moved.sum() / len(self._queue)
        return (self._moved + (floor if floor > 0 else 1.0)) * self._drawable

    def kept(self, candidates: Tensor, correlations: Tensor | None) -> Tensor:
        """The parameters that are updated together: `compatible` ones, or all where there is no bound."""
        if correlations is None or self._rule.bound is None:
            chosen = candidates[: self._rule.at_once]
        else:
            chosen = candidates[compatible(correlations, self._rule.at_once, self._rule.bound)]
        if self._rule.order == "round_robin":
            waiting = ~torch.isin(self._queue, chosen)
            self._queue = torch.cat([self._queue[waiting], chosen])
        return chosen

    def moved(self, chosen: Tensor, change: Tensor, correlations: Tensor | None) -> None:
        """Weigh the last update's changes. `correlations`: (chosen, all), None where they are not known."""
        self._untouched[chosen] = False
        if self._rule.order == "last_change" or self._rule.bound is None or correlations is None:
            self._moved[chosen] = change.abs()
            return
        sizes = correlations.abs()
        sizes[sizes < self._rule.bound] = 0.0
        self._moved[chosen] = 0.0
        sizes[:, chosen] = 0.0
        self._moved += change.abs() @ sizes


def compatible(correlations: Tensor, at_once: int, bound: float) -> list[int]:
    """Positions of candidates that may be updated together, at most `at_once`: greedily, in their order,

        j is kept   if |corr(j, k)| < bound for all k kept,
                    and Σₖ |corr(j, k)| < 1 for each that is kept then.

    The sums are not in the paper. With them no round raises the objective: by Gershgorin's circles the eigenvalues of
    the set's correlations stay below 2, and parallel updates by a quadratic bound can bear that. `correlations`:
    (candidates, candidates).
    """
    sizes = np.abs(correlations.numpy())
    np.fill_diagonal(sizes, 0.0)
    free, load = np.ones(len(sizes), dtype=bool), np.zeros(len(sizes))
    kept: list[int] = []
    for j, row in enumerate(sizes):
        if free[j] and load[j] < 1 and (load[kept] + row[kept] < 1).all():
            kept.append(j)
            free &= row < bound
            load += row
            if len(kept) == at_once:
                break
    return kept
