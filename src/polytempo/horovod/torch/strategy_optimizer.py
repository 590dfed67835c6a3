"""`DistributedOptimizer(strategy=…)`: any strategy of this library in a script for Horovod, through `attach`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.horovod.torch.process_state import PROCESS
from polytempo.runs.own_loop.attach import attach
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.hooks.handle import Handle


def with_strategy(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    strategy: Strategy | str,
    given: Sequence[str],
) -> Any:
    """`optimizer` itself, attached, with `handle` (the one of `pt.attach`), `synchronize` and `skip_synchronize`.

    The strategy is a value, or text: "local_sgd(period=8)". Buffers of the model stay each rank's own, as in Horovod.
    `given`: the other given arguments, which exclude a strategy.
    """
    world = PROCESS.opened().world
    if given:
        raise ValueError(
            f"strategy={strategy} decides how ranks exchange, so {', '.join(given)} cannot be given beside it; codecs, "
            "periods and routes are arguments of strategies, as local_sgd(period=8, codec=int8)"
        )
    if PROCESS.place is not None:
        raise ValueError(
            f"strategy={strategy} belongs to one group of ranks, and in an elastic run groups change; leave it out, or "
            "use polytempo.elastic, which attaches it again in each group"
        )
    if hasattr(optimizer, "handle"):
        raise ValueError("this optimizer has a strategy already; call optimizer.handle.detach() first")
    if named_parameters is None:
        raise ValueError("a strategy knows parameters by name; give named_parameters=model.named_parameters()")
    chosen = parse_strategy(strategy) if isinstance(strategy, str) else strategy
    attached: Any = optimizer
    attached.handle = handle = attach(_module_of(named_parameters), optimizer, chosen, world=world)
    attached.synchronize = handle.complete if isinstance(handle, Handle) else lambda: None
    attached.skip_synchronize = nullcontext
    return attached


def _module_of(named_parameters: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """A module with these parameters under these names, and nothing else: Horovod is given no model."""
    root = nn.Module()
    for name, parameter in named_parameters:
        if not isinstance(parameter, nn.Parameter):
            raise ValueError(f"{name!r} is not an nn.Parameter; give named_parameters=model.named_parameters()")
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, parameter)
    return root
