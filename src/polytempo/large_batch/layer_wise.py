"""LARS and LAMB: momentum SGD and Adam with a step in each tensor as long as a fixed part of the tensor's own norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.native.kernels.step import RULES, Hyper
from polytempo.native.kernels.update import DTYPES_UPDATED, Updater, lamb_direction_, squares
from polytempo.native.library import available

_SMALL = 4096
"""Elements of a tensor below which a kernel's call takes longer than its pass."""


class LayerWise(Optimizer):
    """An optimizer that steps every tensor separately.

    `fused`: by the native core, tensor by tensor; False: by torch's operations on lists of tensors (foreach); None:
    small tensors by these, and large ones by the core where it is there.
    """

    def __init__(self, params: Iterable[Any], options: dict[str, Any], *, fused: bool | None) -> None:
        if fused and not available():
            raise ValueError("fused=True needs the native core, and there is none here; leave fused out")
        super().__init__(params, options | {"fused": fused})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; returns the loss of `closure`. Errors: RuntimeError for a sparse gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kernels: LayerKernels = self.__dict__.setdefault("_kernels", LayerKernels())  # not pickled
        for group in self.param_groups:
            together: list[nn.Parameter] = []
            for w in group["params"]:
                if w.grad is None:
                    continue
                small = w.numel() < _SMALL and group["fused"] is None
                if group["fused"] is False or small or not kernels.take(w, dense(w.grad, type(self).__name__)):
                    together.append(w)
                else:
                    self.descend(w, w.grad, group, kernels)
            if together:
                self.descend_together(together, [dense(_gradient(w), type(self).__name__) for w in together], group)
        return loss

    def descend(self, w: nn.Parameter, g: Tensor, group: dict[str, Any], kernels: LayerKernels) -> None:
        """Step one tensor by its gradient, by the native core."""
        raise NotImplementedError

    def descend_together(self, ws: list[nn.Parameter], gs: list[Tensor], group: dict[str, Any]) -> None:
        """Step tensors by their gradients, by torch."""
        raise NotImplementedError

    def kept(self, w: nn.Parameter, *names: str) -> list[Tensor]:
        """Tensors of the state that are shaped like w, and 0 at the beginning."""
        state = self.state[w]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(w, memory_format=torch.preserve_format)
        return [state[name] for name in names]


class LayerKernels:
    """The native updates of one optimizer, and memory for them."""

    def __init__(self) -> None:
        self._updater = cache(lambda rule, dtype: Updater(Hyper(rule=RULES[rule]), dtype))
        self._scratch: dict[torch.dtype, Tensor] = {}

    def take(self, w: Tensor, g: Tensor) -> bool:
        """True if they update such a tensor."""
        plain = w.is_contiguous() and g.is_contiguous() and w.device.type == "cpu"
        return plain and w.dtype in DTYPES_UPDATED and g.dtype is w.dtype and available()

    def update_(
        self, rule: str, w: Tensor, g: Tensor, scale: float, out: Tensor, *moments: Tensor, **hyper: float
    ) -> None:
        """Put w after a step of the rule on scale · g into out, with these hyper-parameters; moments change in
        place."""
        updater = self._updater(rule, w.dtype)
        for name, value in hyper.items():
            setattr(updater.hyper, name, value)
        updater.update_([g.view(-1)], [scale], w.view(-1), out, *(moment.view(-1) for moment in moments))

    def norms(self, a: Tensor, b: Tensor) -> tuple[float, float]:
        """‖a‖ and ‖b‖ of two tensors of one shape, in one pass over both."""
        of_a, of_b = squares(a.view(-1), b.view(-1))
        return math.sqrt(of_a), math.sqrt(of_b)

    def lamb_(self, w: Tensor, g: Tensor, m: Tensor, v: Tensor, **hyper: float) -> tuple[Tensor, float, float]:
        """u, ‖w‖ and ‖u‖ after m and v have taken g in, in one pass; u is memory until the next call."""
        numbers, u = Hyper(**hyper), self._scratch_for(w)
        of_w, of_u = lamb_direction_(numbers, g.view(-1), w.view(-1), m.view(-1), v.view(-1), u)
        return u.view_as(w), math.sqrt(of_w), math.sqrt(of_u)

    def _scratch_for(self, w: Tensor) -> Tensor:
        """Flat memory as large as w."""
        held = self._scratch.get(w.dtype)
        if held is None or held.numel() < w.numel():
            held = self._scratch[w.dtype] = torch.empty(w.numel(), dtype=w.dtype)
        return held[: w.numel()]


def adapts(w: nn.Parameter, group: dict[str, Any]) -> bool:
    """True if a tensor's step depends on its norm: as its group says; else unless it is a bias or a gain."""
    return w.ndim > 1 if group["adapts"] is None else bool(group["adapts"])


def trust_ratio(of_weights: float, of_step: float) -> float:
    """of_weights / of_step, and 1 where one of these norms is 0."""
    return of_weights / of_step if of_weights > 0 and of_step > 0 else 1.0


def check_numbers(**given: float) -> None:
    """Raise ValueError that names a negative number, an infinity or NaN."""
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """‖x‖ of each tensor, by torch."""
    return [float(each) for each in torch._foreach_norm(list(tensors))]


def _gradient(w: nn.Parameter) -> Tensor:
    assert w.grad is not None
    return w.grad


def dense(gradient: Tensor, optimizer: str) -> Tensor:
    """The gradient itself. Raises RuntimeError for a sparse one, which has the norm of some rows alone."""
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"{optimizer} takes dense gradients, and one is {gradient.layout}; make the embedding with sparse=False"
        )
    return gradient


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling, for large batches with momentum SGD.

        λ = η ‖w‖ / (‖g‖ + β ‖w‖)        v ← m v + γ λ (g + β w)        w ← w - v

    for every parameter tensor w separately, with its gradient g, learning rate γ, momentum m, weight decay β and trust
    coefficient η. λ = 1 where ‖w‖ or ‖g‖ is 0. Tensors of one dimension or none (biases, gains of norms) are stepped as
    by SGD, with λ = 1 and β = 0, unless their parameter group says `adapts=True`; False is for all of a group.

    The learning rate stands inside the momentum, as in the paper: under a schedule, earlier steps keep the rate that
    they were made with (`torch.optim.SGD` multiplies afterwards). With `corrects_momentum` they get the present one: v
    is multiplied by m γₜ / γₜ₋₁ in the place of m (P. Goyal et al., 2017, remark 2).

    State: v, as large as the parameters, and with `corrects_momentum` the last rate.
    Cost: two norms and one update a tensor.
    Errors: ValueError for a number out of its range; RuntimeError for a sparse gradient.
    Source: Y. You, I. Gitman and B. Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        *,
        adapts: bool | None = None,
        corrects_momentum: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_numbers(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        if trust == 0:
            raise ValueError("trust is 0, and each layer's step would be; give a positive one, such as 0.001")
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapts": adapts}
        super().__init__(params, options | {"corrects_momentum": corrects_momentum}, fused=fused)

    def descend(self, w: nn.Parameter, g: Tensor, group: dict[str, Any], kernels: LayerKernels) -> None:
        """See `LayerWise`."""
        of_w, of_g = kernels.norms(w, g) if adapts(w, group) else (0.0, 0.0)
        rate, decay = _scaled(w, group, of_w, of_g)
        (v,) = self.kept(w, "momentum_buffer")
        numbers = {"lr": 1.0, "momentum": self._momentum(w, group), "weight_decay": rate * decay}
        kernels.update_("sgd", w, g, rate, w.view(-1), v, **numbers)

    def descend_together(self, ws: list[nn.Parameter], gs: list[Tensor], group: dict[str, Any]) -> None:
        """See `LayerWise`."""
        values = list[Tensor](ws)
        each = [_scaled(w, group, *norms) for w, *norms in zip(ws, norms_of(values), norms_of(gs), strict=True)]
        vs = [self.kept(w, "momentum_buffer")[0] for w in ws]
        moved = torch._foreach_add(gs, torch._foreach_mul(values, [decay for _, decay in each]))
        torch._foreach_mul_(moved, [rate for rate, _ in each])
        torch._foreach_mul_(vs, [self._momentum(w, group) for w in ws])
        torch._foreach_add_(vs, moved)
        torch._foreach_sub_(values, vs)

    def _momentum(self, w: nn.Parameter, group: dict[str, Any]) -> float:
        """The factor of v in this step."""
        momentum = float(group["momentum"])
        if not group["corrects_momentum"]:
            return momentum
        now, state = float(group["lr"]), self.state[w]
        before, state["lr"] = state.get("lr", now), now
        return momentum * now / before if before > 0 else momentum


def _scaled(w: nn.Parameter, group: dict[str, Any], of_w: float, of_g: float) -> tuple[float, float]:
    """γλ and β of a tensor, from its norm and its gradient's."""
    rate = float(group["lr"])
    if not adapts(w, group):
        return rate, 0.0
    decay = float(group["weight_decay"])
    return rate * trust_ratio(of_w * group["trust"], of_g + decay * of_w if of_g > 0 else 0.0), decay


class LAMB(LayerWise):
    """Layer-wise adaptive moments, for large batches with Adam.

        m ← β₁ m + (1 - β₁) g            m̂ = m / (1 - β₁ᵗ)
        v ← β₂ v + (1 - β₂) g²           v̂ = v / (1 - β₂ᵗ)
        u = m̂ / (√v̂ + ε) + λ w           w ← w - γ ‖w‖ / ‖u‖ · u

    for every parameter tensor w separately, with its gradient g, learning rate γ and weight decay λ. The ratio is 1
    where ‖w‖ or ‖u‖ is 0. Tensors of one dimension or none (biases, gains of norms) are stepped as by Adam, with ratio
    1 and λ = 0, unless their parameter group says `adapts=True`; False is for all of a group.

    Deviation: the paper's φ(‖w‖), a norm within bounds that it leaves open, is ‖w‖, as in its experiments.

    State: m and v, each as large as the parameters. Cost: a pass over all that also sums the squares,
    another one over w and u, and memory for the largest u.
    Errors: ValueError for a number out of its range; RuntimeError for a sparse gradient.
    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapts: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are at least 0 and below 1, got {betas}")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapts": adapts}
        super().__init__(params, options, fused=fused)

    def descend(self, w: nn.Parameter, g: Tensor, group: dict[str, Any], kernels: LayerKernels) -> None:
        """See `LayerWise`."""
        (m, v), (beta1, beta2), decay = self._moments(w), group["betas"], _decay(w, group)
        numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": decay, "step": self._counted(w)}
        u, of_w, of_u = kernels.lamb_(w, g, m, v, **numbers)
        w.sub_(u, alpha=group["lr"] * (trust_ratio(of_w, of_u) if adapts(w, group) else 1.0))

    def descend_together(self, ws: list[nn.Parameter], gs: list[Tensor], group: dict[str, Any]) -> None:
        """See `LayerWise`."""
        ms, vs = (list(each) for each in zip(*map(self._moments, ws), strict=True))
        steps, (beta1, beta2) = [self._counted(w) for w in ws], group["betas"]
        torch._foreach_lerp_(ms, gs, 1 - beta1)
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)
        roots = torch._foreach_div(vs, [1 - beta2**t for t in steps])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(roots, [1 - beta1**t for t in steps])
        us = torch._foreach_div(ms, roots)
        values = list[Tensor](ws)
        torch._foreach_add_(us, torch._foreach_mul(values, [_decay(w, group) for w in ws]))
        ratios = map(trust_ratio, norms_of(values), norms_of(us))
        rates = [-group["lr"] * (ratio if adapts(w, group) else 1.0) for w, ratio in zip(ws, ratios, strict=True)]
        torch._foreach_mul_(us, rates)
        torch._foreach_add_(values, us)

    def _moments(self, w: nn.Parameter) -> list[Tensor]:
        return self.kept(w, "exp_avg", "exp_avg_sq")

    def _counted(self, w: nn.Parameter) -> int:
        """The number of this step of a tensor, from 1."""
        state = self.state[w]
        if "step" not in state:
            state["step"] = torch.zeros(())
        return int(state["step"].add_(1))


def _decay(w: nn.Parameter, group: dict[str, Any]) -> float:
    return float(group["weight_decay"]) if adapts(w, group) else 0.0
