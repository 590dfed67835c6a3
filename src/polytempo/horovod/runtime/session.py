"""`Session`: one process's Horovod, from `init` to `shutdown`."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from polytempo.engines.join.environment import recognise
from polytempo.engines.join.init import init
from polytempo.horovod.negotiation.autotuner import Autotuner
from polytempo.horovod.negotiation.coordinator import NegotiationCoordinator
from polytempo.horovod.negotiation.member import NegotiationMember
from polytempo.horovod.runtime.groups import SetTransport
from polytempo.horovod.runtime.link import RankLink
from polytempo.horovod.runtime.performer import Performer
from polytempo.horovod.runtime.runtime import Runtime, Tuning
from polytempo.horovod.runtime.settings import HorovodSettings, begin_log
from polytempo.horovod.runtime.timeline import TimelineFile
from polytempo.interop.backend.process_group import has_spare_core
from polytempo.worlds import ProcessWorld

_MARGIN_S = 30.0
"""A rank waits so much longer for rank 0 than the negotiation's own deadline."""


class Session:
    """This process negotiates with all ranks of `world`, which is a new process group's or its launcher's (`init`).

    `process_sets`: their ranks by number, from 1. `number`: one for each session over the same store. All ranks begin
    it together and give the same; `look` is called while they wait for each other, and may raise.
    """

    def __init__(
        self,
        process_sets: Mapping[int, Sequence[int]],
        settings: HorovodSettings,
        number: int,
        world: ProcessWorld | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        self.world = init(quiet=True, timeout_s=settings.end_s) if world is None else world
        rank, size = self.world.rank, self.world.size
        store = _store(number)
        self.unnamed: Counter[tuple[int, str]] = Counter()
        """The number of submitted operations without a name, by process set and kind."""
        self.hosts = self.world.port.hosts
        hosts = len(set(self.hosts))
        self.overlaps = hosts > 1 or has_spare_core(size)
        """True if operations can go on while the program computes: on other hosts, or on a spare core."""
        self.member = NegotiationMember(rank, size, process_sets)

        def make(number: int, ranks: Sequence[int]) -> SetTransport:
            return SetTransport(store, f"set/{number}", rank, ranks, settings.end_s, look)

        self._end_log = begin_log(settings, rank)
        with ExitStack() as begun:  # is left where another rank is lost meanwhile: the others may wait for this one
            begun.callback(self._end_log)
            address = _own_address() if rank == 0 and hosts > 1 else ""
            link = RankLink(rank, size, store, address=address, timeout_s=settings.end_s, look=look)
            begun.callback(link.close)
            self.performer = Performer(rank, self.member.sets, make)
            begun.callback(self.performer.close)
            timeline = None
            if rank == 0 and settings.timeline:
                timeline = TimelineFile(settings.timeline, mark_cycles=settings.mark_cycles)
            self.runtime = Runtime(
                self.member,
                _coordinator(size, process_sets, settings) if rank == 0 else None,
                link,
                self.performer.perform,
                cycle_s=settings.cycle_s,
                limit_s=settings.end_s + _MARGIN_S,
                tuning=_tuning(settings, hosts) if rank == 0 else None,
            )
            begun.pop_all()
        self.performer.phase = self.runtime.phase
        self.runtime.watch(timeline)

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Rank 0 writes one; the others do nothing."""
        if self.world.rank == 0:
            self.runtime.watch(TimelineFile(path, mark_cycles=mark_cycles))

    def stop_timeline(self) -> None:
        """Write all that is there, and end it."""
        self.runtime.watch(None)

    def close(self) -> None:
        """Shut down. Operations of other ranks that wait for this one are errors."""
        self.runtime.close()
        self.performer.close()
        self._end_log()


def _coordinator(
    size: int, process_sets: Mapping[int, Sequence[int]], settings: HorovodSettings
) -> NegotiationCoordinator:
    return NegotiationCoordinator(
        size,
        process_sets,
        fusion_bytes=settings.fusion_bytes,
        fuse_groups=settings.fuse_groups,
        cache_capacity=settings.cache_capacity,
        stalls=settings.stalls,
    )


def _tuning(settings: HorovodSettings, hosts: int) -> Tuning | None:
    if settings.autotune is None:
        return None
    facts = (hosts > 1, False, settings.cache_capacity > 0)
    return Tuning(Autotuner(settings.tuned, settings.autotune), settings.autotune_log, facts)


def _store(number: int) -> Store:
    if not dist.is_initialized():
        return HashStore()
    return PrefixStore(f"polytempo/horovod/{number}", distributed_c10d._get_default_store())


def _own_address() -> str:
    """The address of this rank for other hosts: the source of its connection to the launcher's meeting point."""
    place = recognise(os.environ)
    address = place.master_address or os.environ.get("MASTER_ADDR")
    if not address:
        raise ValueError("ranks are on several hosts, and no launcher says where they meet: set MASTER_ADDR")
    found = socket.getaddrinfo(address, place.master_port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:  # sends nothing: it asks for the route alone
        probe.connect(found[4])
        return str(probe.getsockname()[0])
