"""All ranks of the default process group as one that shares memory, whatever transport torch uses between them."""

from __future__ import annotations

import itertools

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from polytempo.native.group import Group
from polytempo.native.meeting import Unreachable

_number = itertools.count()  # every rank makes them in the same order, so the same number means the same group


def shared_by_all(rank: int, size: int, timeout_s: float) -> Group | None:
    """A group of all ranks; None where they cannot map each other's memory. All ranks call it, and get the same."""
    store = PrefixStore(f"polytempo/host/{next(_number)}", _get_default_store())
    try:
        return Group(store, rank, size, timeout_s=timeout_s)
    except Unreachable:
        return None
