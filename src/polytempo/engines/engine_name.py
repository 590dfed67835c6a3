"""`EngineName`: an engine as `--engine ssh:n1,n2` names it, read without loading the engine, which takes seconds."""

from __future__ import annotations

from typing import NamedTuple

from polytempo import engines


class EngineName(NamedTuple):
    """The two parts of `NAME[:address]`."""

    name: str
    address: str | None
    """None without a colon."""

    @classmethod
    def of(cls, text: str) -> EngineName:
        """Split the text. Errors: ValueError for an engine that does not exist."""
        name, colon, address = text.partition(":")
        if name not in engines.__all__:
            raise ValueError(f"engine {name!r} is not known; there are: {', '.join(engines.__all__)}")
        return cls(name, address if colon else None)

    def __str__(self) -> str:
        return self.name if self.address is None else f"{self.name}:{self.address}"
