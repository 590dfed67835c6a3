"""`UnusedParameters`: parameters without a gradient, which an update leaves alone, as plain torch does.

    push of worker 0   no gradient of a, b  ─┐
    push of worker 1   no gradient of b     ─┴▶ the sum has none of b: its weights, moments and step count stay

A parameter has a gradient in a sum if any of its pushes has one. In a push without it its gradient counts as 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec


class UnusedParameters(msgspec.Struct, array_like=True):
    """The unused parameters of a shard's sums, by name."""

    summed: tuple[str, ...] | None = None
    """The parameters without a gradient in the sum; None: the sum has no push."""
    parts: dict[int, tuple[str, ...]] = {}
    """Batch -> the parameters without a gradient in the sum of its parts."""
    skipped: dict[str, int] = {}
    """Parameter -> the number of the optimizer's steps that have left it alone."""

    def add(self, unused: Collection[str], part_of: int | None = None) -> None:
        """A push without a gradient of `unused` is in the sum, or in the sum of the batch `part_of`."""
        if part_of is None:
            self.summed = common(self.summed, unused)
        else:
            self.parts[part_of] = common(self.parts.get(part_of), unused)

    def take(self, including: int | None = None) -> tuple[str, ...]:
        """The unused parameters of an update with the sum, and with the parts of the batch `including`."""
        found, self.summed = self.summed, None
        if including in self.parts:
            found = common(found, self.parts.pop(including))
        for name in found or ():
            self.skipped[name] = self.skipped.get(name, 0) + 1
        return found or ()


def common(known: Iterable[str] | None, unused: Collection[str]) -> tuple[str, ...]:
    """The parameters that neither sum has a gradient of. `known` None: there is only one sum."""
    return tuple(unused if known is None else (name for name in known if name in unused))


def joined(several: Sequence[tuple[UnusedParameters, int]], steps: int) -> UnusedParameters:
    """The unused parameters of a shard that takes over others' elements and goes on after step `steps`.

    `several`: each shard's, with its steps. A parameter that several shards had in pieces counts as in the first one.
    """
    found = UnusedParameters()
    for each, made in several:
        if each.summed is not None:
            found.add(each.summed)
        for batch, names in each.parts.items():
            found.add(names, batch)
        for name, skipped in each.skipped.items():
            found.skipped.setdefault(name, steps - (made - skipped))
    return found
