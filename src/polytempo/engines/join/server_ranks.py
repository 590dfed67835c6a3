"""Ranks that serve: some of a launcher's processes hold a parameter server's shards, and the others train.

ranks 0, 1, 2   ── meet at the store ──▶ train, in a world of 3; rank 0 puts a ticket into the store
rank 3          ── meets at the store ─▶ holds an agent by that ticket until the run is over, waits for the next one

A ticket is a secret. On one host it is in a private folder, and the store names the file. Between hosts it travels
through the store, which is unencrypted, unless `POLYTEMPO_KEYS` names a file with the keys on all ranks.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError, DistStoreError

from polytempo.core import Mismatch, PolytempoError
from polytempo.engines.remote.held_agent import HeldAgent
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.wire.keys import read_keys
from polytempo.worlds.process.process_world import ServerRanks

KEYS = "POLYTEMPO_KEYS"
"""Names a file with the keys of a run over several hosts: `wire.keys.write_keys` makes it, each host has a copy."""
_WAIT_S = 3600.0
"""One wait for the next ticket lasts so long at most; then comes another."""
_LEAVE_S = 10.0
"""Rank 0, if no run was begun, waits so long at its end until all servers have read that none will be."""
_NO_MORE, _SPENT = "-", "spent"


def check_servers(servers: int, size: int) -> None:
    """Raise ValueError where `servers` of `size` processes leave no worker."""
    if servers < 0:
        raise ValueError(f"servers={servers}: give a number of processes from 0 on")
    if servers >= size:
        raise ValueError(
            f"servers={servers}, and the launcher has started {size} process{'es' * (size > 1)}, and at least "
            f"one must train; start {servers + 1} or more, or leave out servers"
        )


def chosen(hosts: Sequence[str], servers: int) -> tuple[int, ...]:
    """The ranks that serve, of processes on `hosts`: the last of each host, from the last host to the first, and so on.

    So servers are on as many hosts as possible, and rank 0, beside which the coordinator runs, trains.

        hosts  a a a b b b      servers=1: rank 5      servers=2: ranks 2 and 5      servers=3: ranks 2, 4 and 5
    """
    left = {host: [rank for rank, where in enumerate(hosts) if where == host and rank] for host in hosts}
    turns = list(reversed(left))
    found: list[int] = []
    while len(found) < servers:
        for host in turns:
            if left[host] and len(found) < servers:
                found.append(left[host].pop())
    return tuple(sorted(found))


def meet(store: Store, rank: int, size: int, servers: int, host: str, *, life: int = 1) -> ServerRanks:
    """Agree with all `size` processes on the ones that serve. Raises `Mismatch` where they were given other numbers.

    The agreement stays if one of them is started again, in its `life` 2.
    """
    mine = {"host": host, "servers": servers}
    if life == 1:
        store.set(f"rank/{rank}", json.dumps(mine))
    everyone = [json.loads(store.get(f"rank/{each}")) for each in range(size)]
    for other, theirs in enumerate(everyone):
        if theirs["servers"] != everyone[0]["servers"]:
            raise Mismatch(
                f"ranks disagree about pt.init(servers=…): rank 0 has {everyone[0]['servers']}, rank {other} has "
                f"{theirs['servers']}"
            )
    hosts = [each["host"] for each in everyone]
    return ServerRanks(chosen(hosts, servers), PrefixStore("servers", store), len(set(hosts)) > 1)


# ---------------------------------------------------------------------- on rank 0


def hand_over(servers: ServerRanks, ticket: str) -> None:
    """Let the servers take part in the next run. `ticket`: see `secret_in`."""
    _put(servers.store, ticket)


def spend(servers: ServerRanks) -> None:
    """All servers have read the last ticket: where it is a secret, the store keeps it no longer."""
    key = f"ticket/{servers.store.add('tickets', 0) - 1}"
    if servers.store.get(key).startswith(b"{"):
        servers.store.set(key, _SPENT)


def dismiss(servers: ServerRanks) -> None:
    """There is no run to come: the servers end."""
    with suppress(DistNetworkError, DistStoreError):  # the store has ended before, and they with it
        if _put(servers.store, _NO_MORE) == 0:
            servers.store.wait([f"left/{rank}" for rank in servers.ranks], timedelta(seconds=_LEAVE_S))


def _put(store: Store, text: str) -> int:
    number = store.add("tickets", 1) - 1
    store.set(f"ticket/{number}", text)
    return number


# ---------------------------------------------------------------------- on the servers


def serve(servers: ServerRanks, rank: int) -> NoReturn:
    """Hold shards in each run that begins, and end this process (SystemExit) when there is no more to come.

    Errors: PolytempoError where rank 0 is gone, or this server's agent has failed.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # a wait at a store hears no other; the agent ends with this process
    number = max(0, servers.store.add("tickets", 0) - 1)  # started again, it joins the run that goes on
    while (text := _next(servers.store, number)) != _NO_MORE:
        number += 1
        agent = HeldAgent(secret_in(text).to_json())
        try:
            agent.wait()
        except BaseException:
            agent.end()
            raise
        if not agent.ended_well:
            raise PolytempoError(f"server (rank {rank}): its agent {agent.how()}")
        agent.how()
    with suppress(DistNetworkError, DistStoreError):
        servers.store.set(f"left/{rank}", "")
    sys.exit(0)


def _next(store: Store, number: int) -> str:
    while True:
        try:
            store.wait([f"ticket/{number}"], timedelta(seconds=_WAIT_S))
            return store.get(f"ticket/{number}").decode()
        except DistStoreError:
            continue  # the workers do something else, for as long as they like
        except DistNetworkError as error:
            if number:
                return _NO_MORE  # the store may end with rank 0, before this server has read that there is no more
            raise PolytempoError("rank 0 has ended, and this server with it; look at rank 0's output") from error


def secret_in(text: str) -> AgentTicket:
    """The ticket that `text` is, or names the file of, or makes, an address, with the keys in `POLYTEMPO_KEYS`."""
    if text == _SPENT:
        raise PolytempoError(
            "this server has been started again, and the ticket of a run over several hosts travels once; set "
            f"{KEYS} to a file of keys on all ranks, so that a server can come back"
        )
    if text.startswith("{"):
        return AgentTicket.from_json(text)
    if text.startswith("tcp://"):
        path = os.environ.get(KEYS)
        if path is None:
            raise ValueError(f"{KEYS} is set on the workers and not on this server; set it on all, or on none")
        return AgentTicket(text, read_keys(Path(path)))
    status = os.stat(Path(text).parent, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PolytempoError(
            f"{Path(text).parent} is not a private folder of this user, so its ticket is not the run's"
        )
    return AgentTicket.read(Path(text))
