"""The optimizer inside a shard: out of place on flat tensors, so that weights which are lent stay as they are.

`out` ← one step of an `UpdateRule` from `weights` on g = Σ factorᵢ · gradientᵢ / divisor. Learning rates, factors and
the divisor may differ between parameter groups (`server.step_rates`). There are two ways to compute it, and a run keeps
to one of them in all its shards and their copies, because their bits differ:

    torch ops       as torch.optim does with foreach=False, operation by operation, so one worker without delay gets
                    the bits that it would get alone; several passes over memory
    native kernel   one pass; f64 inside, each result rounded once, so it is at most 1/2 ulp (plus the rounding of
                    factor/divisor to the tensors' dtype) away from the exact rule, and up to 1e-6 from torch's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from polytempo.core.rule import UpdateRule
from polytempo.native.kernels import update as kernels
from polytempo.native.kernels.step import RULES, Hyper
from polytempo.native.library import available
from polytempo.server.layout import Empty, Parameter, ParameterPart
from polytempo.server.step_rates import Factor, of_group

T = TypeVar("T")
_ALL = slice(None)
_TINY = 1e-300
"""Stands for Adagrad's ε = 0 in the kernel: added to a square root in f64 it changes nothing but 0/0, which is 0."""


class Term(NamedTuple):
    """A gradient and its factor in the sum."""

    gradient: Tensor
    factor: Factor


class Moments(NamedTuple):
    """An optimizer's memory, flat. SGD: its momentum buffer; Adam: mean and square; Adagrad: the sum of squares."""

    first: Tensor | None
    second: Tensor | None


class StepNumber(NamedTuple):
    """The number of a step, which is smaller for parameters that were left alone before."""

    whole: int
    """The first is 1."""
    unused: Collection[str] = ()
    """The parameters that the step leaves alone."""
    skipped: Mapping[str, int] = {}
    """Parameter -> the number of earlier steps that have left it alone, and this one if it does."""


def init(rule: UpdateRule, numel: int, dtype: torch.dtype, empty: Empty) -> Moments:
    """The moments before the first step."""
    adam = rule.kind in ("adam", "adamw")
    first = empty(numel, dtype).zero_() if adam or (rule.kind == "sgd" and rule.momentum) else None
    second = empty(numel, dtype).zero_() if adam or rule.kind == "adagrad" else None
    if second is not None and rule.kind == "adagrad":
        second.fill_(rule.initial)
    return Moments(first, second)


def can_be_native(dtype: torch.dtype) -> bool:
    """True if there is a kernel for tensors of this dtype here."""
    return available() and dtype in kernels.DTYPES_UPDATED


def first_unfinite(values: Tensor, native: bool) -> int:
    """The index of the first element that is NaN or infinite; -1 if there is none. Reads a flat tensor once."""
    if native and values.is_contiguous() and values.dtype in kernels.DTYPES_CHECKED:
        return kernels.unfinite(values)
    if math.isfinite(float(values.sum())):  # a sum may overflow, but no sum hides a NaN or an infinity
        return -1
    bad = (~torch.isfinite(values)).nonzero()
    return int(bad[0]) if len(bad) else -1


class Optimizer:
    """`rule` on a shard's own vector of `dtype`, which has the parameters `parts`.

    `native`: by the kernel, which needs float32 or float64 on the CPU, contiguous.
    """

    def __init__(self, rule: UpdateRule, parts: Sequence[ParameterPart], dtype: torch.dtype, *, native: bool) -> None:
        self.rule, self.native, self._parts = rule, native, parts
        self._groups = sorted({part.parameter.group for part in parts})
        self._whole = None if len(self._groups) > 1 else [(slice(None), self._groups[0] if self._groups else 0)]
        """The whole vector, where there is one parameter group."""
        self._own = None if rule.lr is None else (rule.lr,) * (self._groups[-1] + 1 if self._groups else 1)
        self._updater = kernels.Updater(_hyper(rule), dtype) if native else None

    def lacks(self, lrs: Sequence[float]) -> str:
        """The reason why these learning rates (one for each group) allow no step; "" if they allow it."""
        if self.rule.lr is None and self._groups and len(lrs) <= self._groups[-1]:
            return f"no learning rate for parameter group {self._groups[-1]}: lrs are {tuple(lrs)}"
        return ""

    @property
    def moves_by_zeros(self) -> bool:
        """True if a step on a gradient of zeros may change weights, moments or later steps."""
        return self.rule.kind != "sgd" or bool(self.rule.momentum or self.rule.weight_decay)

    def silent(self, gradient: Tensor, names: Collection[str]) -> list[str]:
        """The parameters among `names` with a gradient of zeros. An encoded gradient may bring residuals elsewhere."""
        found: dict[str, bool] = {}
        for (name, *_), begin, end in self._parts:
            if name in names:
                found[name] = found.get(name, True) and not (gradient.is_meta or gradient[begin:end].any())
        return [name for name, is_silent in found.items() if is_silent]

    def rates(self, lrs: tuple[float, ...], factor: float = 1.0) -> tuple[float, ...]:
        """`factor` times the learning rates of a push, or the rule's own where it has one."""
        own = lrs if self._own is None else self._own
        return own if factor == 1 else tuple(factor * lr for lr in own)

    def step_(
        self,
        weights: Tensor,
        out: Tensor,
        terms: Sequence[Term],
        divisor: Factor,
        moments: Moments,
        step: StepNumber,
        lrs: tuple[float, ...],
    ) -> None:
        """Make a step: `out` and `moments` are overwritten, `out` may be `weights`.

        `lrs`: its learning rates, for each parameter group; (): the rule's own. All tensors are flat and of one length.
        No terms: a step on a gradient of zeros. Cost: with the kernel one read of the weights and of each gradient and
        one write of `out`; moments are read and written once.
        """
        if weights.is_meta:
            return  # there are no values
        lrs = lrs if self._own is None or lrs else self._own
        if self.rule.kind == "sgd":
            moments = moments._replace(second=None)  # a modifier's
        factors = lrs, divisor, *(factor for _, factor in terms)
        for where, group, number in self._stepped(weights, out, step, factors):
            w, target, own = _at(weights, where), _at(out, where), [_at(gradient, where) for gradient, _ in terms]
            cut = Moments(*(None if moment is None else _at(moment, where) for moment in moments))
            shares = [of_group(factor, group) for _, factor in terms]
            lr, share = lrs[group] if lrs else 0.0, of_group(divisor, group)
            if self.rule.momentum_every > 1:
                own, shares = _with_delayed_momentum(self.rule, own, shares, share, cut.first, number)
                cut = Moments(None, None)
            if self._updater is None:
                gradient = _sum_of(list(zip(own, shares, strict=True)), share, w)
                _STEPS[self.rule.kind](self.rule, w, target, gradient, cut, number, lr)
            else:
                hyper = self._updater.hyper
                hyper.lr, hyper.step, hyper.first = lr, number, number == 1
                self._updater.update_(own, [each / share for each in shares], w, target, *cut)

    @property
    def descends(self) -> bool:
        """True if there is `descend_`: for SGD without momentum, by the kernel."""
        return self._updater is not None and self.rule.kind == "sgd" and not self.rule.momentum

    def descend_(self, weights: Tensor, out: Tensor, gradient: Tensor, scale: float, lrs: tuple[float, ...]) -> int:
        """A step on scale · gradient that looks at the gradient on its way, in the bits of `step_`.

        -1, or the index of the gradient's first element that is NaN or infinite, and then `out`, which must not be
        `weights`, is to be thrown away.
        """
        updater = self._updater
        assert updater is not None, "asked for only where `descends`"
        for where, group in self._whole or self._pieces(lrs):
            updater.hyper.lr = lrs[group]
            bad = updater.descend_(gradient[where], scale, weights[where], out[where])
            if bad >= 0:
                return (where.start or 0) + bad
        return -1

    def add_(self, total: Tensor, term: Term, *, fresh: bool) -> None:
        """total ← factor · gradient where `fresh`, else that is added. `gradient` may be `total` where `fresh`."""
        for where, group in self._whole or self._pieces(term.factor):
            _add_(total[where], term.gradient[where], of_group(term.factor, group), fresh=fresh)

    def _pieces(self, *factors: Factor) -> list[tuple[slice, int]]:
        """The parts of the vector with constant `factors`, each with a parameter group."""
        groups = self._groups
        if any(isinstance(factor, tuple) and len({factor[group] for group in groups}) > 1 for factor in factors):
            return list(self._runs(lambda parameter: parameter.group))
        return [(slice(None), groups[0])]

    def _runs(self, kind: Callable[[Parameter], T]) -> Iterator[tuple[slice, T]]:
        """The longest parts of the vector with parameters of one kind."""
        for value, parts in groupby(self._parts, lambda part: kind(part.parameter)):
            first, *rest = parts
            yield slice(first.begin, rest[-1].end if rest else first.end), value

    def _stepped(
        self, weights: Tensor, out: Tensor, step: StepNumber, factors: tuple[Factor, ...]
    ) -> list[tuple[slice, int, int]]:
        """The parts of the vector to update, each with a parameter group and a step number; the others are copied."""
        if not step.skipped:
            return [(where, group, step.whole) for where, group in self._whole or self._pieces(*factors)]
        pieces = []
        for where, (group, left, skipped) in self._runs(
            lambda p: (p.group, p.name in step.unused, step.skipped.get(p.name, 0))
        ):
            if not left:
                pieces.append((where, group, step.whole - skipped))
            elif out is not weights:
                out[where] = weights[where]
        return pieces


def _at(vector: Tensor, where: slice) -> Tensor:
    return vector if where == _ALL else vector[where]


def _with_delayed_momentum(
    rule: UpdateRule, gradients: list[Tensor], shares: list[float], divisor: float, buffer: Tensor | None, step: int
) -> tuple[list[Tensor], list[float]]:
    """The terms of a step without momentum, and in every N-th one μv: v ← μv + the sum of the last N gradients."""
    assert buffer is not None, "delayed momentum has a buffer"
    if step % rule.momentum_every == 1:
        buffer.mul_(rule.momentum)
    for gradient, share in zip(gradients, shares, strict=True):
        buffer.add_(gradient, alpha=share / divisor)
    if step % rule.momentum_every:
        return gradients, shares
    return [*gradients, buffer], [*shares, rule.momentum * divisor]


def _hyper(rule: UpdateRule) -> Hyper:
    """The rule as the kernel knows it; `lr`, `step` and `first` are set before each step."""
    delayed = rule.momentum_every > 1
    eps = _TINY if rule.kind == "adagrad" and rule.eps == 0 else rule.eps
    return Hyper(
        weight_decay=rule.weight_decay,
        momentum=0.0 if delayed else rule.momentum,
        dampening=rule.dampening,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        eps=eps,
        lr_decay=rule.lr_decay,
        rule=RULES[rule.kind],
        nesterov=rule.nesterov and not delayed,
        maximize=rule.maximize,
    )


def _add_(total: Tensor, gradient: Tensor, factor: float, *, fresh: bool) -> None:
    """total ← factor · gradient where `fresh`, else that is added."""
    if not fresh:
        total.add_(gradient, alpha=factor)
    elif factor == 1:
        total.copy_(gradient)
    else:
        torch.mul(gradient, factor, out=total)


# ------------------------------------------------------------------------------- operation by operation, as torch.optim


def _sum_of(terms: Sequence[tuple[Tensor, float]], divisor: float, like: Tensor) -> Tensor:
    """Σ factor · gradient / divisor. Read-only: it is a gradient itself where that is the same."""
    if not terms:
        return torch.zeros_like(like)
    gradient, factor = terms[0]
    if len(terms) > 1 or factor != 1:
        gradient = torch.empty_like(like)
        for i, (each, factor) in enumerate(terms):
            _add_(gradient, each, factor, fresh=i == 0)
    return gradient if divisor == 1 else gradient / divisor


def _directed(rule: UpdateRule, gradient: Tensor, weights: Tensor) -> Tensor:
    """The gradient to descend, with weight decay in it."""
    if rule.maximize:
        gradient = -gradient
    return gradient.add(weights, alpha=rule.weight_decay) if rule.weight_decay else gradient


def _sgd_(rule: UpdateRule, w: Tensor, out: Tensor, g: Tensor, moments: Moments, step: int, lr: float) -> None:
    g = _directed(rule, g, w)
    buffer = moments.first
    if buffer is not None:
        if step == 1:
            buffer.copy_(g)
        else:
            buffer.mul_(rule.momentum).add_(g, alpha=1 - rule.dampening)
        g = g.add(buffer, alpha=rule.momentum) if rule.nesterov else buffer
    torch.add(w, g, alpha=-lr, out=out)


def _adagrad_(rule: UpdateRule, w: Tensor, out: Tensor, g: Tensor, moments: Moments, step: int, lr: float) -> None:
    """Duchi et al. 2011, (1), as Dean et al. 2012, §4.1 use it: the accumulator includes the present gradient."""
    g = _directed(rule, g, w)
    total = moments.second
    assert total is not None, "Adagrad has a sum of squares"
    total.addcmul_(g, g, value=1)
    root = total.sqrt()
    if rule.eps:
        root.add_(rule.eps)
    else:
        root.masked_fill_(total == 0, math.inf)  # without ε, a weight that never had a gradient stays: 0/0 is 0
    torch.addcdiv(w, g, root, value=-lr / (1 + (step - 1) * rule.lr_decay), out=out)


def _adam_(rule: UpdateRule, w: Tensor, out: Tensor, g: Tensor, moments: Moments, step: int, lr: float) -> None:
    beta1, beta2 = rule.betas
    mean, square = moments
    assert mean is not None, "Adam has a first moment"
    assert square is not None, "Adam has a second moment"
    if rule.kind == "adamw":
        g = -g if rule.maximize else g
        w = torch.mul(w, 1 - lr * rule.weight_decay, out=out)
    else:
        g = _directed(rule, g, w)
    mean.lerp_(g, 1 - beta1)
    square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(rule.eps)
    torch.addcdiv(w, mean, root, value=-(lr / (1 - beta1**step)), out=out)


_STEPS = {"sgd": _sgd_, "adagrad": _adagrad_, "adam": _adam_, "adamw": _adam_}
