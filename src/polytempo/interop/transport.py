"""A second transport between the ranks of a process group, unknown to torch.

torch names a new process group by how many there are. If an object's collection ended it, ranks would give different
names to groups that the program makes afterwards.
"""

from __future__ import annotations

import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions
from torch.distributed import distributed_c10d

from polytempo.interop.backend.create import create
from polytempo.native.meeting import host_identity
from polytempo.worlds import ProcessWorld
from polytempo.worlds.process.transport import group_timeout_s


def transport_like(group: Any) -> Any:
    """One for CPU tensors, with the same ranks and deadline: shared memory where `group` has it, gloo otherwise.

    All ranks of `group` call it, in the same order where they do so several times.
    """
    rank, size, timeout = dist.get_rank(group), dist.get_world_size(group), timedelta(seconds=group_timeout_s(group))
    store = distributed_c10d._get_process_group_store(group)
    number = store.add(f"polytempo/transports/{rank}", 1)
    place = PrefixStore(f"polytempo/transport/{number}", store)
    if "cpu:polytempo" not in dist.get_backend_config(group).split(","):
        own: Any = dist.ProcessGroupGloo(place, rank, size, timeout)
    else:
        options = _DistributedBackendOptions()
        options.store, options.group_rank, options.group_size, options.timeout = place, rank, size, timeout
        options.global_ranks_in_group = dist.get_process_group_ranks(group)
        own = create(options)
    own.barrier().wait()  # gloo may be in either: a rank that left while another still connects would be an error there
    return own


def leave(own: list[Any], world: ProcessWorld) -> None:
    """End `world` and its transport, the only thing in `own`. Ranks that still wait for this one raise `PeerLost`.

    gloo closes its connections when no reference to it is left; so a rank that leaves holds it in a list, and calls
    `let_go` before where something has failed.
    """
    world.forget_groups()
    while own:
        own.pop().abort()


def let_go(error: BaseException) -> None:
    """Clear the frames of `error` and of its causes; frames that still run stay as they are.

    A traceback keeps its frames' variables. Among them is the work that failed, and gloo's work holds its connections:
    as long as the error is referenced, ranks that wait for this one would wait on.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def hosts_of(group: Any) -> list[int]:
    """The host of every rank: the first rank on it. All ranks of `group` call it."""
    store = PrefixStore("polytempo/hosts", distributed_c10d._get_process_group_store(group))
    store.set(str(dist.get_rank(group)), host_identity())
    identities = [store.get(str(rank)) for rank in range(dist.get_world_size(group))]
    return [identities.index(identity) for identity in identities]
