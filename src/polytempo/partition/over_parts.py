"""`over_parts`: the strategy of a model whose layers lie in parts on several workers, and of what these exchange."""

from __future__ import annotations

from dataclasses import replace

from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.core.strategy import Parted


def over_parts(name: str, parted: Parted, inner: Strategy) -> Strategy:
    """Layers in parts as `parted` says, and `inner` between the workers that hold the same.

    Errors: ValueError for an `inner` with a parameter server, one copy of the parameters, slices, stages, parts or
    groups.
    """
    cuts = (inner.schedule, inner.parted, inner.distillation)
    if any(way is not None for way in (inner.server, inner.one_copy, inner.slices, *cuts)):
        raise ValueError(
            f"{name}: workers that hold the same parts exchange gradients or parameters by messages, and {inner} works "
            "by another way (a parameter server, one copy of the weights, slices of a batch, stages, parts or groups "
            "of its own); give an inner strategy such as sync_sgd(), int8_sgd() or local_sgd(period=8)"
        )
    by_optimizer = inner.by_optimizer

    def fitting(optimizer: Optimizer) -> Strategy:
        assert by_optimizer is not None
        return replace(by_optimizer(optimizer), name=name, parted=parted, by_optimizer=None)

    return replace(inner, name=name, parted=parted, by_optimizer=by_optimizer and fitting)
