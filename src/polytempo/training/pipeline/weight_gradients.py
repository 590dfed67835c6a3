"""Linear and convolution layers with weight gradients that a stage adds up itself: in place, and when it suits.

    backward pass      ∂L/∂x = Wᵀ ∂L/∂y          now: the stage before waits for it
    weight gradient    W.grad += ∂L/∂yᵀ x         now or later; one matrix product that adds to the present gradient

autograd would write each micro-batch's gradient to memory of its own and add that: three times the traffic. Parameters
of other layers (norms, embeddings) keep autograd's way. A late gradient is the second half of a backward pass, which
zero bubble puts off; source: P. Qi et al., "Zero bubble pipeline parallelism", 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Gradient = Callable[[], None]
Take = Callable[[Gradient], None]
_CONVOLUTIONS: dict[type, Callable[..., Tensor]] = {
    nn.Conv1d: nn.functional.conv1d,
    nn.Conv2d: nn.functional.conv2d,
    nn.Conv3d: nn.functional.conv3d,
}
_convolution_backward = torch.ops.aten.convolution_backward.default


@contextmanager
def apart(layers: Sequence[nn.Module], take: Take) -> Iterator[None]:
    """Inside, forward passes of `layers` build graphs that hand their weight gradients to `take` in the backward pass.

    `layers`: from `layers_of`. Convolutions take part only if `take` is not `at_once`: they cannot add in place, and
    two halves cost more than a whole. A convolution's input must need a gradient: else there is one half only.
    """
    kinds: dict[type, Callable[[Any, Take], Callable[[Tensor], Tensor]]] = {nn.Linear: _linear}
    if take is not at_once:
        kinds |= dict.fromkeys(_CONVOLUTIONS, _convolution)
    own: list[Any] = [m for m in layers if type(m) in kinds and _adds_itself(m) and "forward" not in vars(m)]
    for layer in own:
        vars(layer)["forward"] = kinds[type(layer)](layer, take)
    try:
        yield
    finally:
        for layer in own:
            del vars(layer)["forward"]


def _adds_itself(layer: Any) -> bool:
    """True if its weight is a trained parameter, and nothing hooks the gradients that autograd would add."""
    held = [each for each in (layer.weight, layer.bias) if each is not None]
    hooked = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in held)
    return isinstance(layer.weight, nn.Parameter) and layer.weight.requires_grad and not hooked


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of `module` that `apart` is for."""
    return [m for m in module.modules() if type(m) in (nn.Linear, *_CONVOLUTIONS)]


def at_once(gradient: Gradient) -> None:
    """Compute it in the backward pass."""
    gradient()


def _linear(layer: Any, take: Take) -> Callable[[Tensor], Tensor]:
    whole: Callable[[Tensor], Tensor] = layer.forward

    def forward(x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # which casts the weight: its gradient is autograd's
            return whole(x)
        y: Tensor = _Linear.apply(x, layer.weight, layer.bias, take)  # type: ignore[no-untyped-call]
        return y

    return forward


def _convolution(layer: Any, take: Take) -> Callable[[Tensor], Tensor]:
    whole: Callable[[Tensor], Tensor] = layer.forward
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return whole
    weight, bias = layer.weight, layer.bias
    fixed = weight.detach(), None if bias is None else bias.detach()
    convolve, device, batched = _CONVOLUTIONS[type(layer)], weight.device.type, weight.dim()
    facts = layer.stride, layer.padding, layer.dilation, layer.groups

    def forward(x: Tensor) -> Tensor:
        alone = not (x.requires_grad and torch.is_grad_enabled())  # then there is no half that another stage waits for
        if alone or x.dim() != batched or torch.is_autocast_enabled(device):
            return whole(x)
        y = convolve(x, *fixed, *facts)
        # a hook, not an `autograd.Function`: half of its time in Python
        y.register_hook(_ConvolutionGradient(layer, x.detach(), take).known)
        return y

    return forward


def _add_(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, take: Take) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.take = (weight, bias), take
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        own, bias = ctx.parameters

        def gradient() -> None:
            rows, columns = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            if own.grad is None:
                own.grad = rows.t() @ columns
            else:
                own.grad.addmm_(rows.t(), columns)
            if bias is not None and bias.requires_grad:
                _add_(bias, rows.sum(0))

        ctx.take(gradient)
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None


class _ConvolutionGradient:
    """The gradient of a convolution's weight and bias, once the output's gradient is known."""

    __slots__ = ("_layer", "_of_output", "_take", "_version", "_x")

    def __init__(self, layer: Any, x: Tensor, take: Take) -> None:
        self._layer, self._x, self._version, self._take = layer, x, x._version, take

    def known(self, of_output: Tensor) -> None:
        self._of_output = of_output
        self._take(self)

    def __call__(self) -> None:
        layer, x = self._layer, self._x
        if x._version != self._version:
            raise RuntimeError(
                f"the input {list(x.shape)} of {layer} was changed in place after its forward pass, and its weight's "
                "gradient needs it; let that operation make a new tensor (inplace=False)"
            )
        weight, bias = layer.weight, layer.bias
        sizes = None if bias is None else bias.shape
        mask = [False, True, bias is not None and bias.requires_grad]
        facts = layer.stride, layer.padding, layer.dilation, False, [0] * len(layer.stride), layer.groups
        _, of_weight, of_bias = _convolution_backward(self._of_output, x, weight, sizes, *facts, mask)
        _add_(weight, of_weight)
        if of_bias is not None:
            _add_(bias, of_bias)
