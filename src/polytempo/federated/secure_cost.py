"""The cost of a secure sum: bytes by a formula, seconds from the cryptography as this machine computes it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from polytempo.core.calls.refusals import Incompatible
from polytempo.core.strategy import SecureSum
from polytempo.federated.secure_sum import joined, lagrange_factors, primitives, secure_bytes, secure_down_bytes, split

_PROBE_BYTES = 1 << 20


class SecureCost(NamedTuple):
    """A round's sum of so many clients, beside the model that each receives."""

    clients: int
    up_bytes: int
    """Bytes that a client sends: keys, shares, masked words."""
    down_bytes: int
    """Bytes that a client receives: the others' keys and shares for it."""
    plain_bytes: int
    """Bytes that a client would send without masks: its movement."""
    client_s: float | None
    """Seconds of a client for its masks, keys and shares. None: `cryptography` is not installed."""
    server_s: float | None
    """Seconds of the server to take the masks off, with no client lost."""
    lost_s: float | None
    """Seconds more for each lost client: a mask for each of the others."""


def secure_cost(secure: SecureSum, clients: int, numel: int, plain_bytes: int) -> SecureCost:
    """The cost of a sum of `numel` numbers of `clients` clients.

    Cost: some milliseconds: masks of 1 MiB, keys, and the shares of a secret are made and measured.
    """
    up = secure_bytes(clients, numel, secure.bits)
    down = secure_down_bytes(clients)
    try:
        crypto = primitives()
    except Incompatible:
        return SecureCost(clients, up, down, plain_bytes, None, None, None)
    key, least, holders = secrets.token_bytes(32), secure.least(clients), range(clients)
    mask_s = _least_s(lambda: crypto.stream(key, _PROBE_BYTES)) * numel * secure.bits / 8 / _PROBE_BYTES
    agree_s = _least_s(lambda: crypto.agree(key, crypto.public(key))) / 2
    split_s = _least_s(lambda: split(key, least, holders, secrets.token_bytes))
    shares = split(key, least, holders, secrets.token_bytes)
    factors_s = _least_s(lambda: lagrange_factors(tuple(shares)[:least]), times=1)
    joined_s = _least_s(lambda: joined(shares, least))
    client_s = clients * mask_s + (3 * (clients - 1) + 2) * agree_s + 2 * split_s
    server_s = factors_s + clients * (mask_s + joined_s)
    return SecureCost(clients, up, down, plain_bytes, client_s, server_s, (clients - 1) * (mask_s + agree_s))


def _least_s(work: Callable[[], object], times: int = 3) -> float:
    """The shortest time of some."""
    found = []
    for _ in range(times):
        begin_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin_s)
    return min(found)
