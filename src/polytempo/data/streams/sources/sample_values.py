"""Values of samples: numbers and lists of numbers as tensors, and the fields that a loop asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from polytempo.core.calls.refusals import refuse

_NUMBERS = (bool, int, float)


def tensor_values(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and lists of numbers become tensors, of int64, of torch's default floating type, or of bool."""
    return {name: _tensor(value) for name, value in sample.items()}


def _tensor(value: Any) -> Any:
    if not isinstance(value, (*_NUMBERS, list)):
        return value
    try:
        return torch.tensor(value)
    except (ValueError, TypeError, RuntimeError):  # ragged lists, lists of text, numbers above 64 bits
        return value


def fields(sample: Mapping[str, Any], names: Sequence[str] | None, where: str) -> Any:
    """The tuple of the sample's fields `names`, or for None the sample. PT2605 where it lacks one."""
    if names is None:
        return sample
    check_columns(names, sample, where)
    return tuple(sample[name] for name in names)


def check_columns(names: Sequence[str], there: Mapping[str, Any] | Sequence[str], where: str) -> None:
    """PT2605 where a name is not `there`."""
    for name in names:
        if name not in there:
            refuse({"data source", "no such column"}, where=where, column=name, columns=", ".join(there))
