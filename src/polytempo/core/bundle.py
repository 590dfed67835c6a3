"""`Bundle`: named tensors that travel together, with one flat buffer over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors


class Observed(NamedTuple):
    """Numbers of the step that parameters have just made."""

    rate: Tensor | float
    """The learning rate of the optimizer's first group."""
    loss: Tensor | None = None
    """This rank's; None where the step knows none."""


class Bundle:
    """Tensors of one dtype and device, by name, and a flat buffer with a view for each.

    The flat buffer is packed when it is first asked for, so a transform that does nothing costs
    nothing. From then on `views` are windows into it: elementwise work uses `flat` (one operation,
    no copies), matrix work uses `views`.

        flat   [ w1 w1 w1 w1 | b1 b1 | w2 w2 ... ]      shape (numel,)
        views    "w1": (2, 2)  "b1": (2,)  ...

    `share` is this rank's part of the whole: its samples over all ranks' samples, or None where
    every rank counts the same. `observed` are numbers of the step before. Ownership moves with a bundle: a function
    that is given one may overwrite its flat buffer.
    """

    __slots__ = ("_flat", "_into", "_views", "observed", "share", "tensors")

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        share: float | None = None,
        *,
        flat: Tensor | None = None,
        into: Bundle | None = None,
    ) -> None:
        """`tensors` give names, shapes and values; `flat` overrides the values; `into` lends memory to pack into."""
        self.tensors = tensors
        self.share = share
        self.observed: Observed | None = None
        self._flat = flat
        self._into = into
        self._views: dict[str, Tensor] | None = None

    @property
    def names(self) -> list[str]:
        """The tensors' names, in the order of the flat buffer."""
        return list(self.tensors)

    @property
    def packed(self) -> bool:
        """True once the flat buffer exists."""
        return self._flat is not None

    @property
    def flat(self) -> Tensor:
        """All values in one buffer, shape (numel,). Packs them on first use."""
        if self._flat is None:
            self._flat = pack(list(self.tensors.values()), None if self._into is None else self._into.flat)
            self._views = None if self._into is None else self._into.views
        return self._flat

    def scaled(self, factor: float) -> Tensor:
        """`flat` times `factor`, in place; packs and scales in one pass over the memory where nothing is packed yet."""
        if self._flat is not None or self._into is None:
            return self.flat.mul_(factor)
        self._flat, self._views = self._into.flat, self._into.views
        for tensor, window in zip(self.tensors.values(), self._views.values(), strict=True):
            torch.mul(tensor, factor, out=window)
        return self._flat

    @property
    def views(self) -> dict[str, Tensor]:
        """Windows into `flat`, shaped like the tensors."""
        if self._views is None:
            pieces = _unflatten_dense_tensors(self.flat, list(self.tensors.values()))
            self._views = dict(zip(self.tensors, pieces, strict=True))
        return self._views

    def with_flat(self, flat: Tensor) -> Bundle:
        """The same names and shapes over other values."""
        other = Bundle(self.tensors, self.share, flat=flat)
        other.observed = self.observed
        if flat is self._flat:
            other._views = self._views
        return other

    def map(self, function: Callable[[Tensor], Tensor]) -> Bundle:
        """`function` of the flat buffer, as a bundle."""
        return self.with_flat(function(self.flat))

    def copy(self) -> Bundle:
        """The same values in memory of their own."""
        return self.with_flat(self.flat.clone())

    def select(self, names: list[str]) -> Bundle:
        """The named part, unpacked."""
        source = self.views if self.packed else self.tensors
        return Bundle({name: source[name] for name in names}, self.share)

    def __repr__(self) -> str:
        return f"Bundle({len(self.tensors)} tensors, share={self.share})"


def pack(tensors: list[Tensor], into: Tensor | None = None) -> Tensor:
    """The tensors' values in one flat buffer (`into`, where given): one pass over the memory."""
    if not tensors:
        return torch.empty(0) if into is None else into
    if tensors[0].is_meta:  # no values; torch takes 0.1 ms to find the shape of their concatenation
        return _without_values(sum(t.numel() for t in tensors), tensors[0].dtype) if into is None else into
    flats = [t.reshape(-1) for t in tensors]
    if into is None:
        return torch.cat(flats)
    return torch.cat(flats, out=into)


@lru_cache(maxsize=64)
def _without_values(numel: int, dtype: torch.dtype) -> Tensor:
    """A shape alone: nothing can be written to it, so all who ask may have the same one."""
    return torch.empty(numel, dtype=dtype, device="meta")


def by_kind(tensors: Mapping[str, Tensor]) -> dict[tuple[torch.dtype, torch.device], dict[str, Tensor]]:
    """Tensors grouped by dtype and device, each group in its first appearance's order."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return groups
