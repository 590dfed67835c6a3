"""`ModelBuffers`: the buffers of a model, which meet when ranks do: beside the strategy's messages, or along with them.

"average"      running statistics of batch and instance norms: their mean, a gossip's mix, a robust merge; no others
"broadcast"    all buffers: rank 0's
"leave"        none
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polytempo.collectives import tree
from polytempo.core import Bundle, Port, State, Transform, averaging, native
from polytempo.training.model.tensor_groups import by_kind

BufferRule = Literal["average", "broadcast", "leave"]

BUFFER_CHANNEL = 1010


class AppliedTransform(NamedTuple):
    """A transform by which ranks have exchanged something, and the state that it was applied in."""

    transform: Transform
    state: State


class MemberWeight(NamedTuple):
    """How much this rank counts where ranks may leave a `join`."""

    weight: float | None = None
    """Its part of a mean over models (None: equal parts): 0 once it has left."""
    source: int = 0
    """The rank whose buffers count where they cannot be averaged: the first that has not left."""


class ModelBuffers:
    """The buffers of `model` by one rule. Raises ValueError for a rule that there is none of."""

    def __init__(self, model: nn.Module, rule: BufferRule) -> None:
        if rule not in ("average", "broadcast", "leave"):
            raise ValueError(f"buffers must be 'average', 'broadcast' or 'leave', got {rule!r}")
        self.rule = rule
        self._model = model
        self._norms = {name: module for name, module in model.named_modules() if isinstance(module, _NormBase)}
        self._met = False
        self.passed = False
        """Whether forward passes have changed them since ranks met: a pipeline computes some behind its last update."""

    def tensors(self) -> dict[str, Tensor]:
        """Those that meet. Only running statistics are averaged; others are constants or the model's affair."""
        if self.rule != "average":
            return dict(self._model.named_buffers())
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._norms.items()
            for name, buffer in module.named_buffers(recurse=False)
        }

    def averaged(self) -> dict[str, Tensor]:
        """Those that a mean of models averages."""
        found = self.tensors() if self.rule == "average" else {}
        return {name: buffer for name, buffer in found.items() if buffer.is_floating_point()}

    def equal(self) -> dict[str, Tensor]:
        """Those that synchronized ranks hold equal right after a step: those that met in it."""
        found = self.tensors() if self._met and not self.passed else {}
        return {name: b for name, b in found.items() if self.rule == "broadcast" or b.is_floating_point()}

    async def meet(self, data: Port, applied: AppliedTransform | None, member: MemberWeight) -> None:
        """After a step: if ranks have met in it, by `applied`, their buffers do, too."""
        self._met, self.passed = applied is not None and data.size > 1 and self.rule != "leave", False
        if self._met and self.tensors():
            agreed = await self.agreed(data, applied, member)
            for name, buffer in self.tensors().items():
                buffer.copy_(agreed[name])

    async def agreed(self, data: Port, applied: AppliedTransform | None, member: MemberWeight) -> dict[str, Tensor]:
        """What ranks make of their buffers by the rule, in memory of its own.

        With a `applied` they meet beside it, by its messages' way, and talk to no other ranks. Counts of batches, which
        grow alike, stay as they are. Else, and in a `join`, where ranks have counted differently, all hear one rank's.
        """
        groups, out = by_kind(self.tensors()), dict[str, Tensor]()
        if not groups:
            return out
        port = data.on_channel(BUFFER_CHANNEL)
        average = averaging(tree) if applied is None else applied.transform.beside or averaging(native)
        for kind, group in groups.items():
            bundle = Bundle(group, member.weight)
            if self.rule == "average" and kind[0].is_floating_point:
                bundle = await average(port, bundle, None if applied is None else applied.state)
            elif self.rule == "broadcast" or applied is None or member.weight is not None:
                bundle = bundle.with_flat(await port.broadcast(bundle.flat, member.source))
            out |= bundle.views
        return out
