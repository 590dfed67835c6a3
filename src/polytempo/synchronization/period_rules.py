"""Rules for the steps between two exchanges: ever more, or by the clock, the loss, the variance, the learning rate.

`every(rule, transform)`, and `period=rule` of local strategies, take them in the place of a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from polytempo.core import call_name
from polytempo.core.calls.typed_arguments import typed

Sees = Literal["steps", "rate", "seconds", "loss", "variance"]


class EndedRound(NamedTuple):
    """The round that ends, alike on all ranks."""

    number: int
    """Rounds with a finite `seen` so far, this one included."""
    period: int
    """Steps of the round."""
    seen: float
    """The number that the rule asks for. NaN: the round has none."""
    reference: float
    """A number that the rule keeps; 0 at first."""


Following = Callable[[EndedRound], tuple[int, float]]
"""The steps of the next round, and the reference."""


class PeriodRule(NamedTuple):
    """The number of steps of each round. Ranks' models meet at its end."""

    name: str
    first: int
    """Steps of the first round."""
    sees: Sees
    following: Following | None = None
    """None: the steps are known from the beginning; see `longest` and `repeats`."""
    longest: int = 0
    repeats: int = 1

    @property
    def asks(self) -> bool:
        """True if a number of ranks' own is averaged in each meeting."""
        return self.sees in ("seconds", "loss", "variance")

    def __repr__(self) -> str:
        return self.name


@typed
def growing(first: int = 4, longest: int = 64, repeats: int = 16) -> PeriodRule:
    """Rounds of H₀ = `first` steps, then of 2 H₀, 4 H₀, … up to `longest` steps, `repeats` rounds of each.

    All ranks know it without a message. Models move farthest in the first steps, and agree often there. With
    `longest=first` it is the number H₀.

    Source: S. Shen, Y. Cheng, J. Liu and L. Xu, "STL-SGD: speeding up local SGD with stagewise communication period",
    2021: periods that grow stage by stage. Deviation: there a stage ends with a decay of the learning rate.
    """
    if first < 1 or repeats < 1 or longest < first or longest % first:
        raise ValueError(
            "rounds begin with at least 1 step, last for at least 1 round each, and grow to a multiple of the first "
            f"number of steps; got first={first}, longest={longest}, repeats={repeats}"
        )
    return PeriodRule(call_name(growing, locals()), first, "steps", longest=longest, repeats=repeats)


@typed
def by_rate(shortest: int = 4, scale: float = 0.1, longest: int = 10_000) -> PeriodRule:
    """H = max(`shortest`, ⌊(a / η)²⌋) steps, with a = `scale` and η the learning rate in the round's first step.

    So rounds are longer the smaller the rate is; never more than `longest`. η is the rate of the optimizer's first
    group. All ranks know it without a message, as long as their schedulers agree: a scheduler that looks at a worker's
    own loss does not, and ranks then wait for each other until a deadline. With `longest=shortest` it is that number.

    Source: X. Gu, K. Lyu, S. Arora, J. Zhang and L. Huang, "A quadratic synchronization rule for distributed deep
    learning", 2024: this formula. a is tuned with the largest rate: there 0.0175 for AdamW with a rate of 0.008.
    """
    _check_bounds(shortest, shortest, longest)
    if not scale > 0:
        raise ValueError(f"scale is a of (a / η)², and over 0; got {scale}")

    def following(ended: EndedRound) -> tuple[int, float]:
        if not math.isfinite(ended.seen):
            return shortest, 0.0
        ratio = min(scale / ended.seen, float(longest)) if ended.seen > 0 else float(longest)
        return max(shortest, min(math.floor(ratio**2), longest)), 0.0

    return PeriodRule(call_name(by_rate, locals()), shortest, "rate", following)


@typed
def by_time(seconds: float = 30.0, first: int = 16, longest: int = 10_000) -> PeriodRule:
    """Rounds of about so many `seconds`: H ← H · seconds / t, with t the last round's seconds, the mean over ranks.

    The first round has `first` steps, and none has more than `longest`. t is counted to the end of the last step, and
    includes the exchange before the first. In each meeting ranks average t: one number more, because clocks differ. The
    first step of a process, which reads data and compiles, counts as the mean of the round's other steps; a round of
    that step alone leaves the period as it is. With `longest=first` rounds have at most that number of steps; with
    `seconds=inf` and both equal they always have it.
    """
    _check_bounds(first, 1, longest)
    if not seconds > 0:
        raise ValueError(f"seconds is the length of a round, and over 0; got {seconds}")

    def following(ended: EndedRound) -> tuple[int, float]:
        if not ended.seen > 0:
            return ended.period, 0.0
        wanted = ended.period * seconds / ended.seen
        return max(1, round(min(wanted, float(longest)))), 0.0

    return PeriodRule(call_name(by_time, locals()), first, "seconds", following)


@typed
def by_loss(first: int = 16, shortest: int = 1) -> PeriodRule:
    """H = ⌈H₀ √(F / F₀)⌉ steps, with H₀ = `first`, F the mean loss of the last round and F₀ the mean loss of the first.

    Models agree rarely at first, and more often as the loss falls; from `shortest` to `first` steps apart. In each
    meeting ranks average their mean losses: one number more. A mean that is not finite is left out, and followed by
    H₀ steps. A loop of its own tells a step's loss by `handle.scaled(loss).backward()`. With `shortest=first` it is the
    number H₀.

    Source: J. Wang and G. Joshi, "Adaptive communication strategies to achieve the best error-runtime trade-off in
    local-update SGD", 2019 (AdaComm). The formula is written from memory, and not compared with the paper. Deviation:
    it decides after intervals of time, here each round does.
    """
    _check_bounds(first, shortest, first)

    def following(ended: EndedRound) -> tuple[int, float]:
        if not math.isfinite(ended.seen):
            return first, ended.reference
        begin = ended.reference or ended.seen
        share = ended.seen / begin if begin > 0 and ended.seen >= 0 else 1.0
        return max(shortest, math.ceil(first * math.sqrt(min(share, 1.0)))), begin

    return PeriodRule(call_name(by_loss, locals()), first, "loss", following)


@typed
def by_variance(first: int = 8, longest: int = 64, samples: int = 4, slack: float = 0.3) -> PeriodRule:
    """A step more where models differ less than in the first rounds, and one less where they differ more.

    s = V / η, with V the mean over ranks of ‖θᵢ - θ‖², θᵢ a rank's model at the end of a round, θ its model after the
    exchange, and η the learning rate. The first `samples` rounds have `first` steps, and C is their mean of s. From
    then on H ← H + 1 where s < (1 - `slack`) C and H ← H - 1 where s > (1 + `slack`) C, from 1 to `longest` steps. In
    each meeting ranks average their ‖θᵢ - θ‖²: one number more, and a copy of the model meanwhile. An outer momentum
    moves θ, and counts; so do the optimizer's moments that `parameter_averaging` exchanges with the model. A round
    with a rate of 0, or with a V that is not finite, leaves the period as it is. A `slack` of infinity is the number
    `first`.

    Source: P. Jiang and G. Agrawal, "Adaptive periodic averaging: a practical approach to reducing communication in
    distributed learning", 2020. The rule is written from memory, and not compared with the paper. Deviation: bounds
    and counts are our own.
    """
    _check_bounds(first, 1, longest)
    if samples < 1 or not slack > 0:
        raise ValueError(f"by_variance needs samples >= 1 and slack > 0, got {samples} and {slack}")

    def following(ended: EndedRound) -> tuple[int, float]:
        if not math.isfinite(ended.seen):
            return ended.period, ended.reference
        if ended.number <= samples:
            return first, ended.reference + ended.seen / samples
        more = ended.seen < (1 - slack) * ended.reference
        less = ended.seen > (1 + slack) * ended.reference
        return max(1, min(longest, ended.period + more - less)), ended.reference

    return PeriodRule(call_name(by_variance, locals()), first, "variance", following)


def _check_bounds(first: int, shortest: int, longest: int) -> None:
    if not 1 <= shortest <= first <= longest:
        raise ValueError(
            "a round has at least 1 step, and the first round's steps are between the fewest and the most; got "
            f"{shortest}, {first} and {longest}"
        )
