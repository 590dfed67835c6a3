"""Bugs to plant in the production machines, so that the checkers can prove that they see.

Each is the kind of mistake that is easily made in such code: a line forgotten, a test the wrong way round. It replaces
one or two methods while it is planted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from polytempo.chaos.planted import bugs_at_coordinator, bugs_at_node, bugs_at_shard

Patch = tuple[Any, str, Any]
"""The owner of a method, the method's name, and its replacement."""


@dataclass(frozen=True)
class Bug:
    """A mistake and the patches that make it."""

    description: str
    patches: Callable[[], Iterable[Patch]]

    @contextmanager
    def planted(self) -> Generator[None]:
        """Give the production code this bug inside the `with` block."""
        before = []
        try:
            for owner, name, replacement in self.patches():
                before.append((owner, name, owner.__dict__[name]))
                setattr(owner, name, replacement)
            yield
        finally:
            for owner, name, original in reversed(before):
                setattr(owner, name, original)


BUGS: dict[str, Bug] = {
    name: Bug((function.__doc__ or "").strip(), function)
    for module in (bugs_at_node, bugs_at_shard, bugs_at_coordinator)
    for name, function in vars(module).items()
    if isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}
"""Bugs by name: public functions of the modules, in their order."""


def planted(name: str) -> Bug:
    """The bug called `name`. Raises ValueError where there is none, with the names that there are."""
    if name not in BUGS:
        raise ValueError(f"no bug {name!r}; there are {', '.join(sorted(BUGS))}")
    return BUGS[name]
