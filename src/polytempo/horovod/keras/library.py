"""Keras 3 on torch, which this module alone imports."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def keras_on_torch() -> Any:
    """The module `keras`. Raises ImportError if Keras 3 is missing, or computes with another library than torch."""
    remedy = "set the variable KERAS_BACKEND=torch before the first `import keras`"
    try:
        found = import_module("keras")
    except ImportError as error:
        raise ImportError(
            f"polytempo.horovod.keras needs Keras 3, which cannot be imported here ({error}); "
            f"`pip install 'polytempo[keras]'` brings it; if a backend is missing, {remedy}",
            name=error.name,
        ) from error
    if int(found.__version__.split(".")[0]) < 3:
        raise ImportError(
            f"polytempo.horovod.keras needs Keras 3, and this is Keras {found.__version__}; "
            "`pip install 'polytempo[keras]'` brings it"
        )
    if found.config.backend() != "torch":
        raise ImportError(
            "polytempo.horovod.keras reduces gradients of torch, and Keras computes with "
            f"{found.config.backend()} here; {remedy}"
        )
    return found


keras = keras_on_torch()
