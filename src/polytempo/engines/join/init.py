"""`init`: join the world that this process was started in."""

from __future__ import annotations

import atexit
import hashlib
import ipaddress
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # holds the group as default arguments if it is loaded after joining: see _leave
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from polytempo.core import Mesh, PeerLost, TimedOut, world_port
from polytempo.core.port import barrier
from polytempo.core.system.folder_lock import machine_identity
from polytempo.device import (
    HOST,
    accelerator_kind,
    backend_of,
    device_number,
    one_device_for_each,
    use_device,
    visible_devices,
    with_backend,
)
from polytempo.engines.deaths.watch import DeathWatch
from polytempo.engines.join.elastic_round import name_of_round
from polytempo.engines.join.environment import RankPlace, recognise
from polytempo.engines.join.keyed_store import KeyedStore, StoreHolder
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.join.returned_rank import count_life, running
from polytempo.engines.join.server_ranks import KEYS, check_servers, dismiss, meet, serve
from polytempo.engines.processes.fork import reserve_standard_files
from polytempo.interop.autoload import register
from polytempo.native.library import available
from polytempo.wire.keys import Keys, read_keys
from polytempo.worlds import ProcessWorld, current, set_current
from polytempo.worlds.process.transport import Substitute, group_timeout_s

_LAST_MOMENT_S = 0.05
"""A pause between the last operation on a foreign group and Python's end (see `_leave`): the group's threads release
the last tensors within microseconds of answering, and until then Python has to be there."""


def init(
    *,
    mesh: Mapping[str, int] | None = None,
    servers: int = 0,
    timeout_s: float = 300.0,
    backend: str | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> ProcessWorld:
    """Join the world that torchrun, Slurm, MPI, Ray or Polytempo's own engine has set up around this process.

    torchrun may be elastic (`--nnodes=1:4`): its ranks meet again after each restart. MPI is the `mpirun` of Open MPI,
    MPICH or Intel MPI. Rank 0's standard error names the launcher. Without one it is a world of one.
    A process group that exists already is used as it is. Calling it again returns the same world.

    `mesh` lays the ranks out on named axes, the last one varying fastest: `mesh={"data": 2, "stage": 2}` makes rank 2
    data 1, stage 0. Ranks along "data" hold the same parameters and see other samples; without a mesh these are all.
    Ranks along other axes hold parts of one model, and see the same samples. `attach`, `shard` and `Trainer` follow
    it, and refuse a mesh without "data" unless its axes are "model" or "stage"; the parts talk to each other over
    `world.port.along("stage")`. Raises ValueError where the lengths do not
    multiply to the number of ranks, and where the world has another mesh already.

    With `servers` so many of the launcher's processes do not train: there this call serves shards of the parameter
    server that workers attach, and then ends the process (SystemExit). These are the last process of each host, from
    the last host to the first; the world, `torch.distributed`'s ranks and `pt.shard` count the others alone. All
    processes give the same number (`Mismatch`). ValueError where no process would train.

    `timeout_s` is the deadline of every wait for another rank. `backend` is torch.distributed's: by default
    "polytempo" (shared memory) for tensors on CPU where all ranks are on one host and it has the native core, else
    gloo, and NCCL for tensors on CUDA, where there is one.

    `device` becomes the current one before anything is allocated: with a number, as in `cuda:1`, this one, and without,
    as `auto`, the one of the rank's number on its host; "cpu" leaves accelerators alone. ValueError for a device that
    is not here.
    """
    world = current()
    if world.size > 1 or world.servers is not None:
        return _laid_out(world, mesh)
    reserve_standard_files()
    place = recognise(os.environ)
    launcher = "" if place.launcher == "none" else place.launcher
    if dist.is_initialized():
        launcher = launcher or "an existing process group"
        if servers:
            raise ValueError(
                f"servers={servers} of the launcher's processes stay out of the process group, and there is one "
                "already; let pt.init() make it"
            )
        atexit.register(time.sleep, _LAST_MOMENT_S)
        substitute = _substitute()
        world = ProcessWorld(dist.get_rank(), hosts_of_ranks(substitute))
        world.transport.substitute = substitute
        if world.size > 1:
            store = PrefixStore("polytempo", distributed_c10d._get_default_store())
            world.deaths = DeathWatch(store, world.rank, world.size, host_digest())
            world.drive(barrier(world.port))
            world.deaths.begin()
    elif place.size == 1 and not servers:
        _say(launcher, world, quiet)
        return _laid_out(world, mesh)
    else:
        check_servers(servers, place.size)
        if device != HOST.type and accelerator_kind() is not None:
            use_device(device_number(device, place.local_rank))
        world = _join(place, timeout_s, backend, servers)
    set_current(world)
    if world.rank == 0:
        _say(launcher, world, quiet)
    return _laid_out(world, mesh)


def _laid_out(world: ProcessWorld, mesh: Mapping[str, int] | None) -> ProcessWorld:
    if mesh is None:
        return world
    asked = Mesh(tuple(mesh.items()))
    if asked.size != world.size:
        raise ValueError(
            f"a {asked} is for {asked.size} ranks, and this world has {world.size}; start {asked.size} ranks, or give "
            "axes with lengths that multiply to the number of ranks"
        )
    if world.port.mesh not in (None, asked):
        raise ValueError(f"this world is a {world.port.mesh} already, and cannot become a {asked}; call init once")
    world.port = world.port.meshed(**mesh)
    return world


def _join(place: RankPlace, timeout_s: float, backend: str | None, num_servers: int) -> ProcessWorld:
    """Join the process group, or in a rank that comes back the run. In a process that serves it does not return."""
    if place.local_size == place.size:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # one host: nothing listens beyond it
    timeout = timedelta(seconds=timeout_s)
    rank, size, servers, deaths = place.rank, place.size, None, None
    try:
        store = _store(place, timeout, os.environ)
        life = count_life(store, rank)
        if num_servers:
            servers = meet(store, rank, size, num_servers, host_digest(), life=life)
            rank, size = servers.worker(rank), size - num_servers
        if size > 1 and rank >= 0 and life == 1:
            group_store = PrefixStore("workers", store) if num_servers else store
            if place.launcher != "Polytempo":  # our own launcher sees its processes end
                deaths = DeathWatch(group_store, rank, size, host_digest(), holds=_holds(place, os.environ))
            dist.init_process_group(
                backend or backend_name(one_host=place.local_size == place.size),
                store=group_store,
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
    except RuntimeError as error:
        if re.search(r"timed? ?out|timeout", str(error), re.I):
            missing = "" if deaths is None else deaths.missing()
            raise TimedOut(place.rank, 0, f"meeting all {place.size} ranks ({place})", timeout_s, missing) from error
        raise
    if servers is not None and rank < 0:
        serve(servers, place.rank)
    if life > 1:
        hosts = running(store, rank)["hosts"]
    else:
        atexit.register(_leave)
        hosts = hosts_of_ranks() if dist.is_initialized() else [0]
    world = ProcessWorld(rank, hosts)
    world.store, world.life, world.servers = store, life, servers
    if servers is not None and rank == 0:
        atexit.register(dismiss, servers)
    if deaths is not None:
        deaths.begin()
        world.deaths = deaths
    return world


def backend_name(*, one_host: bool) -> str:
    """torch.distributed's backend: ours for ranks of one host, where there is the native core, else gloo; on
    devices theirs, as NCCL."""
    within = "polytempo" if one_host and available() else "gloo"
    register()  # torch has done it already where its entry points are read
    return with_backend(within)


def _store(place: RankPlace, timeout: timedelta, environ: Mapping[str, str]) -> Store:
    """The store of this generation's ranks, or of this round of an elastic torchrun."""
    store = _kept(place, timeout, environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or place.launcher != "torchrun":
        return PrefixStore(f"polytempo/{place.generation}", store)
    name = name_of_round(store, place.rank, place.size, timeout.total_seconds())
    store.set_timeout(timeout)
    return PrefixStore(f"polytempo/{name}", store)


def _kept(place: RankPlace, timeout: timedelta, environ: Mapping[str, str]) -> Store:
    """A file on one host, otherwise a store that the launcher, rank 0 or torchrun's agent holds.

    Our launcher's takes keys, and so does rank 0's where `POLYTEMPO_KEYS` names a file of them; others are torch's.
    """
    if place.rendezvous is not None:
        if not place.rendezvous.is_dir():  # a FileStore would wait for it for five minutes, for any `timeout`
            raise PeerLost(place.rank, None, "meeting", None, f"{place.rendezvous} is gone with the run")
        store: Store = FileStore(str(place.rendezvous / "store"), place.size)
        store.set_timeout(timeout)
        return store
    assert place.master_address is not None
    assert place.master_port is not None
    if place.launcher == "Polytempo":
        return _referenced(Rendezvous.joined(environ["POLYTEMPO_RENDEZVOUS"], timeout.total_seconds()).store)
    agent_holds_it = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = (place.master_address, place.master_port)
    spread = place.local_size is not None and place.local_size < place.size
    if KEYS in environ and not agent_holds_it:
        return _referenced(_keyed(address, read_keys(Path(environ[KEYS])), place.rank == 0, spread, timeout))
    if place.rank or agent_holds_it:
        return TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)
    listener = _bound(*address, spread=spread)
    return TCPStore(*address, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener)


def _holds(place: RankPlace, environ: Mapping[str, str]) -> bool:
    """True if the store ends with this process."""
    return place.rank == 0 and place.rendezvous is None and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _keyed(address: tuple[str, int], keys: Keys, holds: bool, spread: bool, timeout: timedelta) -> KeyedStore:
    host, port = address
    if holds:
        with socket.socket(fileno=_bound(host, port, spread=spread)) as listener:
            host = listener.getsockname()[0]
        atexit.register(StoreHolder(host, keys, port).close)
    where = f"[{host}]" if ":" in host else host
    return KeyedStore(f"tcp://{where}:{port}", keys, timeout.total_seconds())


def _referenced(store: KeyedStore) -> KeyedStore:
    """Torch holds no reference to a store that is written in Python: it lives as long as this process."""
    atexit.register(store.close)
    return store


def _bound(address: str, port: int, *, spread: bool) -> int:
    """A socket that listens on this one address; left to itself, a TCP store would listen on all interfaces.

    If a name has several addresses, it is the first that this host can listen on; in a world that is `spread` over
    several hosts, the first that other hosts can reach.
    """
    problem = OSError(0, "it has no address")
    try:
        found = [entry[4] for entry in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)]
        within = [where for where in found if not _is_loopback(str(where[0]))] if spread else found
        if not within:
            raise ValueError(
                f"MASTER_ADDR={address} is {found[0][0]} here, which other hosts cannot reach, and this world spans "
                "several hosts; set MASTER_ADDR to an address of rank 0's host in their network"
            )
        for where in within:
            try:
                family = socket.AF_INET6 if ":" in str(where[0]) else socket.AF_INET
                return socket.create_server(where, family=family, backlog=1024).detach()
            except OSError as error:
                problem = error
    except OSError as error:
        problem = error
    raise ValueError(
        f"rank 0 cannot listen on {address}:{port} ({problem.strerror}); MASTER_ADDR must be an address of "
        "rank 0's host, and MASTER_PORT free there"
    ) from problem


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _substitute() -> Substitute | None:
    """A group beside the process group that exists, which all ranks make where that one does not serve: it has no
    backend for the host's tensors, or there is an accelerator, and it has not the fitting one. None: it serves."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    store = PrefixStore("polytempo/places", distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), json.dumps([host_digest(), visible_devices()]))
    told = [json.loads(store.get(str(rank))) for rank in range(dist.get_world_size())]
    hosts, devices = [host for host, _ in told], [shown for _, shown in told]
    kind, within = accelerator_kind(), backends.get(HOST.type)
    own = kind is not None and backend_of(kind) in {backends.get(kind)} - {None} and one_device_for_each(hosts, devices)
    if within == "polytempo" or (within is not None and (own or not any(devices))):
        return None
    backend = backend_name(one_host=len(set(hosts)) == 1)
    return Substitute(dist.new_group(timeout=timedelta(seconds=group_timeout_s()), backend=backend), backend)


def hosts_of_ranks(substitute: Substitute | None = None) -> list[int]:
    """Each rank's host as a small number: ranks on one host share its name, its running kernel and its network."""
    name = torch.frombuffer(bytearray.fromhex(host_digest()), dtype=torch.uint8)
    alone = ProcessWorld(dist.get_rank(), [0] * dist.get_world_size())
    alone.transport.substitute = substitute

    async def everyone() -> list[torch.Tensor]:
        return await world_port(alone.rank, [0] * alone.size).all_gather(name)

    names = [bytes(n.tolist()) for n in alone.drive(everyone())]
    order = list(dict.fromkeys(names))
    return [order.index(n) for n in names]


def host_identity() -> str:
    """The identity of a host: two may have one name, and two containers on one kernel have a network between them,
    or processes that cannot see each other.
    """
    parts = [socket.gethostname(), machine_identity()]
    for space in ("net", "pid"):
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
    return "\n".join(parts)


def host_digest() -> str:
    """Equal for processes of one host, and for no others; it does not show the host's name."""
    return hashlib.sha256(host_identity().encode()).hexdigest()


def _say(launcher: str, world: ProcessWorld, quiet: bool) -> None:
    if not quiet:
        num_hosts = len(set(world.port.hosts))
        where = f"{world.size} ranks on {num_hosts} host{'s' * (num_hosts > 1)}" if world.size > 1 else "a world of one"
        where += f", and {len(world.servers.ranks)} of the launcher's processes serve" if world.servers else ""
        print(f"polytempo: {launcher}{', ' * bool(launcher)}{where}", file=sys.stderr)


def _leave() -> None:
    """Destroy the process group before the interpreter ends.

    gloo's threads take Python's lock to release tensors; a thread that asks for it after Python has ended aborts the
    process ("terminate called without an active exception"). The threads end with the last reference to their group, so
    none may be left: neither in our world nor in torch's default arguments.
    """
    if dist.is_initialized():
        current().forget_groups()
        dist.destroy_process_group()
