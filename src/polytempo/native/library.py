"""The native core, a shared library with a plain C interface: found, checked and opened.

The library is in this folder: a wheel brings it there, `make install` builds it there. A wheel that was built
without a C++ compiler has none; everything then works without it, more slowly.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

ABI_VERSION = 10
"""The answer of `pt_abi_version`; it changes with every function that is added, removed or called differently."""

OFF_VARIABLE = "POLYTEMPO_NATIVE"
"""`POLYTEMPO_NATIVE=0` in the environment leaves the library unopened."""

_LIBRARY = Path(__file__).with_name("libpolytempo.so")
_REMEDY = "with a C++ compiler, `make install` in a checkout or `pip install .` builds it"

_i32, _i64, _f64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_pointers, _i64s = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64)

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pt_abi_version": (ctypes.c_int32,),
    "pt_isa": (ctypes.c_char_p,),
    "pt_choose_isa": (_i32, ctypes.c_char_p),
    "pt_reduce": (_i32, _i32, _i32, _i32, _pointers, _i32, _pointers, _i32, _i64),
    "pt_update": (_i32, _i32, _pointer, _pointers, _pointer, _i32, *(_pointer,) * 6, _i64),
    "pt_unfinite": (_i64, _i32, _pointer, _i64),
    "pt_copy": (None, _pointer, _pointer, _i64),
    "pt_squares": (_i32, _i32, _pointer, _pointer, _pointer, _i64),
    "pt_lamb_direction": (_i32, _i32, *(_pointer,) * 7, _i64),
    "pt_descend": (_i64, _i32, _pointer, _pointer, _f64, _pointer, _pointer, _i64),
    "pt_control_bytes": (_i64, _i32),
    "pt_rings_bytes": (_i64, _i32, _i64),
    "pt_group_open": (_pointer, _pointer),
    "pt_group_leave": (None, _pointer),
    "pt_group_empty": (_i32, _pointer),
    "pt_group_close": (None, _pointer),
    "pt_group_culprit": (_i32, _pointer),
    "pt_group_expecting": (_i32, _pointer, _i64s, _i64s),
    "pt_group_missing": (_i32, _pointer, _i32),
    "pt_group_issue": (_i32, _pointer, _f64),
    "pt_group_call": (None, _pointer, _i32, _pointer),
    "pt_barrier": (_i32, _pointer, _f64),
    "pt_all_reduce": (_i32, _pointer, _i32, _i32, _i32, _i32, _pointer, _i64, _i64, _f64),
    "pt_reduce_scatter": (_i32, _pointer, _i32, _i32, _i32, _pointers, _pointer, _i64, _i64, _f64),
    "pt_exchange": (
        *(_i32, _pointer, _i32, _i32, _i32, _i64, _i64, _i32),
        *(_pointers, _i64s, _pointers, _i64s, _f64),
    ),
    "pt_send": (_pointer, _pointer, _i32, _i32, _i32, _pointer, _i64),
    "pt_receive": (_pointer, _pointer, _i32, _i32, _i32, _pointer, _i64),
    "pt_transfer_done": (_i32, _pointer, _pointer),
    "pt_transfer_wait": (_i32, _pointer, _pointer, _f64),
    "pt_transfer_peer": (_i32, _pointer),
    "pt_transfer_arrived_bytes": (_i64, _pointer),
    "pt_transfer_arrived_dtype": (_i32, _pointer),
    "pt_transfer_free": (None, _pointer, _pointer),
    "pt_transfers_serve": (None, _pointer, _f64),
    "pt_transfers_wake": (None, _pointer),
    "pt_word_set": (None, _pointer, ctypes.c_uint32),
    "pt_word_seen": (ctypes.c_uint32, _pointer),
    "pt_notes_bytes": (_i64, _i64),
    "pt_log_bytes": (_i64,),
    "pt_most_row_bytes": (_i64,),
    "pt_plan_open": (_pointer, _pointer, _pointer),
    "pt_plan_close": (None, _pointer),
    "pt_logistic_epoch": (_i32, _pointer, _pointer, _i64, _i64, _i64, ctypes.c_float, _i32, _i64, _f64, _pointer),
    "pt_scatter_add": (_i32, _i32, _pointer, _i64, _i64, _pointer, _pointer, _i64, _f64, _i32),
    "pt_step": (_i32, _pointer, _pointer, _pointer, _pointer, _i64, _pointer, _f64, _pointer),
    "pt_norm": (_i32, _pointer, _pointer, _pointer, _f64, _pointer),
    "pt_layer_squares": (_i32, _pointer, _pointer, _pointer, _pointer, _i64, _pointer, _f64, _pointer),
    "pt_cast_encode": (_i64, _i32, _pointer, _pointer, ctypes.c_float, _pointer, _i64),
    "pt_cast_add": (_i32, _i32, _pointer, _pointer, _i64),
    "pt_int8_encode": (_i64, _pointer, _pointer, _i64, _pointer, _pointer, _i64),
    "pt_int8_add": (_i32, _pointer, _pointer, _i64, _pointer, _i64),
    "pt_dynamic8_encode": (_i64, _pointer, _pointer, _i64, _pointer, _pointer, _pointer, _i64),
    "pt_dynamic8_add": (_i32, _pointer, _pointer, _i64, _pointer, _pointer, _i64),
    "pt_one_bit_encode": (_i64, _pointer, _pointer, _pointer, _pointer, _i64, _i64),
    "pt_one_bit_add": (_i32, _pointer, _pointer, _pointer, _i64, _i64),
    "pt_sign_encode": (_i64, _pointer, _pointer, _i32, _pointer, _pointer, _i64),
    "pt_qsgd_encode": (_i64, _pointer, _pointer, _i64, _i64, _i32, _pointer, ctypes.c_uint64, _pointer),
    "pt_qsgd_decode": (None, _pointer, _pointer, _i64, _i64, _i32, _pointer, _i32),
    "pt_terngrad_scaler": (_i64, _pointer, _pointer, _i64, _f64, _pointer),
    "pt_terngrad_encode": (
        *(None, _pointer, _pointer, _i64, ctypes.c_float, ctypes.c_float),
        *(_pointer, ctypes.c_uint64, _pointer),
    ),
    "pt_terngrad_decode": (None, _pointer, _pointer, _i64, ctypes.c_float, _i32, _pointer, _i32),
    "pt_natural_encode": (_i64, _pointer, _pointer, _i64, ctypes.c_uint64, _pointer),
    "pt_natural_decode": (None, _pointer, _pointer, _i64, _i32),
    "pt_sparse_count": (_i64, _pointer, ctypes.c_float, _i64, _pointer),
    "pt_sparse_above": (_i64, _pointer, ctypes.c_float, _i64, _pointer, _pointer, _i64, _pointer),
    "pt_sparse_top": (None, _pointer, _i64, _i64, _pointer, _pointer, _pointer, _i64, _pointer),
    "pt_sparse_chunk_top": (None, _pointer, _i64, _i64, _i64, _pointer, _pointer),
    "pt_sparse_add": (_i32, _pointer, _i64, _pointer, _pointer, _i64),
    "pt_sparse_zero": (None, _pointer, _pointer, _i64),
    "pt_sparse_accumulate": (None, _pointer, _pointer, _pointer, ctypes.c_float, ctypes.c_float, _i64),
    "pt_threshold_pack": (None, _pointer, _pointer, ctypes.c_float, _i64, _i32, _pointer),
    "pt_threshold_add": (_i32, _pointer, _i64, _pointer, _i64, ctypes.c_float, _i32),
}
"""Types of the result and of the arguments, for each function of the library."""


def load() -> ctypes.CDLL | None:
    """The library with its functions' types set, or None; opened once in a process. `why_not` says why it is None."""
    return _opened()[0]


@cache
def required() -> Any:
    """The library, where it is known to be there. Errors: ValueError where it is not."""
    library = load()
    if library is None:
        raise ValueError(f"there is no native core: {why_not()}")
    return library


def available() -> bool:
    """True if this process has the native core."""
    return load() is not None


def why_not() -> str | None:
    """The reason why there is no native core, and the remedy; None if there is one."""
    return _opened()[1]


def instruction_set() -> str | None:
    """The compiled variant that the core uses on this processor: "baseline", "v3" or "v4"; None without a core."""
    library = load()
    if library is None:
        return None
    name: bytes = library.pt_isa()
    return name.decode("ascii")


@cache
def _opened() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or the reason why not; never both."""
    if os.environ.get(OFF_VARIABLE) == "0":
        return None, f"{OFF_VARIABLE}=0 in the environment; unset it to have the native core"
    return open_library(_LIBRARY, sys.platform)


def open_library(path: Path, platform: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Open the library at `path`: it and None, or None and the reason."""
    if platform != "linux":
        return None, f"the native core is for Linux, and this is {platform}"
    if not path.is_file():
        return None, f"there is no {path.name} in {path.parent}; {_REMEDY}"
    try:
        library = ctypes.CDLL(str(path))
        found = library.pt_abi_version()
        if found != ABI_VERSION:
            return None, f"{path} has interface {found}, and this package needs {ABI_VERSION}; {_REMEDY}"
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be used: {error}; {_REMEDY}"
    return library, None
