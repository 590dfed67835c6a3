"""Two rules of a shard that its tests share."""

from __future__ import annotations

from typing import Any

from polytempo.core.rule import Action, Add, Answer, Arrival, Situation, Update


def on_arrival(state: Any, arrival: Arrival, situation: Situation) -> tuple[Any, list[Action]]:
    """Every gradient makes an update."""
    actions: list[Action] = [Add(arrival.worker), Update()] if arrival.kind == "push" else []
    return state, [*actions, Answer(arrival.worker)]


def in_pairs(state: int, arrival: Arrival, situation: Situation) -> tuple[int, list[Action]]:
    """Every second gradient makes an update; all are answered immediately."""
    if arrival.kind != "push":
        return state, [Answer(arrival.worker)]
    end: list[Action] = [Update(2.0)] if state else []
    return 1 - state, [Add(arrival.worker, 0.5), *end, Answer(arrival.worker)]
