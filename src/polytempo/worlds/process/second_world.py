"""A second world over the same ranks, for messages that are no part of the run."""

from __future__ import annotations

from polytempo.worlds.process.process_world import ProcessWorld


def beside(world: ProcessWorld) -> ProcessWorld:
    """The ranks of `world` with another trace and time of waiting, so that the run's are the same with and without.

    All ranks must still begin their collectives in the same order, those of both worlds together.
    """
    other = ProcessWorld(world.rank, world.port.hosts, group=world.transport.group, max_events=0)
    other.transport.share_groups(world.transport)  # of a mesh's axes: made once
    return other
