"""What torch keeps for each thread, carried to others: modes of autograd, autocast, and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_DEVICE = "cpu"


class ThreadSettings(NamedTuple):
    """The settings of one thread."""

    threads: int
    """Of one operation."""
    gradients: bool
    inference: bool
    autocast: torch.dtype | None
    cached: bool
    """Whether autocast keeps a parameter's copy for its further uses."""

    @classmethod
    def here(cls) -> ThreadSettings:
        """Those of this thread."""
        return cls(
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(_DEVICE) if torch.is_autocast_enabled(_DEVICE) else None,
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set them here. Autocast's context would drop the copies that all threads share when it ends here."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        before = ThreadSettings.here()
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients):
            self._set_autocast()
            try:
                yield
            finally:
                before._set_autocast()

    def _set_autocast(self) -> None:
        torch.set_autocast_enabled(_DEVICE, self.autocast is not None)
        if self.autocast is not None:
            torch.set_autocast_dtype(_DEVICE, self.autocast)
        torch.set_autocast_cache_enabled(self.cached)


def is_plain() -> bool:
    """Whether this thread only computes: nothing follows its operations, as traces, checkpoints and transforms do."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )


def is_caching() -> bool:
    """Whether autocast keeps a parameter's copy, whose gradients are summed before they are converted back."""
    return torch.is_autocast_enabled(_DEVICE) and torch.is_autocast_cache_enabled()
