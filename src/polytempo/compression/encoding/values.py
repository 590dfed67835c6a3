"""The values of a tensor as codecs look at them, refusals, and memory for wires."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.core import NotFinite
from polytempo.native.kernels.update import DTYPES_CHECKED, unfinite
from polytempo.native.library import available


def check_kind(x: Tensor) -> None:
    """Raise TypeError for tensors that no codec takes: whole and complex numbers, sparse ones."""
    if not x.is_floating_point() or x.layout is not torch.strided:
        raise TypeError(
            f"codecs take dense tensors of float32, float64, float16 or bfloat16, got {x.dtype} of layout {x.layout}"
        )


def computed(x: Tensor) -> Tensor:
    """Flat, in the type of the arithmetic: float64 stays, everything else is float32."""
    return x.reshape(-1).to(torch.float64 if x.dtype is torch.float64 else torch.float32)


def flat_f32(x: Tensor) -> Tensor:
    """Flat, contiguous, float32: the values for codecs that draw, of any dtype of x."""
    return x.detach().reshape(-1).contiguous().to(torch.float32)


def refuse(codec: str, index: int, x: Tensor, residual: Tensor | None = None) -> None:
    """Raise NotFinite for element `index` of x + residual; -1: there is none to refuse."""
    if index >= 0:
        found = x.reshape(-1)[index]
        raise NotFinite(codec, index, float(found if residual is None else found + residual.reshape(-1)[index]))


def first_nonfinite(v: Tensor) -> int:
    """The first element that is NaN or infinite; -1: there is none. Reads v once."""
    if available() and v.device.type == "cpu" and v.is_contiguous() and v.dtype in DTYPES_CHECKED:
        return unfinite(v)
    bad = v.reshape(-1).isfinite().logical_not_()
    return int(bad.to(torch.uint8).argmax()) if bool(bad.any()) else -1


def check_finite(codec: str, v: Tensor) -> None:
    """Raise NotFinite for the first element that is NaN or infinite. Reads v once."""
    refuse(codec, first_nonfinite(v), v)


def refused(codec: str, x: Tensor, residual: Tensor | None = None) -> NotFinite:
    """The error that names the first element that float32 cannot hold as a finite number."""
    v = (x if residual is None else x + residual).reshape(-1)
    index = int((~v.to(torch.float32).isfinite()).nonzero()[0])
    return NotFinite(codec, index, float(v[index]))


def check_f32(codec: str, x: Tensor) -> Tensor:
    """`flat_f32` of x. Raises NotFinite for NaN, infinities, and values that float32 cannot hold."""
    flat = flat_f32(x)
    if not flat.isfinite().all():
        raise refused(codec, x)
    return flat


def fitted(values: Tensor, like: Tensor) -> Tensor:
    """Values in the shape and dtype of `like`; too large values become its largest number.

    Infinities from decoding, too: for wires that hold finite numbers alone. Others: `narrowed`.
    """
    most = torch.finfo(like.dtype).max
    if most < torch.finfo(values.dtype).max:
        values = values.clamp(-most, most)
    return values.view(like.shape).to(like.dtype)


def room(codec: str, num_bytes: int, like: Tensor, out: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a wire of so many bytes: the beginning of `out` where there is one. Raises ValueError as `opened`."""
    if out is None:
        made_of = dtype or torch.uint8
        return torch.empty(num_bytes // made_of.itemsize, dtype=made_of, device=like.device)
    return opened(codec, num_bytes, like, out, dtype)


def opened(codec: str, num_bytes: int, like: Tensor, wire: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The wire without its padding; dtype None: its bytes.

    Raises ValueError where there are too few, and as `check_flat`: kernels go by its address and ask nothing.
    """
    check_flat(f"a wire of {codec}", wire, like.device, dtype)
    found = wire if dtype else wire.view(torch.uint8)
    if found.nbytes < num_bytes:
        raise ValueError(
            f"a wire of {codec} for {like.numel()} elements has {num_bytes} bytes; here is room for {found.nbytes}"
        )
    return found[: num_bytes // found.element_size()]


def whole(codec: str, wire: Tensor, like: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """A wire of exactly `count` numbers. Raises ValueError for a wire of another tensor."""
    check_flat(f"a wire of {codec}", wire, like.device, dtype)
    if wire.numel() != count:
        raise ValueError(f"a wire of {codec} has {wire.numel()} elements, and the tensor's has {count}")
    return wire


def check_flat(what: str, memory: Tensor, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless `memory` is one piece of one dimension on that device, and of that dtype (None: any)."""
    right = memory.dim() == 1 and memory.is_contiguous() and memory.device == device
    if not right or memory.dtype is not (dtype or memory.dtype):
        raise ValueError(
            f"{what} is flat, contiguous, on {device} and of {dtype or 'any dtype'}; this one has shape "
            f"{tuple(memory.shape)} and strides {memory.stride()}, is on {memory.device}, and of {memory.dtype}"
        )
