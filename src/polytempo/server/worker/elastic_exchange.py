"""Elastic averaging, the worker's half: its parameters and the server's center move towards each other."""

from __future__ import annotations

from typing import NamedTuple

from polytempo.core import Bundle, Cost, Exchange, Port, State, Steps, Transform
from polytempo.core.arithmetic.addition import add_


class Exchanging(NamedTuple):
    """The state of `exchange`: how many steps it has seen."""

    step: int


def exchange(every: int) -> Transform:
    """After steps τ, 2τ, 3τ, … (τ = `every`): push the worker's own parameters x, continue from x - d.

    d = α (x - x̃) is the server's answer, x̃ its center, which moves by + d at the same moment (the rule `elastic`).

    Cost: the parameters one way, the difference the other; the worker waits for it.
    """
    if every < 1:
        raise ValueError(f"exchange needs a period of at least 1 step, got every={every}")

    def init(parameters: Bundle) -> Exchanging:
        return Exchanging(0)

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, Exchanging]:
        assert isinstance(state, Exchanging)
        step = state.step + 1
        if step % every:
            return bundle, Exchanging(step)
        difference = await port.push(bundle.flat, step)
        if difference is None:  # the shards had applied this push before
            return bundle, Exchanging(step)
        return bundle.with_flat(add_(bundle.flat, difference, -1.0)), Exchanging(step)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        there = Exchange("push", steps=Steps().every(every), server="push")
        return Cost((there, there._replace(by="its answer", server="pull")))

    return Transform(init, apply, separable=False, idle_alone=False, cost=cost)
