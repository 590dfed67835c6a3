"""`Masters`: a model's parameters in float32, while the model computes with 16-bit copies of them.

                   forward, backward        step of the optimizer                exchange of parameters, saving, loading
    parameter      16 bits                  float32                              float32
    gradient       16 bits, times S         float32, a chunk at a time           -

A step that is itself an exchange of both, as with a parameter server, is a `whole_step`.

The parameters stay the same objects, so optimizers, hooks and names know them as before. Their memory changes: 16 bits,
or, inside `in_float32`, the masters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from polytempo.core import NotFinite
from polytempo.core.state import Scalar
from polytempo.spec.precision import Precision
from polytempo.training.checkpoint.optimizer_state import plain_step, steps_each_by_itself
from polytempo.training.hooks.weak_hook import KeepingHook, WeakHook
from polytempo.training.model.parted_parameters import EPSILON
from polytempo.training.precision.quantised_weights import kept_float32, lowered
from polytempo.training.precision.reduced_forward import dtype_of, install

SCALING = "loss scaling"

_CHUNK_BYTES = 32 * 2**20
"""Bytes of float32 gradients that a step makes at a time."""


class _Gradient(NamedTuple):
    parameter: nn.Parameter
    value: Tensor
    """The gradient after backward and the strategy's exchange."""


class Masters:
    """Float32 parameters of `model`, which computes with 16-bit ones from now on.

    `called`: the modules that are called with batches; the model itself, unless it is made of stages.

    Memory: 4 bytes for each parameter, plus 2 for `forward` and `backward`. Errors: ValueError for parameters that are
    not float32, and for an optimizer that calls a closure.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, precision: Precision, called: Sequence[nn.Module] = ()
    ) -> None:
        check(model, optimizer, precision)
        self.precision, self.scaling = precision, LossScaling.of(precision)
        self.overflowed = False
        """True if all workers leave out the coming step."""
        self.left_out = False
        """True if all have left out the last one."""
        self._model, self._optimizer = model, optimizer
        wide = kept_float32(model, precision)
        self._parameters = [p for p in model.parameters() if p.is_floating_point() and id(p) not in wide]
        self._masters = [parameter.data for parameter in self._parameters]
        self._low: list[Tensor] = []
        """The 16-bit memory, while parameters are float32."""
        self._depth = 0
        self._gradients: list[_Gradient] | None = None
        self._clip = 1.0
        self._scaled = False
        for parameter in self._parameters:
            parameter.data = lowered(parameter.data, precision)
        self._versions = [parameter._version for parameter in self._parameters]
        modules = called or (model,)
        self._remove = [install(module, dtype_of(precision)) for module in modules if not precision.is_quantised]
        self._hooks = [hook for module in modules for each in module.modules() for hook in self._watched(each)]
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(WeakHook(self._begin_float32)))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(WeakHook(self._end_float32)))

    def _watched(self, module: nn.Module) -> list[RemovableHandle]:
        """Save and load states in float32, of single layers, too, and when the optimizer is gone."""
        begin, end = KeepingHook(self._begin_float32), KeepingHook(self._end_float32)
        return [
            module.register_state_dict_pre_hook(begin),
            module.register_state_dict_post_hook(end),
            module.register_load_state_dict_pre_hook(begin),
            module.register_load_state_dict_post_hook(end),
        ]

    def watch(self) -> list[RemovableHandle]:
        """Hook the optimizer's steps behind its other hooks, which prepare `.grad`. Later hooks find the parameters in
        16 bits again."""
        return [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    # ------------------------------------------------------------------ float32

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Inside, the parameters are the float32 ones. At the end changes are rounded to 16 bits."""
        self._begin_float32()
        try:
            yield
        finally:
            self._end_float32()

    @torch.no_grad()
    def _begin_float32(self, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._low = [parameter.data for parameter in self._parameters]
        for i, (parameter, master) in enumerate(zip(self._parameters, self._masters, strict=True)):
            if parameter._version != self._versions[i]:
                _take_edits_(master, self._low[i], self.precision)
            parameter.data = master
            self._versions[i] = parameter._version

    @torch.no_grad()
    def _end_float32(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        low, self._low = self._low, []
        for i, (parameter, master) in enumerate(zip(self._parameters, self._masters, strict=True)):
            parameter.data = low[i]
            if parameter._version != self._versions[i]:
                parameter.copy_(lowered(master, self.precision))
            self._versions[i] = parameter._version

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Inside, parameters and their gradients are float32, gradients without the loss scale and clipped; at the end
        there are no gradients. It takes the place of `watch`: the block is the step, the optimizer's own included."""
        with self.in_float32():
            self._widen_gradients()
            try:
                yield
            finally:
                for parameter in self._model.parameters():
                    parameter.grad = None

    def _widen_gradients(self) -> None:
        """Called while parameters are float32."""
        every = [_Gradient(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        factor, self._clip = self._clip / self.scaling.scale, 1.0
        _give(every, factor)

    # ------------------------------------------------------------------ losses and gradients

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward."""
        self._scaled = True
        return loss if self.scaling.scale == 1 else loss * self.scaling.scale

    def finite(self) -> bool:
        """True if all gradients for the step are finite. One pass over them."""
        return all(bool(_values(gradient.value).isfinite().all()) for gradient in self._present())

    def clip(self, norm: Tensor, max_norm: float) -> Tensor:
        """Limit the norm of the coming step's gradient to `max_norm`. `norm`: the norm of `.grad` now."""
        own = norm.cpu() / self.scaling.scale
        self._clip = min(1.0, max_norm / (float(own) + EPSILON))
        return own

    def _present(self) -> list[_Gradient]:
        held = (p for group in self._optimizer.param_groups for p in group["params"])
        return [_Gradient(p, p.grad) for p in held if p.grad is not None]

    @property
    def row(self) -> dict[str, float]:
        """Values for rows of metrics, if the loss scale changes."""
        if not self.scaling.dynamic:
            return {}
        return {"loss_scale": self.scaling.scale, "skipped_steps": self.scaling.skipped}

    def report(self) -> dict[str, Any]:
        """Values for `Result.precision`."""
        scaling = {"loss_scale": self.scaling.scale, "skipped_steps": self.scaling.skipped}
        return {"dtype": str(self.precision)} | bytes_of(self._model, self.precision) | scaling

    def saved(self) -> dict[str, Scalar]:
        """The state of a run beside its parameters."""
        return {SCALING: json.dumps(self.scaling._asdict())}

    def restore(self, scalars: Mapping[str, Scalar]) -> None:
        """Go on from the result of `saved`, if losses were scaled alike then."""
        if SCALING in scalars:
            found = LossScaling(**json.loads(str(scalars[SCALING])))
            if found.dynamic and self.scaling.dynamic:
                self.scaling = found

    # ------------------------------------------------------------------ the step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the step of all chunks of the gradients but the last; torch's own step makes that."""
        if self._gradients is not None:  # an optimizer's `step` that calls its parent's runs all hooks twice
            return
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise self.closure()
        gradients = self._present()
        if self.scaling.scale != 1 and gradients and not self._scaled:
            raise RuntimeError(
                f"precision={self.precision} divides gradients by the loss scale, and this loss was not multiplied by "
                "it; write handle.scaled(loss).backward()"
            )
        factor, self._clip, self._scaled = self._clip / self.scaling.scale, 1.0, False
        self._begin_float32()
        self._gradients = gradients
        for gradient in gradients:
            gradient.parameter.grad = None
        if self.overflowed:
            return
        *most, last = self._chunks(gradients)
        for chunk in most:
            _give(chunk, factor)
            plain_step(optimizer)
            _take_back(chunk)
        _give(last, factor)

    def closure(self) -> ValueError:
        """The error for a step with a closure."""
        return ValueError(
            f"precision={self.precision}: {type(self._optimizer).__name__}.step was given a closure, which would "
            "compute with float32 parameters; call backward() before step()"
        )

    def _after_step(self, *_: Any) -> None:
        if self._gradients is None:
            return
        gradients, self._gradients = self._gradients, None
        _take_back(gradients)
        self._end_float32()
        for gradient in gradients:
            gradient.parameter.grad = gradient.value
        self.scaling = self.scaling.after(overflowed=self.overflowed)
        self.left_out, self.overflowed = self.overflowed, False

    def _chunks(self, gradients: Sequence[_Gradient]) -> list[list[_Gradient]]:
        """Gradients that are converted together; the last chunk may be empty."""
        if not steps_each_by_itself(self._optimizer):
            return [list(gradients)]
        chunks: list[list[_Gradient]] = [[]]
        room = _CHUNK_BYTES
        for gradient in gradients:
            num_bytes = 4 * gradient.value.numel()
            if chunks[-1] and num_bytes > room:
                chunks.append([])
                room = _CHUNK_BYTES
            chunks[-1].append(gradient)
            room -= num_bytes
        return chunks

    def end(self) -> None:
        """The model is one of float32 again, with its gradients, and computes as it did."""
        for hook in self._hooks:
            hook.remove()
        for remove in self._remove:
            remove()
        self._begin_float32()
        self._low = []
        self._widen_gradients()


def clip_alone(parameters: Iterable[nn.Parameter], masters: Masters | None, max_norm: float) -> Tensor:
    """Clip a worker's own gradient as torch does, and return its norm. With masters the coming step does the scaling,
    and `.grad` stays as it is."""
    held = [p for p in parameters if p.grad is not None]
    if masters is None:
        return nn.utils.clip_grad_norm_(held, max_norm)
    return masters.clip(nn.utils.get_total_norm([p.grad.float() for p in held if p.grad is not None]), max_norm)


def masters_of(
    model: nn.Module, optimizer: Optimizer, precision: Precision | None, called: Sequence[nn.Module] = ()
) -> Masters | None:
    """The masters of `model`, which computes in 16 bits from now on; None without a precision."""
    return None if precision is None else Masters(model, optimizer, precision, called)


def bytes_of(model: nn.Module, precision: Precision) -> dict[str, int]:
    """Bytes of a model's parameters as they are in memory, and of their float32 masters."""
    wide = kept_float32(model, precision)
    every = [p.numel() * (1 if id(p) in wide else -1) for p in model.parameters() if p.is_floating_point()]
    kept, low = sum(n for n in every if n > 0), -sum(n for n in every if n < 0)
    return {"parameter_bytes": 4 * kept + (4 if precision.is_quantised else 2) * low, "master_bytes": 4 * low}


def check(model: nn.Module, optimizer: Optimizer, precision: Precision) -> None:
    """Raise ValueError where `model` and `optimizer` cannot train with `precision`."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"precision={precision}: parameter {name!r} is {dtype}, and masters are made of float32 parameters; "
                "give a float32 model, model.float(), or leave precision out"
            )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            f"precision={precision}: {type(optimizer).__name__} calls a closure, which would compute with float32 "
            "parameters; use an optimizer that makes its step of one gradient, or leave precision out"
        )


def _take_edits_(master: Tensor, low: Tensor, precision: Precision) -> None:
    """master ← low where low is not the master's number in fewer bits: the copy was changed in place."""
    master.copy_(torch.where(low == lowered(master, precision), master, low.to(master.dtype)))


def _give(gradients: Sequence[_Gradient], factor: float) -> None:
    for parameter, value in gradients:
        wide = value.to(torch.float32)
        if factor != 1:
            wide = wide * factor if wide is value else wide.mul_(factor)
        parameter.grad = wide


def _take_back(gradients: Sequence[_Gradient]) -> None:
    for gradient in gradients:
        gradient.parameter.grad = None


def _values(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient._values()


_FIRST = 2.0**16
_GROWTH_INTERVAL = 2000
_MOST = 2.0**24
_LEAST = 2.0**-14
"""A gradient that overflows even so is beyond 10^9."""


class LossScaling(NamedTuple):
    """A loss scale and its history; the same on all workers of a run."""

    scale: float
    dynamic: bool
    good_steps: int = 0
    """Since the scale changed last."""
    skipped: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScaling:
        """The scaling before the first step."""
        if precision.is_dynamic:
            return cls(_FIRST, dynamic=True)
        return cls(1.0 if precision.loss_scale is None else float(precision.loss_scale), dynamic=False)

    def after(self, *, overflowed: bool) -> LossScaling:
        """The scaling after a step with finite gradients, or that was left out because they `overflowed`."""
        if not self.dynamic:
            return self
        if overflowed:
            return self._replace(scale=self.scale / 2, good_steps=0, skipped=self.skipped + 1)
        if self.good_steps + 1 < _GROWTH_INTERVAL:
            return self._replace(good_steps=self.good_steps + 1)
        return self._replace(scale=min(2 * self.scale, _MOST), good_steps=0)

    def check(self, step: int) -> None:
        """Raise NotFinite where no scale is small enough: then it is not the scale that overflows."""
        if self.scale < _LEAST:
            raise NotFinite(
                "",
                None,
                float("inf"),
                "the gradient",
                step=step,
                advice=f"at a loss scale of {2 * self.scale:g}, too, and {self.skipped} steps were left out; look at "
                "the batch, the loss and the learning rate, or use bf16, which has the range of float32",
            )
