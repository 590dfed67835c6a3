"""`LayerWise`: what LARS and LAMB share. Each tensor's step is as long as a fixed part of the tensor's own norm."""

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
    """An optimizer that steps every tensor by itself.

    `fused`: by the native core, tensor by tensor; False: by torch's operations on lists of tensors (foreach); None:
    small tensors by these, and large ones by the core where it is there.
    """

    def __init__(self, params: Iterable[Any], options: dict[str, Any], *, fused: bool | None) -> None:
        if fused and not available():
            raise ValueError("fused=True needs the native core, and there is none here; leave fused out")
        super().__init__(params, options | {"fused": fused})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; returns what `closure` did. Errors: RuntimeError for a sparse gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kernels: LayerKernels = self.__dict__.setdefault("_kernels", LayerKernels())  # not in what is pickled
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
        """Whether they update such a tensor."""
        plain = w.is_contiguous() and g.is_contiguous() and w.device.type == "cpu"
        return plain and w.dtype in DTYPES_UPDATED and g.dtype is w.dtype and available()

    def update_(
        self, rule: str, w: Tensor, g: Tensor, scale: float, out: Tensor, *moments: Tensor, **hyper: float
    ) -> None:
        """out ← w after a step of the rule on scale · g, with these hyper-parameters; the moments change in place."""
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
    """Whether a tensor's step depends on its norm: as its group says; else unless it is a bias or a gain."""
    return w.ndim > 1 if group["adapts"] is None else bool(group["adapts"])


def trust_ratio(of_weights: float, of_step: float) -> float:
    """of_weights / of_step, and 1 where one of these norms is 0."""
    return of_weights / of_step if of_weights > 0 and of_step > 0 else 1.0


def check_numbers(**given: float) -> None:
    """Raise ValueError that names what is negative, infinite or no number."""
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
