"""One rank's updates of a copy of the parameters that all ranks of a host share.

free        rank 0  ──gradient──▶ update ──gradient──▶ update         whenever a gradient is there
            rank 1  ────gradient────▶ update ──gradient──▶ …
atomic      the same, and each component is added to in one step, so no addition is lost
locked      the same, but one update at a time
in_turn     rank 0 updates, then rank 1, …, then rank 0 again: a baton goes round
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from polytempo.core import Port, Strategy, Turn, Work
from polytempo.core.arithmetic.kernel_use import Uses
from polytempo.native.common import Common
from polytempo.native.kernels.sparse import ADDED, scatter_add_
from polytempo.one_host.one_copy import alias_parameters
from polytempo.worlds import ProcessWorld

_CHANNEL = 1011
_VARIATION = 0.1
"""The variation of a virtual worker's step time, so that interleavings vary as on real cores."""


def is_hogwild(strategy: Strategy) -> bool:
    """True if ranks write to one copy of the parameters each on its own."""
    return strategy.one_copy not in (None, "together")


class Baton:
    """The right to update, handed from rank to rank: rank r has it after rank r - 1, rank 0 first.

    Every rank takes it and hands it on equally often. Rank 0 asks for its return as soon as it has handed it on, so
    no rank waits to get rid of it.
    """

    def __init__(self) -> None:
        self._coming: Work[Tensor] | None = None
        self._going: Work[None] | None = None

    async def take(self, port: Port) -> None:
        """Wait until it is this rank's turn."""
        if port.size == 1:
            return
        if port.rank:
            await port.on_channel(_CHANNEL).recv(torch.empty(1), port.rank - 1)
        elif self._coming is not None:
            await self._coming

    async def hand_on(self, port: Port) -> None:
        """Give the turn to the next rank."""
        if port.size == 1:
            return
        port = port.on_channel(_CHANNEL)
        if self._going is not None:
            await self._going
        if port.rank == 0:
            self._coming = await port.start(port.recv(torch.empty(1), port.size - 1))
        self._going = await port.start(port.send(torch.zeros(1), (port.rank + 1) % port.size))

    async def settle(self) -> None:
        """Wait for the messages under way, after the last step."""
        for work in (self._going, self._coming):
            if work is not None:
                await work


class Updates:
    """Performs one virtual rank's updates, each by its turn."""

    def __init__(self, turn: Turn | None, random: Random | None = None) -> None:
        self.turn, self._random = turn, random
        self._baton = Baton()

    def varied(self, flops: float) -> float:
        """A step's cost, varied at random: on real cores no two steps take equally long."""
        return flops if self._random is None else flops * self._random.uniform(1 - _VARIATION, 1 + _VARIATION)

    async def perform(self, port: Port, work: Callable[[], Any], flops: float, uses: Uses = ()) -> None:
        """Run `work`, which updates the parameters, when it is this rank's turn."""
        if self.turn == "locked":
            await port.alone(work, flops, uses)
        elif self.turn == "in_turn":
            await self._baton.take(port)
            await port.compute(work, flops, uses=uses)
            await self._baton.hand_on(port)
        else:
            await port.compute(work, flops, uses=uses)

    async def settle(self) -> None:
        """See `Baton.settle`."""
        await self._baton.settle()


class TurnHooks:
    """Makes `optimizer.step()` of a real rank an update by its turn. The parameters must be the shared ones.

    Sparse gradients under plain SGD are added to the rows that they touch by `scatter_add_`, in single loads and
    stores; all else is torch's own step on the shared memory. If the turn is "atomic", all gradients under plain SGD
    are added so, atomically; any other step is torch's own on a private copy, and its changes are added atomically.
    """

    def __init__(self, world: ProcessWorld, optimizer: Optimizer, turn: Turn, common: Common | None = None) -> None:
        self.common = common
        """The memory of the shared parameters, which the caller frees after `remove`."""
        self._world, self._optimizer, self._turn = world, optimizer, turn
        self._baton = Baton()
        self._updates = False
        """True while this rank has its turn. An optimizer with a `step` that calls its parent's runs all hooks
        twice."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._homes = [(parameter, parameter.data_ptr()) for parameter in held]
        self._private = _PrivateCopies(held) if turn == "atomic" else None
        self._inside = ExitStack()
        self._aside: list[tuple[Tensor, Tensor]] = []
        self.handles: list[RemovableHandle] = []

    def watch(self) -> TurnHooks:
        """Hook the optimizer. Hook checks that may refuse a step before this, so that none takes a turn in vain."""
        self.handles += [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._updates:
            return None
        if any(parameter.data_ptr() != home for parameter, home in self._homes):
            raise RuntimeError(
                "a parameter was given other memory (`.data = …`, `model.to(…)`), so it is no longer the one copy; "
                "write into it with `copy_`, or detach() and attach again"
            )
        self._updates = True
        replaced = _with_loss(args, kwargs) if type(self._optimizer) is SGD else None
        if self._turn == "locked":
            self._inside.enter_context(self._world.alone())
        elif self._turn == "in_turn":
            self._world.drive(self._baton.take(self._world.port))
        self._aside = add_plain_(self._optimizer, atomic=self._private is not None)
        for parameter, _gradient in self._aside:
            parameter.grad = None  # torch's step passes over it
        if self._private is not None:
            self._private.enter(gradients_only=type(self._optimizer) is SGD)  # other steps may call a closure
        return replaced

    def _after_step(self, *_: Any) -> None:
        if not self._updates:
            return
        self._updates = False
        if self._private is not None:
            self._private.leave()
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        self._inside.close()
        if self._turn == "in_turn":
            self._world.drive(self._baton.hand_on(self._world.port))

    def remove(self) -> None:
        """Wait for the messages under way, and make the optimizer an ordinary one again. All ranks must call it."""
        self._world.drive(self._baton.settle())
        for handle in self.handles:
            handle.remove()


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a step's closure now, for torch would call it after the hook; arguments that hand on its loss instead."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss), {}


class _PrivateCopies:
    """A step on a private copy of the parameters, and its changes, added atomically to the shared ones.

    Memory: two copies of the parameters, kept from the first step on.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        other = next((p.dtype for p in parameters if p.dtype not in ADDED or p.device.type != "cpu"), None)
        if other is not None:
            raise ValueError(f"hogwild('atomic') adds to float32 and float64 on the CPU, not to {other}; use 'locked'")
        self._parameters = parameters
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._inside: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def enter(self, *, gradients_only: bool) -> None:
        """Let all parameters, or only parameters with a gradient, be private copies of the shared ones."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is None and gradients_only:
                continue
            shared = parameter.data
            mine, base = self._buffers.setdefault(number, (torch.empty_like(shared), torch.empty_like(shared)))
            mine.copy_(base.copy_(shared))
            parameter.data = mine
            self._inside.append((parameter, shared, mine, base))

    @torch.no_grad()
    def leave(self) -> None:
        """Add the changes of the private copies to the shared parameters, and let these be the parameters again."""
        for parameter, shared, mine, base in self._inside:
            parameter.data = shared
            _add_all_(shared, mine.sub_(base), 1.0)
        self._inside.clear()


def _add_all_(shared: Tensor, values: Tensor, scale: float) -> None:
    """shared += scale · values, atomically. Both have the same strides, without gaps."""
    numel = shared.numel()
    if numel:
        flat, added = (t.as_strided((1, numel), (numel, 1)) for t in (shared, values))
        scatter_add_(flat, torch.zeros(1, dtype=torch.int64), added, scale, atomic=True)


@torch.no_grad()
def add_plain_(optimizer: Optimizer, *, atomic: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Do the part of a step of plain SGD that sparse gradients ask for, θ[rows] -= γ g; with `atomic` the whole step.

    Plain is without momentum and weight decay. Returns the parameters that are done, with their gradients: float32 (or
    float64, atomically) on the CPU. Cost: only the rows that the gradient names are touched, each as often as it is
    named.
    """
    done: list[tuple[Tensor, Tensor]] = []
    if type(optimizer) is not SGD:
        return done
    for group in optimizer.param_groups:
        if group["momentum"] or group["weight_decay"]:
            continue
        scale = float(group["lr"]) * (1.0 if group["maximize"] else -1.0)
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or parameter.dtype not in (ADDED if atomic else ADDED[:1]):
                continue
            if _is_rows(parameter, gradient):
                scatter_add_(parameter.detach(), gradient._indices()[0], gradient._values(), scale, atomic=atomic)
            elif atomic and gradient.layout == torch.strided and gradient.stride() == parameter.stride():
                _add_all_(parameter.detach(), gradient, scale)
            else:
                continue
            done.append((parameter, gradient))
    return done


def _is_rows(parameter: Tensor, gradient: Tensor) -> bool:
    plain = parameter.device.type == "cpu" and parameter.is_contiguous()
    return plain and gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1


def share_storage(models: Sequence[nn.Module]) -> None:
    """Let all models' parameters be views of the first one's; buffers stay each model's own."""
    first: Mapping[str, nn.Parameter] = dict(models[0].named_parameters())
    for model in models[1:]:
        for name, parameter in model.named_parameters():
            parameter.data = first[name].data


def in_turns(
    world: ProcessWorld, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, strategy: Strategy
) -> TurnHooks:
    """Make `parameters` aliases of the one copy, to be updated by the strategy's turn once it watches. All call it."""
    assert strategy.one_copy is not None
    common = alias_parameters(world, parameters)
    return TurnHooks(world, optimizer, strategy.one_copy, common)
