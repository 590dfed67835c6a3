"""`create`: the process group for the ranks' shared memory, with guards for torch.compile and monitored barriers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import FunctionType
from typing import Any, Literal

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._dynamo import eval_frame
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from polytempo.device import one_device_for_each, visible_devices
from polytempo.interop.backend.across_hosts import Hosts, HostsGroup, Look, connected
from polytempo.interop.backend.exchange_counts import ExchangeCounts
from polytempo.interop.backend.named import NamedGroup
from polytempo.interop.backend.process_group import SharedMemoryGroup
from polytempo.interop.backend.staged import Operands, StagedOperands, StagedReceive, StagedSend
from polytempo.interop.backend.work import Finished, PendingMessage, Queued
from polytempo.native.group import Group
from polytempo.native.library import why_not
from polytempo.native.meeting import Unreachable, host_identity


@dataclass(frozen=True)
class Options:
    """`dist.init_process_group("polytempo", pg_options=Options(order="tree"))`.

    `order`: how sums are added within a host, see `native.group.Group`.
    """

    order: Literal["linear", "tree"] = "linear"
    while_connecting: Callable[[], object] | None = None
    """A function that is called again and again while hosts connect to each other; an error that it raises ends the
    wait. None: it lasts until all have come, or the group's timeout."""


def allow_monitored_barrier() -> None:
    """Have `dist.monitored_barrier` ask groups of this backend, and torch's own function for all others."""
    torchs = dist.monitored_barrier
    if torchs.__module__ == __name__:
        return

    @wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        world: Any = dist.group.WORLD if group is None else group
        if not isinstance(world, dist.ProcessGroup) or dist.get_backend(world) != "polytempo":
            torchs(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        default = world.timeout if isinstance(world, NamedGroup) else default_pg_timeout
        ours: Any = world  # its method has no type in torch
        ours.monitored_barrier(limit or default, wait_all_ranks)

    monitored_barrier.__module__ = __name__
    dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier


def leave_alone(*classes: type) -> None:
    """Have torch.compile run the methods of `classes`, and all that they call, as they are.

    A compiled model's operations are in its graph. But DDP's reducer, which is not compiled, calls a process group from
    C++ in the middle of a compiled frame, where torch would look at every Python frame. This is the effect of
    `torch.compiler.disable`, without loading the compiler (a second) in programs that never compile.
    """
    for each in classes:
        for member in vars(each).values():
            function = getattr(member, "func", getattr(member, "fget", member))  # as a (cached) property has it
            if isinstance(function, FunctionType):
                _skip(function.__code__)


def _skip(code: Any) -> None:
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    else:  # older versions of torch can only skip them, not their callees
        eval_frame.skip_code(code)  # type: ignore[attr-defined]


allow_monitored_barrier()
leave_alone(NamedGroup, SharedMemoryGroup, HostsGroup, Finished, Queued, PendingMessage, ExchangeCounts)
leave_alone(Operands, StagedOperands, StagedSend, StagedReceive)


def create(options: Any, given: Options | None = None) -> Any:
    """The group of `options.group_size` ranks: shared memory within a host, gloo between hosts.

    `options` are torch's, `given` the user's.

    Where some rank has no native core, or cannot map the others' memory, it is gloo's group; the lowest rank says so.
    """
    store: Store = options.store
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    look = None if given is None else given.while_connecting
    names = list(options.global_ranks_in_group) or list(range(size))
    hosts, own_devices, refusal = _hosts(store, rank, size, names)
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
        return SharedMemoryGroup(store, local, timeout, own_devices)
    try:
        return HostsGroup(store, Hosts(store, rank, size, local, hosts, timeout, look), timeout, own_devices)
    except BaseException:
        local.leave()
        raise


def _hosts(store: Store, rank: int, size: int, names: list[int]) -> tuple[list[str], bool, str]:
    """Each rank's host, whether each has a device of its own, and the reason why a rank cannot share memory: none, if
    all have the native core."""
    store.set(f"native/{rank}", json.dumps([host_identity(), visible_devices(), why_not() or ""]))
    found = [json.loads(store.get(f"native/{r}")) for r in range(size)]
    lacking = [f"rank {names[r]} has no native core: {reason}" for r, (_, _, reason) in enumerate(found) if reason]
    hosts = [str(host) for host, _, _ in found]
    return hosts, one_device_for_each(hosts, [shown for _, shown, _ in found]), lacking[0] if lacking else ""


def _gloo_instead(store: Store, rank: int, size: int, timeout: timedelta, reason: str, look: Look) -> Any:
    if rank == 0:
        warnings.warn(f"polytempo goes through gloo: {reason}", RuntimeWarning, stacklevel=2)
    return connected(PrefixStore("gloo", store), rank, size, timeout, look)
