"""`StageModel`: the parts of a model that one stage holds, as one module with the whole model's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from polytempo.partition.cut import Stage


class StageModel(nn.Module):
    """Modules, parameters and buffers of all of a stage's parts, by the names that they have in the whole model."""

    def __init__(self, parts: Sequence[Stage]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part.module for part in parts])

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Modules by the whole model's names; parameters and buffers follow from them."""
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]  # its overloads
        """The stage's entries of the whole model's state."""
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the stage's entries of a state, which may be the whole model's. KeyError where one is missing."""
        for part in self.parts:
            part.load_state_dict({name: state_dict[name] for name in part.state_dict()}, strict, assign)
