"""`LentGradients`: keeps gradients in memory that the shards can read while their pushes are under way.

gradient ──copy──▶ buffer ──lent──▶ shards          a buffer is free again when every shard has answered
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from polytempo.server.layout import Span, place_
from polytempo.server.shard.buffers import Empty


class LentGradients:
    """`empty` makes memory that shards can read; `is_readable(tensor)` says whether a tensor is in such memory already.

    Cost: one copy of a gradient that is not; as many buffers as pushes are under way at once.
    """

    def __init__(self, empty: Empty, is_readable: Callable[[Tensor], bool]) -> None:
        self.empty, self._is_readable = empty, is_readable
        self._free: list[Tensor] = []
        self._lent: dict[object, Tensor] = {}

    def lend(self, flat: Tensor, push: object) -> Tensor:
        """`flat`, or its copy, to be read by shards until `take_back(push)`."""
        if not flat.numel() or self._is_readable(flat):
            return flat
        buffer = self._free.pop() if self._free else self.empty(flat.numel(), flat.dtype)
        if buffer.shape != flat.shape or buffer.dtype != flat.dtype:
            buffer = self.empty(flat.numel(), flat.dtype)
        place_(buffer, (Span(0, flat.numel()),), flat)
        self._lent[push] = buffer
        return buffer

    def take_back(self, push: object) -> None:
        """Every shard has answered `push`."""
        buffer = self._lent.pop(push, None)
        if buffer is not None:
            self._free.append(buffer)
