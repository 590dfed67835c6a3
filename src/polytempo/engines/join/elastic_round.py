"""The round of an elastic launcher that this process belongs to: a name that its ranks share, and no other round has.

torchrun's agents keep one store over all restarts, so it still holds the entries of earlier rounds' ranks (addresses
without a listening process). Nothing in the environment tells rounds apart: each agent counts its own restarts, and an
agent that comes later counts fewer. So the ranks agree on a name in the store itself.

    rank r                     the store                     rank 0
      ├─ knock (r, size, nonce) ──▶ queue ─────────────────▶  │ draws a name
      │◀──────────────────────── answer to nonce ◀── name ────┤
      ├─ here (r, name) ──────────▶ queue ─────────────────▶  │ counts its own name only
      │◀──────────────────────── all here ◀────── name ───────┤ when all ranks are here

A message of an earlier round does no harm: rank 0 answers a nonce that no process awaits, and no "here" follows.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

_AGAIN_S = 10.0
"""A rank that has no answer by then knocks again: a rank 0 of a round that has just ended may have read its message."""
_QUEUE = "polytempo/round"


def name_of_round(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """The new common name of the `size` ranks that meet in `store`.

    Costs each rank two messages and two answers; rank 0 reads 2 (size − 1) messages. Errors: `DistStoreError` where not
    all ranks are here within `timeout_s`.
    """
    until = time.monotonic() + timeout_s
    return _opened(store, size, until) if rank == 0 else _joined(store, rank, size, until)


def _opened(store: Store, size: int, until: float) -> str:
    """Rank 0's part."""
    name, here = secrets.token_hex(8), {0}
    while len(here) < size:
        store.set_timeout(_left(until))
        message = json.loads(store.queue_pop(_QUEUE))
        if "nonce" in message and message["size"] == size:
            store.set(_answer(message["nonce"]), name)
        elif message.get("name") == name:
            here.add(message["rank"])
    store.set(_all_here(name), "")
    return name


def _joined(store: Store, rank: int, size: int, until: float) -> str:
    """The part of every other rank."""
    while True:
        nonce = secrets.token_hex(8)
        store.queue_push(_QUEUE, json.dumps({"rank": rank, "size": size, "nonce": nonce}))
        try:
            store.wait([_answer(nonce)], min(_left(until), timedelta(seconds=_AGAIN_S)))
            name = store.get(_answer(nonce)).decode()
            store.queue_push(_QUEUE, json.dumps({"rank": rank, "name": name}))
            store.wait([_all_here(name)], min(_left(until), timedelta(seconds=_AGAIN_S)))
        except DistStoreError:
            if time.monotonic() >= until:
                raise
        else:
            store.delete_key(_answer(nonce))
            return name


def _answer(nonce: str) -> str:
    return f"polytempo/round/{nonce}"


def _all_here(name: str) -> str:
    return f"polytempo/round/{name}/all"


def _left(until: float) -> timedelta:
    """A timeout of at least a millisecond: to a store, 0 means no end."""
    return timedelta(seconds=max(0.001, until - time.monotonic()))
