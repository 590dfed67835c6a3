"""`connected`: gloo's group, whose ranks connect to each other as it is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

Look = Callable[[], object] | None
_LOOK_S = 0.02


def connected(store: Store, rank: int, size: int, timeout: timedelta, look: Look = None) -> Any:
    """The group, once all ranks have come. What `look` raises meanwhile ends the wait.

    gloo waits for connections without looking at anything else. So with a `look` it does that in a thread, which is
    left alone where the wait ends early: it ends by itself after `timeout`.
    """
    if look is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    made: SimpleQueue[Any] = SimpleQueue()

    def make() -> None:
        try:
            made.put(dist.ProcessGroupGloo(store, rank, size, timeout))
        except Exception as error:
            made.put(error)

    threading.Thread(target=make, name="polytempo-connecting", daemon=True).start()
    while True:
        try:
            found = made.get(timeout=_LOOK_S)
        except Empty:
            look()
            continue
        if isinstance(found, Exception):
            raise found
        return found
