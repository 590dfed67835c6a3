"""`BatchMover`: batches on their way to a device, one ahead of the step that needs it.

host     gather 0 ─ pin 0 ─ gather 1 ─ pin 1 ─ …
device             copy 0 ──────┬──── copy 1 ─ …       the stream beside the computing one
                                ╰▶ step 0 ─────┬▶ …    waits for its own copy alone
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from polytempo.device import current_stream, side_stream

T = TypeVar("T")


class _Moving(NamedTuple):
    """A batch under way."""

    leaves: list[Any]
    structure: Any
    pinned: list[Tensor]
    """The host's memory that the copies read until `landed`."""
    landed: torch.Event | None


@final
class BatchMover:
    """Moves the tensors of batches, in lists, tuples and dicts, to `device`; other values stay.

    Copies are non-blocking, from pinned memory, on the stream beside the computing one. Tensors that are there already
    are not copied. On the CPU it does nothing. Memory: two batches on the device, and two pinned.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = None if device is None or device.type == "cpu" else device
        self._read: list[_Moving] = []
        """The last batch that was handed out: its copies may still read pinned memory."""

    @property
    def moves(self) -> bool:
        """False on the CPU."""
        return self._device is not None

    def moved(self, batch: Any) -> Any:
        """The batch on the device."""
        return batch if self._device is None else self._landed(self._begun(batch))

    def ahead(self, batches: Iterator[tuple[T, Any]]) -> Iterator[tuple[T, Any]]:
        """Pairs of a value and a batch: each batch's copy begins before the batch ahead of it is handed out."""
        if self._device is None:
            yield from batches
            return
        waiting: tuple[T, _Moving] | None = None
        for about, batch in batches:
            following = about, self._begun(batch)
            if waiting is not None:
                yield waiting[0], self._landed(waiting[1])
            waiting = following
        if waiting is not None:
            yield waiting[0], self._landed(waiting[1])

    def _begun(self, batch: Any) -> _Moving:
        assert self._device is not None
        leaves, structure = tree_flatten(batch)
        if not any(isinstance(leaf, Tensor) and leaf.device != self._device for leaf in leaves):
            return _Moving(leaves, structure, [], None)
        pinned: list[Tensor] = []
        with (stream := side_stream(self._device)):
            moved = [self._copied(leaf, pinned) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            landed = stream.record_event()
        return _Moving(moved, structure, pinned, landed)

    def _copied(self, tensor: Tensor, pinned: list[Tensor]) -> Tensor:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel():
            tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
            pinned.append(tensor)
        return tensor.to(self._device, non_blocking=True)

    def _landed(self, moving: _Moving) -> Any:
        if moving.landed is not None:
            assert self._device is not None
            present = current_stream(self._device)
            present.wait_event(moving.landed)
            for leaf in moving.leaves:
                if isinstance(leaf, Tensor) and leaf.device == self._device:
                    leaf.record_stream(present)
            self._read = [*self._read[-1:], moving]
        return tree_unflatten(moving.leaves, moving.structure)
