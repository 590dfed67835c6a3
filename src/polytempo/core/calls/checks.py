"""Checks of what is given to those who build: a step, where it would fail, could not name it as well."""

from __future__ import annotations

from numbers import Integral, Real


def check_whole(**given: object) -> None:
    """Raise ValueError that names what is no whole number: sizes, counts and seeds are exact, so 2.0 is none."""
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_real(**given: object) -> None:
    """Raise ValueError that names what is no number."""
    for name, value in given.items():
        if not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
