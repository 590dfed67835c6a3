"""Which strategies an elastic run takes: those in which the ranks agree on each step before the optimizer makes it."""

from __future__ import annotations

from typing import Any

import torch

from polytempo.core import Bundle, Strategy, is_idle
from polytempo.synchronization.delayed import DelayedState

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
    if not strategy.synchronized or not is_idle(strategy.parameters, _SOME_RANKS):
        raise ValueError(
            f"{strategy} exchanges parameters after the optimizer's step, which a rank that is lost meanwhile leaves "
            f"half done{_REMEDY}"
        )
    if _is_delayed(strategy.gradients.init(Bundle({"w": torch.zeros(_SOME_RANKS)}))):
        raise ValueError(
            f"{strategy} has exchanges under way when a step ends, which a lost rank would break off{_REMEDY}"
        )


def _is_delayed(state: Any) -> bool:
    if isinstance(state, dict):
        return any(map(_is_delayed, state.values()))
    return isinstance(state, DelayedState) or (isinstance(state, tuple) and any(map(_is_delayed, state)))
