"""`init`: join the world that this process was started in."""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from polytempo.core import TimedOut, world_port
from polytempo.engines.environment import Place, recognise
from polytempo.worlds import ProcessWorld, current, set_current


def init(*, timeout_s: float = 300.0, backend: str | None = None, quiet: bool = False) -> ProcessWorld:
    """Join the world that torchrun, Slurm, Open MPI, Ray or Polytempo's own engine has set up around this process.

    Says on rank 0's standard error which it recognised. Without any of them it is a world of one. A process
    group that exists already is used as it is. Calling it again returns the same world.

    `timeout_s` is the deadline of every wait for another rank. `backend` is torch.distributed's: by
    default gloo for tensors on CPU and NCCL for tensors on CUDA, where there is one.
    """
    world = current()
    if world.size > 1:
        return world
    place = recognise(os.environ)
    if not dist.is_initialized():
        if place.size == 1:
            _say(place, 1, quiet)
            return world
        _join(place, timeout_s, backend)
    world = ProcessWorld(dist.get_rank(), _hosts())
    set_current(world)
    if world.rank == 0:
        _say(place, len(set(world.port.hosts)), quiet)
    return world


def _join(place: Place, timeout_s: float, backend: str | None) -> None:
    if place.local_size == place.size:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # one host: nothing listens beyond it
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"),
            store=PrefixStore(f"polytempo/{place.generation}", _store(place, timeout, os.environ)),
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
        )
    except RuntimeError as error:
        if re.search(r"timed? ?out|timeout", str(error), re.I):
            raise TimedOut(place.rank, 0, f"meeting all {place.size} ranks ({place})", timeout_s) from error
        raise
    atexit.register(_leave)


def _store(place: Place, timeout: timedelta, environ: Mapping[str, str]) -> Store:
    """Where ranks find each other: a file on one host, otherwise a TCP store that rank 0 or torchrun's agent holds."""
    if place.rendezvous is not None:
        store: Store = FileStore(str(place.rendezvous / "store"), place.size)
        store.set_timeout(timeout)
        return store
    assert place.master_address is not None
    assert place.master_port is not None
    agent_holds_it = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = (place.master_address, place.master_port)
    if place.rank or agent_holds_it:
        return TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)
    listener = _bound(*address)
    return TCPStore(*address, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener)


def _bound(address: str, port: int) -> int:
    """A socket that listens on this one address; left to itself, a TCP store would listen on all interfaces."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=1024).detach()
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen on {address}:{port} ({error.strerror}); MASTER_ADDR must be an address of "
            "rank 0's host, and MASTER_PORT free there"
        ) from error


def _hosts() -> list[int]:
    """Each rank's host as a small number: ranks with one host name are on one host."""
    name = torch.zeros(256, dtype=torch.uint8)
    encoded = socket.gethostname().encode()[:256]
    name[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    alone = ProcessWorld(dist.get_rank(), [0] * dist.get_world_size())

    async def everyone() -> list[torch.Tensor]:
        return await world_port(alone.rank, [0] * alone.size).all_gather(name)

    names = [bytes(n.tolist()) for n in alone.drive(everyone())]
    order = list(dict.fromkeys(names))
    return [order.index(n) for n in names]


def _say(place: Place, num_hosts: int, quiet: bool) -> None:
    if not quiet:
        where = f"{place.size} ranks on {num_hosts} host{'s' * (num_hosts > 1)}" if place.size > 1 else "a world of one"
        by = "" if place.launcher == "none" else f"{place.launcher}, "
        print(f"polytempo: {by}{where}", file=sys.stderr)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
