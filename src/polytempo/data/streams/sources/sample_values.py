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


Fields = Sequence[str | Sequence[str]]
"""Entries of a tuple: a field, or a list of fields with numbers, which become one vector."""


def fields(sample: Mapping[str, Any], names: Fields | None, where: str) -> Any:
    """The tuple of the sample's fields `names`, or for None the sample. PT2605 where it lacks one.

    A list of fields becomes their numbers, one behind the other, as a vector of torch's default floating type;
    ValueError for text in it.
    """
    if names is None:
        return sample
    check_columns(single(names), sample, where)
    return tuple(sample[name] if isinstance(name, str) else _vector(sample, name, where) for name in names)


def single(names: Fields) -> list[str]:
    """The names of all fields."""
    return [each for name in names for each in ([name] if isinstance(name, str) else name)]


def _vector(sample: Mapping[str, Any], names: Sequence[str], where: str) -> torch.Tensor:
    for name in names:
        if not isinstance(sample[name], torch.Tensor):
            kind = type(sample[name]).__name__
            raise ValueError(f"{where}: {name!r} is {kind}, and a list in as_tuple takes numbers; leave it out")
    return torch.cat([sample[name].flatten().to(torch.get_default_dtype()) for name in names])


def check_columns(names: Sequence[str], there: Mapping[str, Any] | Sequence[str], where: str) -> None:
    """PT2605 where a name is not `there`."""
    for name in names:
        if name not in there:
            refuse({"data source", "no such column"}, where=where, column=name, columns=", ".join(there))
