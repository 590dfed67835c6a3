"""`PicturePart`: this rank's area of a tensor (…, places), as functions of pictures take and return it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from polytempo.partition.tensor.exchange import copied, gathered, scattered
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.spatial.areas import PictureGrid, cut_out, volume


class PicturePart(NamedTuple):
    """`tensor` is (…, places of this rank's area)."""

    group: ModelGroup
    places: PictureGrid
    tensor: Tensor

    @property
    def dims(self) -> int:
        """Number of dimensions of places."""
        return len(self.places.sizes)

    @property
    def before(self) -> tuple[int, ...]:
        """Sizes of the other dimensions: samples and channels."""
        return tuple(self.tensor.shape[: -self.dims])

    def of(self, tensor: Tensor, places: PictureGrid | None = None) -> PicturePart:
        """Another tensor of this rank."""
        return PicturePart(self.group, places or self.places, tensor)

    def whole(self) -> Tensor:
        """(…, *sizes) on every rank; all ranks compute the same with it. Cost: forward a gather."""
        sizes = [self.tensor.shape[: -self.dims].numel() * volume(area) for area in self.places.areas]
        flat = gathered(self.group, self.tensor.reshape(-1), sizes, 0)
        return self.places.joined(flat, self.before)

    def fitted(self, other: Tensor) -> Tensor:
        """A tensor that all ranks hold, for a function of single places of this one: its own area of each dimension of
        places that it has. Cost: where it learns, backward a sum."""
        if other.dim() == 0:
            return copied(self.group, other) if other.requires_grad else other
        found = copied(self.group, other) if other.requires_grad else other
        area = self.places.areas[self.group.rank]
        for dim in range(max(-self.dims, -other.dim()), 0):
            if other.shape[dim] != 1:
                begin, end = area[dim]
                found = found.narrow(dim, begin, end - begin)
        return found


def entered(group: ModelGroup, places: PictureGrid, whole: Tensor) -> PicturePart:
    """This rank's area of a tensor that all ranks hold. Cost: where it learns, backward a gather."""
    rank = group.rank
    if not whole.requires_grad:
        return PicturePart(group, places, places.own(whole, rank))
    before = whole.shape[: -len(places.sizes)]
    sizes = [before.numel() * volume(area) for area in places.areas]
    own = cut_out(whole.detach(), places.areas[rank], [0] * len(places.sizes)).shape
    return PicturePart(group, places, scattered(group, places.flat(whole), sizes, 0).view(own))
