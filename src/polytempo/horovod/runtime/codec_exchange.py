"""`CodecExchange`: the mean of all ranks' tensors by a codec, with the memory from one to the next."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polytempo.compression import through
from polytempo.compression.exchange.wire_route import Exchanged
from polytempo.core import Bundle, Codec
from polytempo.horovod.runtime.groups import SetTransport

_Layout = tuple[torch.dtype, tuple[torch.Size, ...]]
Kept = tuple[int, dict[_Layout, Exchanged]]
"""A copy of an exchange's memory."""


class CodecExchange:
    """Made by the program, for one name; all ranks make theirs with equal codecs. Wires travel as `through` decides.

    The unsent residuals belong to it, by dtype and shapes. `step` counts its exchanges: all ranks draw by it.
    """

    def __init__(self, codec: Codec) -> None:
        self.name = codec.facts.name
        self._transform = through(codec)
        self._states: dict[_Layout, Exchanged] = {}
        self.step = 0

    def average_(self, transport: SetTransport, tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors, all of one dtype, to their means. With one rank only the residual is added."""
        layout = next(iter(tensors.values())).dtype, tuple(tensor.shape for tensor in tensors.values())
        bundle = Bundle(tensors)
        state = self._states[layout] if layout in self._states else self._transform.init(bundle)
        answer, after = transport.transformed(self._transform, bundle, state._replace(step=self.step))
        self.step, self._states[layout] = after.step, after
        for tensor, view in zip(tensors.values(), answer.views.values(), strict=True):
            tensor.copy_(view)

    def kept(self) -> Kept:
        """A copy of its memory."""
        return copy.deepcopy((self.step, self._states))

    def go_to(self, kept: Kept) -> None:
        """Remember this instead."""
        self.step, self._states = copy.deepcopy(kept)


def encodable(tensors: Sequence[Tensor]) -> bool:
    """True if a codec takes at least one of them: floating-point numbers."""
    return any(tensor.is_floating_point() for tensor in tensors)
