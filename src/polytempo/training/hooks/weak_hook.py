"""`WeakHook`: a hook on a module that neither keeps its owner alive nor travels with the module.

`KeepingHook` keeps its owner alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch


class WeakHook:
    """Calls a method as long as its owner lives; a copy of it, made with a copy of the module, calls nothing.

    Under torch.compile it does nothing, because the graph has no place for it.
    """

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = None if method is None else WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        method = None if self._method is None else self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return WeakHook, ()


class KeepingHook(WeakHook):
    """A hook that keeps its owner alive as long as the module: the owner holds the values that the module is saved
    from."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        super().__init__(method)
        self._kept = method

    def __reduce__(self) -> tuple[type[KeepingHook], tuple[()]]:
        return KeepingHook, ()
