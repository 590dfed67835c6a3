"""Linear and convolution layers that put the gradient of their weights off: the second half of a backward pass.

    backward pass      ∂L/∂x = Wᵀ ∂L/∂y at once; (x, ∂L/∂y) is kept
    weight gradient    ∂L/∂W = ∂L/∂y xᵀ, when the stage has nothing else to do

Other layers' parameters (norms, embeddings) have their gradient at once: it costs as little as it is small.
Source: P. Qi et al., "Zero bubble pipeline parallelism", 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Later = Callable[[], None]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@contextmanager
def deferred(module: nn.Module, queue: list[Later]) -> Iterator[None]:
    """Inside, forward passes of `module` build graphs whose backward passes put weight gradients into `queue`."""
    layers = [m for m in module.modules() if type(m) in (nn.Linear, *_CONVOLUTIONS) and m.weight.requires_grad]
    for layer in layers:
        layer.forward = _linear(layer, queue) if type(layer) is nn.Linear else _convolution(layer, queue)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _linear(layer: nn.Module, queue: list[Later]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y: Tensor = _Linear.apply(x, layer.weight, layer.bias, queue)  # type: ignore[no-untyped-call]
        return y

    return forward


def _convolution(layer: nn.Module, queue: list[Later]) -> Callable[[Tensor], Tensor]:
    whole: Callable[[Tensor], Tensor] = layer.forward

    def forward(x: Tensor) -> Tensor:
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return whole(x)
        y: Tensor = _Convolution.apply(x, layer.weight, layer.bias, layer, queue)  # type: ignore[no-untyped-call]
        return y

    return forward


def _add_(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: list[Later]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.queue = (weight, bias), queue
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        own, bias = ctx.parameters

        def later() -> None:
            rows = grad.reshape(-1, grad.shape[-1])
            _add_(own, rows.t() @ x.reshape(-1, x.shape[-1]))
            if bias is not None and bias.requires_grad:
                _add_(bias, rows.sum(0))

        ctx.queue.append(later)
        return grad @ weight, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any, queue: list[Later]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.parameters, ctx.queue = layer, (weight, bias), queue
        y: Tensor = torch.convolution(x, weight, bias, *_facts(layer))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        own, bias = ctx.parameters
        sizes = None if bias is None else list(bias.shape)

        def half(mask: list[bool]) -> tuple[Any, ...]:
            answer: tuple[Any, ...] = torch.ops.aten.convolution_backward(
                grad, x, weight, sizes, *_facts(ctx.layer), mask
            )
            return answer

        def later() -> None:
            _, of_weight, of_bias = half([False, True, bias is not None and bias.requires_grad])
            _add_(own, of_weight)
            if of_bias is not None:
                _add_(bias, of_bias)

        ctx.queue.append(later)
        return half([True, False, False])[0], None, None, None, None


def _facts(layer: Any) -> tuple[Any, ...]:
    return (
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0] * len(layer.stride),
        layer.groups,
    )
