"""Bugs to plant in the production machines, so that the checkers can prove that they see.

Each is the kind of mistake that is easily made in such code: a line forgotten, a test the wrong way round. It replaces
one or two methods while it is planted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polytempo.chaos import bugs_at_coordinator, bugs_at_node, bugs_at_shard

Patch = tuple[Any, str, Any]
"""Who has it, under which name, and what takes its place."""


@dataclass(frozen=True)
class Bug:
    """What is wrong, and the patches that make it so."""

    description: str
    patches: Callable[[], Iterable[Patch]]

    @contextmanager
    def planted(self) -> Generator[None]:
        """While inside, production has this bug."""
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
    for module in (bugs_at_node, bugs_at_shard, bugs_at_coordinator)
    for function in module.BUGS
}
"""By name."""


def planted(name: str) -> Bug:
    """The bug called `name`."""
    if name not in BUGS:
        raise ValueError(f"no bug {name!r}; there are {', '.join(sorted(BUGS))}")
    return BUGS[name]
