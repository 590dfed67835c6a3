"""Targets of a run: measures on the test set that end it, as a text or by name. Torch is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

MEASURES = ("accuracy", "loss")


def parse_until(text: str) -> dict[str, float]:
    """The targets: `"accuracy=0.97"`, `"loss=0.1"`, or both with a comma between. `ValueError` for other texts."""
    found: dict[str, float] = {}
    for part in text.split(","):
        measure, equals, written = (piece.strip() for piece in part.partition("="))
        try:
            goal = float(written)
        except ValueError:
            goal = None
        if not equals or goal is None:
            raise ValueError("must be written accuracy=0.97 or loss=0.1")
        if measure in found:
            raise ValueError(f"gives {measure} twice")
        found[measure] = goal
    return found


def goals_of(given: object) -> Mapping[str, float]:
    """The value of an option `until`, also from text. ValueError for a measure or a value that no run could reach."""
    goals = parse_until(given) if isinstance(given, str) else given
    if not isinstance(goals, Mapping):
        raise ValueError("must be a text such as accuracy=0.97, or a dict such as {'accuracy': 0.97}")
    for measure, goal in goals.items():
        if measure not in MEASURES:
            raise ValueError(f"accepts accuracy and loss, not {measure}")
        if isinstance(goal, bool) or not isinstance(goal, int | float) or not isfinite(goal):
            raise ValueError(f"{measure} must be a number, not {goal!r}")
        if measure == "accuracy" and not 0 < goal <= 1:
            raise ValueError("accuracy is a number between 0 and 1: 97 % is accuracy=0.97")
    return goals
