"""Dropout on tensors with a part on each rank: each draws the whole tensor's mask, and uses its own slice."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.partition.tensor.exchange import POSITIONS, check_positions
from polytempo.partition.tensor.layers.layer import SplitLayer
from polytempo.partition.tensor.model_group import ModelGroup


def sliced_dropout(part: Tensor, p: float, begin: int, total: int, dim: int) -> Tensor:
    """Dropout as on the whole tensor, with `total` indices along `dim`; `part` begins at `begin`.

    Ranks with the same random state drop the same as one process, which draws in the order of memory. Cost: memory for
    the whole mask, for a moment.
    """
    shape = list(part.shape)
    shape[dim] = total
    outer_first = sorted(range(part.dim()), key=part.stride, reverse=True)
    laid_out = torch.ones([shape[each] for each in outer_first], dtype=part.dtype, device=part.device)
    whole = laid_out.permute([outer_first.index(each) for each in range(part.dim())])
    mask = functional.dropout(whole, p, training=True)
    return part * mask.narrow(dim, begin, part.shape[dim])


class SplitDropout(SplitLayer):
    """`nn.Dropout` on a part along `dim`. The ranks exchange their sizes once."""

    def __init__(self, group: ModelGroup, p: float, dim: int) -> None:
        super().__init__(group)
        self.p, self.dim = p, dim
        self._sizes: tuple[int, ...] = ()

    def forward(self, part: Tensor) -> Tensor:
        """The shape stays."""
        if not self.training or not self.p:
            return part
        sizes = self._divided(part)
        return sliced_dropout(part, self.p, sum(sizes[: self.group.rank]), sum(sizes), self.dim)

    def _divided(self, part: Tensor) -> tuple[int, ...]:
        if self.dim == POSITIONS and self.group.sequence and self.group.size > 1:
            check_positions(self.group, part)
            return self.group.positions
        own = part.shape[self.dim]
        if not self._sizes:
            there = None if part.is_meta else part.device  # how it is divided has a value also where parts have none
            self._sizes = tuple(int(size) for size in self.group.all(torch.tensor([own], device=there)))
        if self._sizes[self.group.rank] != own:
            raise ValueError(
                f"a split dropout had {self._sizes[self.group.rank]} of {sum(self._sizes)} features, and now {own}; "
                "give each place of the model a dropout of its own"
            )
        return self._sizes


class CheckedDropout(nn.Module):
    """A dropout that no rule names: it is the same on all ranks, which is true where they give it the same tensor.

    The first time, in training, the ranks compare their tensors. ValueError where they differ.
    """

    def __init__(self, group: ModelGroup, whole: nn.Module, name: str) -> None:
        super().__init__()
        self.group, self.name, self._checked = group, name, group.size == 1
        self.whole = whole

    def forward(self, tensor: Tensor) -> Tensor:
        """The dropout's answer."""
        if self.training and not self._checked:
            self._checked = True
            if not same_everywhere(self.group, tensor):
                raise ValueError(
                    f"dropout {self.name} gets another tensor on each rank of the model, and would draw one mask for "
                    f'all; give it a way: {{"{self.name}": "column"}} where features are split, "heads" where heads are'
                )
        answer: Tensor = self.whole(tensor)
        return answer


def same_everywhere(group: ModelGroup, tensor: Tensor) -> bool:
    """True if all ranks have a tensor of this shape and these values, as far as sums tell. Cost: four numbers."""
    value = tensor.detach().double()
    at = torch.arange(1, value.numel() + 1, dtype=torch.float64, device=value.device)
    sums = torch.stack([value.sum(), value.abs().sum(), (value.reshape(-1) * at).sum()])
    shape = torch.tensor([hash(tuple(tensor.shape)) % 2**31], dtype=torch.float64, device=value.device)
    found = group.all(torch.cat([sums, shape]))
    if tensor.is_meta:
        return True
    return all(torch.allclose(each, found[0], rtol=1e-3, equal_nan=True) for each in found)
