"""Which strategies an elastic run takes: those whose exchanges can be finished by all ranks, or undone by all.

gradients     the exchange, the commit point, the optimizer's step                                 `ElasticTraining`
parameters    steps of each rank's own, the exchange, the commit point, then parameters change     `LocalRound`
"""

from __future__ import annotations

from typing import Any

import torch

from polytempo.aggregation.push_sum import PushSumState
from polytempo.core import Bundle, Strategy
from polytempo.synchronization.delayed import DelayedState
from polytempo.synchronization.every import PeriodState
from polytempo.synchronization.overlapped import OverlappedState

_REMEDY = "; use sync_sgd(), or a compressed strategy such as int8_sgd(), or leave min_workers and max_workers out"
_SOME_RANKS = 2


def check_elastic(strategy: Strategy) -> None:
    """ValueError where a step could not be undone on all ranks, or finished on all."""
    if strategy.server is not None:
        raise ValueError(
            f"{strategy} has a parameter server, whose workers come and go anyway: give restarts=…, and leave "
            "min_workers and max_workers out"
        )
    if strategy.one_copy is not None:
        raise ValueError(
            f"{strategy} shares one copy of the parameters, so that all ranks begin and end together{_REMEDY}"
        )
    if strategy.schedule is not None:
        raise ValueError(
            f"{strategy} cuts the model into stages, and without one of them nothing goes on{_REMEDY}; a "
            "run with out=… goes on from its last checkpoint with resume"
        )
    if strategy.parted is not None:
        raise ValueError(
            f"{strategy} has parts of layers on each rank, and without one of them nothing goes on{_REMEDY}; a run "
            "with out=… goes on from its last checkpoint with resume"
        )
    if strategy.distillation is not None:
        raise ValueError(f"{strategy} has groups of equal size, and each has its part of the data{_REMEDY}")
    layout = Bundle({"w": torch.zeros(_SOME_RANKS)})
    states = strategy.gradients.init(layout), strategy.parameters.init(layout)
    if _has((DelayedState, OverlappedState), states):
        raise ValueError(
            f"{strategy} has exchanges under way when a step ends, which a lost rank would break off{_REMEDY}"
        )
    if _has(PushSumState, states):
        raise ValueError(
            f"{strategy} keeps a sum over all ranks, of which a lost rank would take a part away; use gossip()"
        )
    if strategy.parameters.at_once is None and _has(PeriodState, states[1]):
        raise ValueError(
            f"{strategy} exchanges parameters on some steps, by a transform that cannot do so on others, where a rank "
            "is lost between them; put every(…), until(…) or after(…) around all of it"
        )


def mixed(strategy: Strategy) -> ValueError:
    """The error where ranks exchange gradients in a step in which models differ, or meet by parameters too."""
    return ValueError(
        f"{strategy} exchanges gradients within a round of steps between exchanges of parameters, of which an elastic "
        "run can undo or finish one alone; use one of both, one after the other as post_local_sgd does, or leave "
        "min_workers and max_workers out"
    )


def _has(kind: type | tuple[type, ...], state: Any) -> bool:
    if isinstance(state, dict):
        return any(_has(kind, value) for value in state.values())
    return isinstance(state, kind) or (isinstance(state, tuple) and any(_has(kind, value) for value in state))
