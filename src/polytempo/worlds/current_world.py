"""The world that this process is in. Set once by `pt.init()`; a world of one until then."""

from __future__ import annotations

from polytempo.worlds.process.process_world import ProcessWorld

_current: list[ProcessWorld] = []


def current() -> ProcessWorld:
    """The world that `pt.init()` joined, or a world of one."""
    if not _current:
        _current.append(ProcessWorld(rank=0, hosts=(0,)))
    return _current[0]


def set_current(world: ProcessWorld | None) -> None:
    """Make `world` the one that `current` returns (None: forget it)."""
    _current[:] = [] if world is None else [world]
