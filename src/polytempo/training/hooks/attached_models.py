"""The handles of attached models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, ref

from torch import nn

from polytempo.training.hooks.handle import Handle
from polytempo.training.own_loop.served_handle import ServedHandle

_handles: WeakKeyDictionary[nn.Module, ref[Handle | ServedHandle]] = WeakKeyDictionary()
"""Both sides are weak, because a handle holds its model; the optimizer's hooks keep the handle alive."""


def handle_of(model: nn.Module) -> Handle | ServedHandle | None:
    """The handle that `model` is attached by; None if it is not."""
    handle = _handles.get(model)
    found = None if handle is None else handle()
    return found if found is not None and found.attached else None


def set_handle(model: nn.Module, handle: Handle | ServedHandle) -> None:
    """`model` is attached by `handle` now."""
    _handles[model] = ref(handle)


def detach_from(model: nn.Module) -> None:
    """Remove the hooks of the handle that `attach(model, …)` returned, if there is one."""
    handle = handle_of(model)
    if handle is not None:
        handle.detach()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """`handle.no_sync()` of the handle that `attach(model, …)` returned: accumulate gradients without exchanging."""
    handle = handle_of(model)
    if handle is None:
        raise ValueError("this model is not attached; call pt.attach(model, optimizer, strategy) first")
    with handle.no_sync():
        yield
