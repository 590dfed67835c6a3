"""Strategies for elastic runs: all ranks can finish, or undo, their exchanges.

gradients     the exchange, the commit point, the optimizer's step                                 `ElasticTraining`
parameters    steps of each rank's own, the exchange, the commit point, then parameters change     `LocalRound`
"""

from __future__ import annotations

from typing import Any

import torch

from polytempo.aggregation.mix import PushSumState
from polytempo.aggregation.rare_variance import RareVarianceState
from polytempo.collectives.on_islands import IslandState
from polytempo.compression.exchange.differences import DifferencesState
from polytempo.core import Bundle, Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.state import nodes
from polytempo.synchronization.delayed import DelayedState, OverlappedState
from polytempo.synchronization.every import PeriodState, RoundState, Timed, meets_at_once
from polytempo.synchronization.fragments import BehindState
from polytempo.training.elastic.island_member import parts_of

_SOME_RANKS = 2


def check_elastic(strategy: Strategy) -> None:
    """`Incompatible` where a step could not be undone on all ranks, or finished on all."""
    refuse(strategy.features | {"elastic"}, strategy=strategy)
    layout = Bundle({"w": torch.zeros(_SOME_RANKS)})
    states = strategy.gradients.init(layout), strategy.parameters.init(layout)
    islands = parts_of(strategy)
    found = {
        "under way": _has((DelayedState, OverlappedState, BehindState), states),
        "push-sum": _has(PushSumState, states),
        "differences": _has(DifferencesState, states),
        "both transforms": _has(RareVarianceState, states) or (islands is None and _has(IslandState, states)),
        "partial period": (islands is not None and isinstance(islands[1].apply, Timed))
        or (not meets_at_once(strategy.parameters) and _has((PeriodState, RoundState), states[1])),
    }
    refuse({"elastic", *(name for name, has in found.items() if has)}, strategy=strategy)


def _has(kind: type | tuple[type, ...], state: Any) -> bool:
    return any(True for _ in nodes(state, kind))
