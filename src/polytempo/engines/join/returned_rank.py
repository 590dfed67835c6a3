"""A rank that its launcher has started again, alone, into a loop with other ranks that train on at a parameter server.

rank 0    the server is there ── `publish` ──▶ the launcher's store
rank 1    dies; its tickets are dealt to others
          is started again, counts itself in the store: life 2 ── `running` ──▶ it joins the server, as a late worker

It is in no process group: those cannot be joined again. So only requests to the server work there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import Store

from polytempo.core import PolytempoError

_KEY = "loop"


def count_life(store: Store, rank: int) -> int:
    """The number of processes of `rank` that have come to this store, this one included."""
    return int(store.add(f"lives/{rank}", 1))


def publish(store: Store, facts: Mapping[str, Any]) -> None:
    """Let a rank that comes back find the loop, which `facts` describe. JSON, and no secrets where others can read."""
    store.set(_KEY, json.dumps(facts))


def running(store: Store, rank: int) -> dict[str, Any]:
    """The facts of the loop that goes on. PolytempoError where there is none, or this is rank 0, which has held it."""
    text = store.get(_KEY).decode() if store.check([_KEY]) else ""
    if not text or rank == 0:
        raise PolytempoError(
            f"rank {rank} has been started again alone, and only a rank other than 0 whose world trains with a "
            "parameter server already can come back; start all ranks again"
        )
    found = json.loads(text)
    assert isinstance(found, dict)
    return found
