"""`CodecExchange`: the mean of all ranks' tensors by a codec, and what it remembers from one to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polytempo.compression import through
from polytempo.core import Bundle, Codec, State
from polytempo.horovod.runtime.groups import SetTransport

_Layout = tuple[torch.dtype, tuple[torch.Size, ...]]


class CodecExchange:
    """Made by the program, for one name; all ranks make theirs with equal codecs. Wires travel as `through` decides.

    What ranks have not sent yet belongs to it, by dtype and shapes.
    """

    def __init__(self, codec: Codec) -> None:
        self.name = codec.facts.name
        self._transform = through(codec)
        self._states: dict[_Layout, State] = {}

    def average_(self, transport: SetTransport, tensors: Mapping[str, Tensor]) -> None:
        """Each of the tensors, of one dtype, becomes the mean. With one rank it stays, and the residual is added."""
        layout = next(iter(tensors.values())).dtype, tuple(tensor.shape for tensor in tensors.values())
        bundle = Bundle(tensors)
        state = self._states[layout] if layout in self._states else self._transform.init(bundle)
        answer, self._states[layout] = transport.transformed(self._transform, bundle, state)
        for tensor, view in zip(tensors.values(), answer.views.values(), strict=True):
            tensor.copy_(view)


def encodable(tensors: Sequence[Tensor]) -> bool:
    """Whether there is something among them that a codec takes: floating-point numbers."""
    return any(tensor.is_floating_point() for tensor in tensors)
