"""`over_parts`: the strategy of a model whose layers are divided over several workers, and of what these exchange."""

from __future__ import annotations

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.strategy import InParts, Parted


def over_parts(name: str, parted: Parted, inner: Strategy) -> Strategy:
    """Layers in parts as `parted` says, and `inner` between the workers that hold the same.

    Errors: `Incompatible` for an `inner` with a parameter server, one copy of the parameters, slices, stages, parts or
    groups.
    """
    refuse(inner.features | {"inside parts"}, strategy=inner, outer=name)
    return inner.laid_out(name, InParts(parted))
