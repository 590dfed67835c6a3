"""Python values as bytes, without pickle: received bytes can make no code run.

Types of msgpack travel as they are: None, bool, int of 64 bits, float, str, bytes. The rest is a list that begins with
its kind. Refused, with TypeError: everything else, such as instances of classes and functions.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

MOST_DEPTH = 64
"""Values with a deeper nesting are refused."""
_WIDE = 1 << 63
_DICTS: dict[str, type[dict[Any, Any]]] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}


def encoded(value: Any) -> bytes:
    """The bytes of a value. Errors: TypeError, which names the type; ValueError for values with too deep a nesting."""
    return msgspec.msgpack.encode(_plain(value, MOST_DEPTH))


def decoded(data: bytes) -> Any:
    """The value of bytes that `encoded` made. ValueError for others."""
    try:
        return _value(msgspec.msgpack.decode(data), MOST_DEPTH)
    except (msgspec.MsgspecError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"these bytes are not a value of this library: {error}") from error


def _plain(value: Any, depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"values nested more than {MOST_DEPTH} deep cannot be sent")
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -_WIDE <= value < _WIDE else ["int", str(value)]
    if kind in (list, tuple, set, frozenset, torch.Size):
        return [kind.__name__, *(_plain(each, depth - 1) for each in value)]
    if kind in _DICTS.values():
        return [kind.__name__, *([_plain(k, depth - 1), _plain(v, depth - 1)] for k, v in value.items())]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if isinstance(value, Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        name = "ndarray" if isinstance(value, np.ndarray) else "generic"
        return [name, array.dtype.str, list(value.shape), array.tobytes()]
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["device", str(value)]
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__} cannot be sent between ranks: no pickle is used here. Send plain "
        "values (None, numbers, str, bytes, list, tuple, set, dict, tensors, NumPy arrays), such as a state_dict"
    )


def _plain_tensor(tensor: Tensor) -> list[Any]:
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of {tensor.layout} cannot be sent between ranks; send its indices and values")
    flat = tensor.detach().cpu().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return ["Tensor", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


def _value(plain: Any, depth: int) -> Any:
    if depth == 0:
        raise ValueError("values are nested too deep")
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain
    match kind:
        case "list" | "tuple" | "set" | "frozenset" | "Size":
            make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}[kind]
            return make(_value(each, depth - 1) for each in rest)
        case "dict" | "OrderedDict" | "Counter":
            return _DICTS[kind]({_value(key, depth - 1): _value(each, depth - 1) for key, each in rest})
        case "int":
            return int(rest[0])
        case "complex":
            return complex(*rest)
        case "Tensor":
            name, shape, data = rest
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"no dtype {name!r}")
            return (torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(shape)
        case "ndarray" | "generic":
            name, shape, data = rest
            array = np.frombuffer(bytearray(data), dtype=np.dtype(name)).reshape(shape)
            return array if kind == "ndarray" else array[()]
        case "dtype":
            return getattr(torch, rest[0])
        case "device":
            return torch.device(rest[0])
    raise ValueError(f"no value begins with {kind!r}")
