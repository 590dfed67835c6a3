"""Libraries that only some engines need: loaded when such an engine is used, and named where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def required(module: str, extra: str) -> Any:
    """The module. Raises ImportError that names the extra which brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(error, extra) from error


def missing(error: ImportError, extra: str) -> ImportError:
    """The error to raise instead of `error`."""
    return ImportError(
        f"this engine needs a library that cannot be imported here ({error}); `pip install 'polytempo[{extra}]'` "
        "brings it",
        name=error.name,
    )
