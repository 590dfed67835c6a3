"""`StageModel`: the parts of a model that one stage holds, as one module with the whole model's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from polytempo.partition.cut import Stage


class StageModel(nn.Module):
    """Parameters and buffers of all of a stage's parts, by the names that they have in the whole model."""

    def __init__(self, parts: Sequence[Stage]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part.module for part in parts])

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, by the whole model's names."""
        seen: set[nn.Parameter] = set()
        for part in self.parts:
            for name, parameter in part.named_parameters(prefix, recurse, remove_duplicate):
                if not remove_duplicate or parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As of any module, by the whole model's names."""
        for part in self.parts:
            yield from part.named_buffers(prefix, recurse, remove_duplicate)
