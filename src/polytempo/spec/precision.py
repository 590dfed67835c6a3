"""`precision`: in how many bits a model computes and keeps its weights, as a value.

pt.precision("bf16")                               bfloat16: 8 significant bits, the range of float32
pt.precision("fp16", loss_scale="dynamic")         IEEE half: 11 significant bits, 6e-8 to 65504
--precision bf16    --precision 'fp16(loss_scale=dynamic)'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from polytempo.spec.text.call import parse_call
from polytempo.spec.text.resolution import resolve, unknown

if TYPE_CHECKING:
    pass  # imports torch, which the command line reads options without

Dtype = Literal["bf16", "fp16", "autocast", "int8", "int4", "ternary"]
DYNAMIC = "dynamic"

_TORCH = {"bf16": "bfloat16", "fp16": "float16", "autocast": "bfloat16"}
_BITS = {"int8": 8, "int4": 4, "ternary": 2}
_MEANT = {
    "amp": "autocast",
    "bfloat16": "bf16",
    "bfloat": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
}
_WHOLE = {"fp32", "float32", "f32", "float", "single", "fp64", "float64", "double", "torch.float32", "torch.float64"}


@dataclass(frozen=True)
class Precision:
    """Parameters of fewer bits with float32 masters; see `precision`, which makes one."""

    dtype: Dtype
    loss_scale: float | Literal["dynamic"] | None = None

    def __post_init__(self) -> None:
        """Refuse a precision that could not train."""
        if self.dtype not in _TORCH and self.dtype not in _BITS:
            raise ValueError(_no_dtype(self.dtype))
        if self.dtype in ("bf16", "autocast") and self.loss_scale is not None:
            raise ValueError(
                f"loss_scale={self.loss_scale!r}: {self.dtype} has the range of float32, so gradients need no scale; "
                "leave loss_scale out"
            )
        if self.is_quantised and self.loss_scale is not None:
            raise ValueError(f"loss_scale={self.loss_scale!r}: gradients of {self.dtype} are float32; leave it out")
        if self.dtype == "fp16" and self.loss_scale is None:
            raise ValueError(
                "gradients below 6e-8 are zero in fp16, so losses must be scaled; give loss_scale='dynamic', or a "
                "number such as 1024 (as text: fp16(loss_scale=dynamic)), or use bf16, which needs no scale"
            )
        if self.loss_scale is not None and self.loss_scale != DYNAMIC:
            _check_factor(self.loss_scale)

    @property
    def torch_name(self) -> str:
        """Torch's name of the dtype that forward computes in: "bfloat16" or "float16"."""
        return _TORCH[self.dtype]

    @property
    def is_quantised(self) -> bool:
        """True for weights of a few bits that are computed with in float32."""
        return self.dtype in _BITS

    @property
    def is_autocast(self) -> bool:
        """True for float32 parameters, with 16 bits within forward alone."""
        return self.dtype == "autocast"

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return _BITS.get(self.dtype, 32 if self.is_autocast else 16)

    @property
    def is_dynamic(self) -> bool:
        """True if the scale of losses follows overflows."""
        return self.loss_scale == DYNAMIC

    def __str__(self) -> str:
        """The text that `--precision` takes: "bf16", "fp16(loss_scale=dynamic)"."""
        if self.loss_scale is None:
            return self.dtype
        scale = self.loss_scale
        return f"{self.dtype}(loss_scale={int(scale) if isinstance(scale, float) and scale.is_integer() else scale})"


def precision(dtype: Dtype, *, loss_scale: float | Literal["dynamic"] | None = None) -> Precision:
    """Train a model of 16-bit parameters, with float32 masters that the optimizer steps.

        pt.attach(model, optimizer, strategy, precision=pt.precision("bf16"))
        pt.run(job, strategy, workers=2, precision=pt.precision("fp16", loss_scale="dynamic"))

        w16 = round(w)          forward and backward with w16, in 16 bits where autocast does, gradients g16
        w ← optimizer(w, g)     g = float32(mean of g16) / S

    `w`, and the optimizer's state, are float32; `round` is to nearest even. Parameters of normalization layers, and
    their running statistics, stay float32. A model's answer is float32. `loss_scale` S multiplies the loss before
    backward, so that small gradients are not zero in fp16: a number, or "dynamic", which begins at 2^16, halves where a
    gradient on any worker overflows (all workers then leave out that step), and doubles after 2,000 steps without.

    Cost: 2 bytes for a weight and 2 for its gradient, in place of 4 and 4, and 4 for its master, which belongs to the
    optimizer's state; and a pass over these in each step. Plain means of gradients send 2 bytes a number.

    "autocast": parameters and gradients stay float32, and forward computes in bfloat16 where torch's autocast does.

    "int8", "int4" and "ternary": forward and backward compute in float32 with weights of a few levels, Q(w) (see
    `training.precision.quantised_weights`), biases and norms as they are, and w ← optimizer(w, ∂L/∂Q(w)), the
    straight-through estimator. Cost: 4 bytes for Q(w), and a few passes over the weights in each step.

    Errors: ValueError for another dtype, for fp16 without a scale, and for bf16 with one.

    Source: P. Micikevicius et al., "Mixed precision training", 2018, sections 3.1 and 3.2. Deviations: normalization
    layers keep float32 parameters, and the first scale and its growth are as in torch's GradScaler.
    """
    return Precision(dtype, loss_scale)


def parse_precision(text: str) -> Precision:
    """The precision that `text` spells: "bf16", or "fp16(loss_scale=dynamic)". ValueError for another."""
    call = parse_call(text)
    if call.name not in _MAKE:
        raise ValueError(_no_dtype(call.name))
    found = resolve(call, _MAKE, {}, what="precision")
    assert isinstance(found, Precision)
    return found


def bf16(loss_scale: float | str | None = None) -> Precision:
    """The call in `--precision bf16`; a precision checks its scale itself."""
    return Precision("bf16", loss_scale)  # type: ignore[arg-type]


def fp16(loss_scale: float | str | None = None) -> Precision:
    """The call in `--precision 'fp16(…)'`."""
    return Precision("fp16", loss_scale)  # type: ignore[arg-type]


def autocast() -> Precision:
    """The call in `--precision autocast`."""
    return Precision("autocast")


def int8() -> Precision:
    """The call in `--precision int8`."""
    return Precision("int8")


def int4() -> Precision:
    """The call in `--precision int4`."""
    return Precision("int4")


def ternary() -> Precision:
    """The call in `--precision ternary`."""
    return Precision("ternary")


_MAKE = {"bf16": bf16, "fp16": fp16, "autocast": autocast, "int8": int8, "int4": int4, "ternary": ternary}


def precision_of(given: Precision | str | None) -> Precision | None:
    """The value of an option `precision`, which may be text. TypeError for other types."""
    if isinstance(given, str):
        return parse_precision(given)
    if given is not None and not isinstance(given, Precision):
        raise TypeError(f'precision is pt.precision("bf16"), or the text "bf16", got {given!r}')
    return given


def _check_factor(factor: object) -> None:
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not (number and math.isfinite(factor) and factor > 0):  # type: ignore[arg-type, operator]
        raise ValueError(f"loss_scale is a number above 0, or 'dynamic', got {factor!r}")


def _no_dtype(given: object) -> str:
    name = str(given)
    if name in _WHOLE:
        return f"models compute in {name} anyway; leave precision out, or give bf16 or fp16"
    if name in _MEANT:
        return f"precision is bf16 or fp16, got {name!r} (write {_MEANT[name]!r})"
    return unknown("precision", name, _MAKE)
