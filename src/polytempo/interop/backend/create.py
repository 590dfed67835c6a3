"""`create`: who shares memory with whom, and the process group that follows from it."""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from polytempo.interop.backend.across_hosts import Hosts, HostsGroup
from polytempo.interop.backend.compiled import leave_alone
from polytempo.interop.backend.connected import Look, connected
from polytempo.interop.backend.messages import PendingMessage
from polytempo.interop.backend.monitored_barrier import allow_monitored_barrier
from polytempo.interop.backend.named import NamedGroup
from polytempo.interop.backend.options import Options
from polytempo.interop.backend.process_group import SharedMemoryGroup
from polytempo.interop.backend.work import Finished, Queued
from polytempo.native.group import Group
from polytempo.native.library import why_not
from polytempo.native.meeting import Unreachable, host_identity

allow_monitored_barrier()
leave_alone(NamedGroup, SharedMemoryGroup, HostsGroup, Finished, Queued, PendingMessage)


def create(options: Any, given: Options | None = None) -> Any:
    """The group of `options.group_size` ranks: shared memory within a host, gloo between hosts.

    `options` is what torch says, `given` what the user says.

    Where some rank has no native core, or cannot map the others' memory, it is gloo's group; the lowest rank says so.
    """
    store: Store = options.store
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    look = None if given is None else given.while_connecting
    names = list(options.global_ranks_in_group) or list(range(size))
    hosts, refusal = _hosts(store, rank, size, names)
    if refusal:
        return _gloo_instead(store, rank, size, timeout, refusal, look)
    mine = [r for r in range(size) if hosts[r] == hosts[rank]]
    local_store = PrefixStore(f"host/{mine[0]}", store)
    try:
        local = Group(
            local_store,
            mine.index(rank),
            len(mine),
            timeout_s=timeout.total_seconds(),
            names=[names[r] for r in mine],
            order=(given or Options()).order,
        )
        reason = ""
    except (Unreachable, OSError, MemoryError) as error:
        local, reason = None, str(error)
    store.set(f"joined/{rank}", reason)
    reasons = [store.get(f"joined/{r}").decode() for r in range(size)]
    if local is None or any(reasons):
        return _gloo_instead(store, rank, size, timeout, next(r for r in reasons if r), look)
    if len(mine) == size:
        return SharedMemoryGroup(store, local, timeout)
    try:
        return HostsGroup(store, Hosts(store, rank, size, local, hosts, timeout, look), timeout)
    except BaseException:
        local.leave()
        raise


def _hosts(store: Store, rank: int, size: int, names: list[int]) -> tuple[list[str], str]:
    """Each rank's host, and what keeps a rank from sharing memory: nothing, where all have the native core."""
    store.set(f"native/{rank}", json.dumps([host_identity(), why_not() or ""]))
    found = [json.loads(store.get(f"native/{r}")) for r in range(size)]
    lacking = [f"rank {names[r]} has no native core: {reason}" for r, (_, reason) in enumerate(found) if reason]
    return [str(host) for host, _ in found], lacking[0] if lacking else ""


def _gloo_instead(store: Store, rank: int, size: int, timeout: timedelta, reason: str, look: Look) -> Any:
    if rank == 0:
        warnings.warn(f"polytempo goes through gloo: {reason}", RuntimeWarning, stacklevel=2)
    return connected(PrefixStore("gloo", store), rank, size, timeout, look)
