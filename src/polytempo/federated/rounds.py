"""`in_rounds`: a strategy of rounds of clients, and the rules that weigh them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from polytempo.aggregation import mean
from polytempo.collectives.invariant import Invariant
from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.core.strategy import InRounds, LocalTraining, any_optimizer

CONTROL = "control/"
"""The beginning of a control variate's name, before its parameter's."""
Shares = Callable[[Tensor, LocalTraining], Tensor]
_PLAIN = partial(SGD, lr=1.0)
"""θ ← θ - Δ."""


def by_samples(samples: Tensor, local: LocalTraining) -> Tensor:
    """nₖ / Σ n."""
    return samples / samples.sum()


def normalised(samples: Tensor, local: LocalTraining) -> Tensor:
    """pₖ τ_eff / τₖ with pₖ = nₖ / Σ n, τₖ steps of client k, and τ_eff = Σ pₖ τₖ: movements for equally many steps."""
    parts, steps = by_samples(samples, local), local.steps(samples)
    return parts * (parts * steps).sum() / steps


def plain_steps(strategy: Strategy, optimizer: Optimizer) -> Strategy:
    """The strategy, for an optimizer with sums of gradients as movements; else `Incompatible` (PT2510)."""
    plain = type(optimizer) is SGD
    if not plain or any(group["momentum"] or group.get("maximize") for group in optimizer.param_groups):
        refuse({"control variates", "another optimizer"}, strategy=strategy, optimizer=type(optimizer).__name__)
    return strategy


def unserved(strategy: Strategy) -> str | None:
    """The need of a strategy that clients on machines of their own do not meet; None: they meet all."""
    rounds = strategy.rounds
    if rounds is None:
        return "it has no rounds"
    if rounds.local.buffering is not None and rounds.local.buffering.lost:
        return "lost= loses movements of simulated clients; leave it out"
    if rounds.secure is not None and rounds.local.buffering is not None:
        return "a secure sum is of clients that answer in the same round"
    if rounds.secure is not None and rounds.privacy is not None:
        return "its draws may have a single client, which no sum hides"
    return None


def rounds_of(inner: Strategy, who: str) -> InRounds:
    """The rounds of a strategy for `who` to change. ValueError for a strategy without clients."""
    if inner.rounds is None:
        raise ValueError(f"{who} changes rounds of clients, and {inner} has none; give it fed_avg(cohort=10), say")
    return inner.rounds


def in_rounds(
    name: str,
    cohort: int,
    local: LocalTraining,
    shares: Shares = by_samples,
    server: Callable[[Iterable[nn.Parameter]], Optimizer] = _PLAIN,
) -> Strategy:
    """The strategy of rounds with `cohort` clients each. ValueError for impossible numbers."""
    check_whole(cohort=cohort, epochs=local.epochs, head_epochs=local.head_epochs)
    if cohort < 1 or local.epochs < 1 or (local.batch_size is not None and local.batch_size < 1):
        raise ValueError(
            f"a round needs at least a client, an epoch and a sample in a batch; got cohort={cohort}, "
            f"epochs={local.epochs}, batch_size={local.batch_size}"
        )
    if local.head_epochs < 0:
        raise ValueError(f"head_epochs must be at least 0, got {local.head_epochs}")
    if not local.proximal >= 0:
        raise ValueError(f"mu must be at least 0, got {local.proximal}")
    meeting = InRounds(cohort, local, shares, server)
    fit = plain_steps if local.controls else any_optimizer
    return Strategy(name, gradients=mean(Invariant(cohort)), meeting=meeting, fit=fit)
