"""`staged_strategy`: what the function of a pipeline answers: its name, its schedule, and what replicas do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from polytempo.core import Strategy, call_name
from polytempo.partition.over_stages import over_stages
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.wires import Wires

_BRIEF = ("inner", "activations", "gradients")


def staged_strategy(
    function: Callable[..., Strategy],
    arguments: Mapping[str, Any],
    schedule: Schedule,
    inner: Strategy,
    brief: Collection[str] = (),
) -> Strategy:
    """The strategy that `function` makes of its `arguments`, among them the codecs `activations` and `gradients`.

    Errors: TypeError for what is no codec, ValueError for one that cannot serve between stages (see `Wires`), and for
    an `inner` that replicas of a stage cannot have.
    """
    wired = replace(schedule, wires=Wires(arguments["activations"], arguments["gradients"]))
    return over_stages(call_name(function, arguments, brief=(*brief, *_BRIEF)), wired, inner)
