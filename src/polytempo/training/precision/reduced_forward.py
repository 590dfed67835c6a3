"""A model's `forward` in 16 bits: its operations by autocast, its answer in float32.

input ──▶ [ autocast: matrix products and convolutions in 16 bits, others in float32 ] ──▶ float32 ──▶ loss
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from polytempo.partition.hybrid.hybrid_model import DividedLayer
from polytempo.spec.precision import Precision

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_OWN_DTYPE = (nn.RNNBase, nn.Bilinear, DividedLayer)
"""Layers that take inputs in their parameters' dtype, and that autocast on the CPU ignores."""


def dtype_of(precision: Precision) -> torch.dtype:
    """The dtype of 16-bit parameters."""
    dtype: torch.dtype = getattr(torch, precision.torch_name)
    return dtype


def kept_wide(model: nn.Module) -> frozenset[int]:
    """Identities of parameters that stay float32: normalization layers' parameters, which torch computes in float32."""
    return frozenset(
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NORMS)
        for parameter in module.parameters(recurse=False)
    )


class ReducedForward:
    """Takes the place of the `forward` of a model and of its copies, around the former one."""

    __name__ = "forward"

    def __init__(self, dtype: torch.dtype, inner: Callable[..., Any]) -> None:
        self._dtype, self.inner = dtype, inner

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = next((p.device.type for p in model.parameters()), "cpu")
        with torch.autocast("cpu" if device == "meta" else device, dtype=self._dtype):
            answer = self.inner(model, *args, **kwargs)
        return tree_map(_wide, answer)


def install(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Let calls of `model` compute in `dtype`, unless they do. Returns a function that undoes it."""
    before = vars(model).get("forward")
    if before is not None and isinstance(before.__func__, ReducedForward):
        return lambda: None
    inner = type(model).forward if before is None else before.__func__
    layers = [module for module in model.modules() if isinstance(module, _OWN_DTYPE)]
    hooks = [layer.register_forward_pre_hook(_given_its_dtype, with_kwargs=True) for layer in layers]
    model.forward = types.MethodType(ReducedForward(dtype, inner), model)

    def remove() -> None:
        for hook in hooks:
            hook.remove()
        if before is None:
            vars(model).pop("forward", None)
        else:
            model.forward = before

    return remove


def _given_its_dtype(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = next(layer.parameters())
    dtype, kind = weight.dtype, weight.device.type
    casts = not weight.is_meta and torch.is_autocast_enabled(kind)
    if dtype == torch.float32 and casts:  # lent float32 weights, as scoring does
        dtype = torch.get_autocast_dtype(kind) if isinstance(layer, nn.RNNBase) else dtype

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    given: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(cast, (tuple(args), dict(kwargs)))
    return given


def _wide(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value
