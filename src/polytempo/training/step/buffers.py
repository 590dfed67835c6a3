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
from polytempo.core.bundle import by_kind

BufferRule = Literal["average", "broadcast", "leave"]

BUFFER_CHANNEL = 1010


class AppliedTransform(NamedTuple):
    """The transform of an exchange, and the state that it was applied in."""

    transform: Transform
    state: State


class MemberWeight(NamedTuple):
    """This rank's weight while ranks may leave a `join`."""

    weight: float | None = None
    """Weight in a mean over models (None: equal parts): 0 once it has left."""
    source: int = 0
    """The rank that provides buffers without a mean: the first that has not left."""


class ModelBuffers:
    """The buffers of `model` by one rule. Raises ValueError for an unknown rule."""

    def __init__(self, model: nn.Module, rule: BufferRule) -> None:
        if rule not in ("average", "broadcast", "leave"):
            raise ValueError(f"buffers must be 'average', 'broadcast' or 'leave', got {rule!r}")
        self.rule = rule
        self._model = model
        self._norms = {name: module for name, module in model.named_modules() if isinstance(module, _NormBase)}
        self._met = False
        self.passed = False
        """True after forward passes behind the last meeting: a pipeline computes some after its last update."""

    def tensors(self) -> dict[str, Tensor]:
        """The buffers that meet. Only running statistics are averaged; others are constants or the model's affair."""
        if self.rule != "average":
            return dict(self._model.named_buffers())
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._norms.items()
            for name, buffer in module.named_buffers(recurse=False)
        }

    def averaged(self) -> dict[str, Tensor]:
        """The buffers that a mean of models averages."""
        found = self.tensors() if self.rule == "average" else {}
        return {name: buffer for name, buffer in found.items() if buffer.is_floating_point()}

    def equal(self) -> dict[str, Tensor]:
        """The buffers that synchronized ranks hold equal right after a step, because they met in it."""
        found = self.tensors() if self._met and not self.passed else {}
        return {name: b for name, b in found.items() if self.rule == "broadcast" or b.is_floating_point()}

    async def meet(self, data: Port, applied: AppliedTransform | None, member: MemberWeight) -> None:
        """Let buffers meet after a step, if ranks have met in it by `applied`."""
        self._met, self.passed = applied is not None and data.size > 1 and self.rule != "leave", False
        if self._met and self.tensors():
            agreed = await self.agreed(data, applied, member)
            for name, buffer in self.tensors().items():
                buffer.copy_(agreed[name])

    async def agreed(self, data: Port, applied: AppliedTransform | None, member: MemberWeight) -> dict[str, Tensor]:
        """The ranks' common buffers by the rule, in memory of their own.

        With `applied` buffers use its `beside` and its messages' way, and reach no other ranks. Counts of batches grow
        alike and stay. Without it, and in a `join`, where ranks have counted differently, all take one rank's.
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
