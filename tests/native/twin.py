"""The native core's arithmetic (`native/kernels.h`) in plain PyTorch: the oracle of its tests.

Both give the same bits, wherever the result is a number; the payload of a NaN is left open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Order = Literal["linear", "tree"]
Combine = Callable[[Tensor, Tensor], Tensor]


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller; NaN where either is one; of two zeros the first."""
    return torch.where((b < a) | (b != b), b, a)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger; NaN where either is one; of two zeros the first."""
    return torch.where((b > a) | (b != b), b, a)


_COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "average": torch.add,
    "min": minimum,
    "max": maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_COMBINE_BOOLS: dict[str, Combine] = _COMBINE | {
    "sum": torch.logical_or,
    "max": torch.logical_or,
    "product": torch.logical_and,
    "min": torch.logical_and,
}


def supports(dtype: torch.dtype, op: str) -> bool:
    """True if `op` is defined for `dtype`: bit operations are not on floats, the average is on floats only."""
    return op not in ("band", "bor", "bxor") if dtype.is_floating_point else op != "average"


def reduce(sources: Sequence[Tensor], op: str, order: Order = "linear") -> Tensor:
    """`op` over all sources, which are of one dtype and shape. The twin of `pt::reduce`.

    linear: ((s0 + s1) + s2) + …; tree: left + right, where left is the same tree over the first 2^k sources and 2^k is
    the largest power of two below their number. bf16 and f16 accumulate in f32 and round once, to nearest even. An
    average is the sum divided by the number of sources, correctly rounded. Integers wrap around.
    """
    dtype = sources[0].dtype
    if not supports(dtype, op):
        raise ValueError(
            f"{op} of {dtype} is not defined; floats have no bit operations, and only they have an average"
        )
    combine = (_COMBINE_BOOLS if dtype == torch.bool else _COMBINE)[op]
    wide = [source.float() if dtype in (torch.bfloat16, torch.float16) else source for source in sources]
    result = (_in_a_tree if order == "tree" else _in_a_row)(wide, combine)
    if op == "average":
        result = result / torch.full_like(result, len(sources))
    return result.to(dtype)


def _in_a_row(sources: Sequence[Tensor], combine: Combine) -> Tensor:
    result = sources[0]
    for source in sources[1:]:
        result = combine(result, source)
    return result


def _in_a_tree(sources: Sequence[Tensor], combine: Combine) -> Tensor:
    if len(sources) == 1:
        return sources[0]
    left = 1 << (len(sources) - 1).bit_length() - 1
    return combine(_in_a_tree(sources[:left], combine), _in_a_tree(sources[left:], combine))


@dataclass(frozen=True)
class TwinHyper:
    """The numbers of an optimizer's step; `rule` is "sgd", "adam", "adamw" or "adagrad", `step` counts from 1.

    `first`: this step makes SGD's momentum buffer. The fields are `pt::Hyper`'s, in its order.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    lr_decay: float = 0.0
    step: int = 1
    rule: str = "sgd"
    nesterov: bool = False
    maximize: bool = False
    first: bool = False


State = tuple[Tensor, Tensor | None, Tensor | None]


def update(
    hyper: TwinHyper,
    gradients: Sequence[Tensor | None],
    weights: Tensor,
    p: Tensor,
    m: Tensor | None = None,
    v: Tensor | None = None,
) -> State:
    """p, m and v after one step of `hyper.rule` on g = Σ weights[r] · gradients[r]. The twin of `pt::update`.

    m is SGD's momentum buffer or Adam's exp_avg, v is exp_avg_sq or Adagrad's sum; None where the rule has none. All
    arithmetic is in f64, in the order written here; each result rounds once, to p's dtype.
    """
    wide_m, wide_v = (None if state is None else state.double() for state in (m, v))
    g = _gather(hyper, gradients, weights, p.double())
    new_p, new_m, new_v = _RULES[hyper.rule](hyper, g, p.double(), wide_m, wide_v)
    return (
        new_p.to(p.dtype),
        None if new_m is None else new_m.to(p.dtype),
        None if new_v is None else new_v.to(p.dtype),
    )


def _gather(hyper: TwinHyper, gradients: Sequence[Tensor | None], weights: Tensor, p: Tensor) -> Tensor:
    """Σ ± weights[r] · gradients[r] (+ decay · p, but AdamW decays p itself)."""
    sign = -1.0 if hyper.maximize else 1.0
    terms = [
        sign * weight * gradient.double()
        for gradient, weight in zip(gradients, weights.tolist(), strict=True)
        if gradient is not None
    ]
    if hyper.weight_decay != 0 and hyper.rule != "adamw":
        terms.append(hyper.weight_decay * p)
    return _in_a_row(terms, torch.add) if terms else torch.zeros_like(p)


def _sgd(hyper: TwinHyper, g: Tensor, p: Tensor, m: Tensor | None, v: Tensor | None) -> State:
    if hyper.momentum == 0:
        return p - hyper.lr * g, None, None
    if hyper.first:
        m = g
    else:
        assert m is not None, "SGD's momentum buffer is made by its first step"
        m = hyper.momentum * m + (1 - hyper.dampening) * g
    return p - hyper.lr * (g + hyper.momentum * m if hyper.nesterov else m), m, None


def _adam(hyper: TwinHyper, g: Tensor, p: Tensor, m: Tensor | None, v: Tensor | None) -> State:
    assert m is not None, "Adam has a first moment"
    assert v is not None, "Adam has a second moment"
    m = m + (1 - hyper.beta1) * (g - m)
    v = hyper.beta2 * v + (1 - hyper.beta2) * (g * g)
    step_size = hyper.lr / (1 - hyper.beta1**hyper.step)
    root = 1 / math.sqrt(1 - hyper.beta2**hyper.step)
    keep = 1 - hyper.lr * hyper.weight_decay if hyper.rule == "adamw" else 1.0
    return p * keep - step_size * m / (_square_root(v) * root + hyper.eps), m, v


def _adagrad(hyper: TwinHyper, g: Tensor, p: Tensor, m: Tensor | None, v: Tensor | None) -> State:
    assert v is not None, "Adagrad has a sum of squares"
    v = v + g * g
    step_size = hyper.lr / (1 + (hyper.step - 1) * hyper.lr_decay)
    return p - step_size * g / (_square_root(v) + hyper.eps), None, v


def _square_root(x: Tensor) -> Tensor:
    """√x, correctly rounded as IEEE 754 asks; torch's own is one ulp off at one f64 in a hundred."""
    return torch.from_numpy(np.sqrt(x.numpy()))


_RULES = {"sgd": _sgd, "adam": _adam, "adamw": _adam, "adagrad": _adagrad}
