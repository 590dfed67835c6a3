"""Bugs to plant in the production machines, so that the checkers can prove that they see.

Each is the kind of mistake that is easily made in such code: a line forgotten, a test the wrong way round. It replaces
one or two methods while it is planted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polytempo.chaos.planted import bugs_at_coordinator, bugs_at_host, bugs_at_node, bugs_at_shard

Patch = tuple[Any, str, Any]
"""The owner of a method, the method's name, and its replacement."""


@dataclass(frozen=True)
class Bug:
    """A mistake and the patches that make it."""

    description: str
    patches: Callable[[], Iterable[Patch]]

    @contextmanager
    def planted(self) -> Generator[None]:
        """Inside the `with` block the production code has this bug."""
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
    function.__name__: Bug((function.__doc__ or "").strip(), function)
    for module in (bugs_at_node, bugs_at_shard, bugs_at_host, bugs_at_coordinator)
    for function in module.BUGS
}
"""By name."""


def planted(name: str) -> Bug:
    """The bug called `name`. Raises ValueError where there is none, with the names that there are."""
    if name not in BUGS:
        raise ValueError(f"no bug {name!r}; there are {', '.join(sorted(BUGS))}")
    return BUGS[name]
