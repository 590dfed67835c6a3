"""`create`: who shares memory with whom, and the process group that follows from it."""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from polytempo.native import arena, group
from polytempo.native.group import Group, Unreachable, host_identity
from polytempo.native.library import available, why_not
from polytempo.torch.backend import across_hosts, messages, named, operands, process_group, sparse, work
from polytempo.torch.backend.across_hosts import HostsGroup
from polytempo.torch.backend.compiled import leave_alone
from polytempo.torch.backend.process_group import SharedMemoryGroup

leave_alone(arena, group, across_hosts, messages, named, operands, process_group, sparse, work)


def create(options: Any) -> Any:
    """The group of `options.group_size` ranks: shared memory within a host, gloo between hosts.

    Where some rank has no native core, or cannot map the others' memory, it is gloo's group; the lowest rank says so.
    """
    store: Store = options.store
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    names = list(options.global_ranks_in_group) or list(range(size))
    hosts = _hosts(store, rank, size)
    if hosts is None:
        return _gloo_instead(store, rank, size, timeout, f"not every rank has the native core: {why_not()}")
    mine = [r for r in range(size) if hosts[r] == hosts[rank]]
    local_store = PrefixStore(f"host/{mine[0]}", store)
    try:
        local = Group(
            local_store, mine.index(rank), len(mine), timeout_s=timeout.total_seconds(), names=[names[r] for r in mine]
        )
        reason = ""
    except (Unreachable, OSError, MemoryError) as error:
        local, reason = None, str(error)
    store.set(f"joined/{rank}", reason)
    reasons = [store.get(f"joined/{r}").decode() for r in range(size)]
    if local is None or any(reasons):
        return _gloo_instead(store, rank, size, timeout, next(r for r in reasons if r))
    if len(mine) == size:
        return SharedMemoryGroup(store, local, timeout)
    return HostsGroup(store, rank, size, local, hosts, timeout)


def _hosts(store: Store, rank: int, size: int) -> list[str] | None:
    """Each rank's host; None unless all ranks have the native core."""
    store.set(f"native/{rank}", json.dumps([available(), host_identity()]))
    found = [json.loads(store.get(f"native/{r}")) for r in range(size)]
    return [str(host) for _, host in found] if all(has for has, _ in found) else None


def _gloo_instead(store: Store, rank: int, size: int, timeout: timedelta, reason: str) -> Any:
    if rank == 0:
        warnings.warn(f"polytempo goes through gloo, {reason}", RuntimeWarning, stacklevel=2)
    return dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
