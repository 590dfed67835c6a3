"""Islands: workers that are close to each other exchange in every step, and islands of them once in a while."""

from __future__ import annotations

import torch

from polytempo.collectives.on_islands import between_islands, within_islands
from polytempo.core import Bundle, Strategy, Transform, call_name
from polytempo.core.state import nodes
from polytempo.core.strategy import checked_inner
from polytempo.core.transform import is_idle
from polytempo.strategies.diloco import diloco
from polytempo.strategies.sync_sgd import sync_sgd
from polytempo.synchronization.delayed import DelayedState, OverlappedState
from polytempo.synchronization.every import Timed
from polytempo.synchronization.fragments import BehindState

_SOME_RANKS = 2


def islands(inner: Strategy | None = None, outer: Strategy | None = None, number: int = 2) -> Strategy:
    """`inner` within each island of workers, in every step; `outer` between islands, which it takes for workers.

    Workers with consecutive ranks are an island. They have whole models that are equal after every step, and islands
    of m workers train as one worker with m times the batch would. Their first worker takes part in `outer`; then it
    hands the parameters and the state of `outer` to the others. Islands of different sizes count the same.

    `inner`: exchanges of gradients alone, such as `sync_sgd()` (the default) or `top_k_sgd()`. `outer`: exchanges of
    parameters every so many steps, such as `diloco()` (the default), `local_sgd()` or `gossip()`. For islands of
    pipelines write `gpipe(stages=…, inner=diloco())`: workers with the same stage meet then.

    Cost: `inner`'s within an island; between islands `outer`'s, with a message of one worker for each island; then K
    bytes, and as many as `outer`'s state has, within an island.

    With one island it is `inner`, and `outer` alone at the meetings; with as many islands as workers it is `outer`. An
    `inner` with a merge needs islands as large as that merge.

    Source: A. Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023: there a
    worker is an island of devices.
    """
    name = call_name(islands, locals(), brief=("inner", "outer"))
    inner, outer = inner or sync_sgd(), outer or diloco()
    if number < 1:
        raise ValueError(f"{name}: number must be at least 1 island")
    checked_inner(inner, "islands")
    checked_inner(outer, "islands")
    if 1 < number < outer.least_ranks:
        raise ValueError(
            f"{name}: {outer} has a merge that needs at least {outer.least_ranks} islands, and there are {number}; use "
            f"number={outer.least_ranks} or more, or a merge with smaller numbers"
        )
    if not (inner.synchronized and is_idle(inner.parameters, _SOME_RANKS)):
        raise ValueError(
            f"{name}: the workers of an island have equal models after every step, and {inner} lets them differ, or "
            "exchanges parameters; give an inner strategy that exchanges gradients, such as sync_sgd() or top_k_sgd()"
        )
    if not is_idle(outer.gradients, _SOME_RANKS):
        raise ValueError(
            f"{name}: islands exchange parameters, and {outer} exchanges gradients; give an outer strategy such as "
            "diloco(period=100), local_sgd(period=8) or gossip()"
        )
    for strategy, transform in ((inner, inner.gradients), (outer, outer.parameters)):
        if any(nodes(transform.init(Bundle({"w": torch.zeros(1)})), (BehindState, DelayedState, OverlappedState))):
            raise ValueError(
                f"{name}: {strategy} has exchanges under way when a step ends, and islands meet when all exchanges "
                "of their workers are over; give one without, such as sync_sgd(), diloco() or gossip()"
            )
    return Strategy(
        name,
        gradients=within_islands(inner.gradients, number),
        parameters=_between(outer.parameters, number, name),
        synchronized=outer.synchronized,
        momentum=inner.momentum,
    )


def _between(parameters: Transform, number: int, name: str) -> Transform:
    """The transform with its meetings between islands, and the count of steps on every rank."""
    timed = parameters.apply
    if not isinstance(timed, Timed):
        raise ValueError(
            f"{name}: the outer strategy's exchange has no period; put every(…) around all of it, or give "
            "diloco(period=100), local_sgd(period=8) or gossip()"
        )
    return timed.around(lambda transform: between_islands(transform, number))
