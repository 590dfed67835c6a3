"""`copies`: the copies between a device and the host that a worker makes in an exchange."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from polytempo.cluster.device_speeds import FROM_HOST, TO_HOST
from polytempo.core import native
from polytempo.core.arithmetic.kernel_use import KernelUse, Uses
from polytempo.core.cost import Exchange

GATHERS = ("all_gather", "merged(", "peer_models")
"""Beginnings of the names of exchanges where each worker gets the others' tensors."""


class HostCopies(NamedTuple):
    """Copies of one worker in one exchange."""

    to_host: float
    """Bytes."""
    from_host: float
    number: float
    """Copies both ways together."""


def copies(exchange: Exchange, workers: int) -> HostCopies:
    """The copies through the host where workers share devices, or send to a server.

    Formulas with K bytes of tensors (or wires) of a worker, N workers and S bytes that the busiest worker sends: a
    native sum K and K; a gather K and N K; stripes K and 2 K - K/N; messages S, and about as many back.
    """
    sent = exchange.sent
    if exchange.server:
        each = sent.payload_bytes / workers
        return HostCopies(each, 0, 1) if exchange.server == "push" else HostCopies(0, each, 1)
    if workers < 2:
        return HostCopies(0, 0, 0)
    if exchange.by.startswith(GATHERS):
        own = sent.busiest_bytes / (workers - 1)
        return HostCopies(own, workers * own, 1 + workers)
    own = sent.busiest_bytes * workers / (2 * (workers - 1))
    if exchange.by == "reduce_scatter":
        return HostCopies(own, own * (2 - 1 / workers), 3 * workers - 1)
    if is_native(exchange):
        return HostCopies(own, own, 2 * max(1, len(exchange.sums)))
    return HostCopies(sent.busiest_bytes, sent.busiest_bytes, 2 * max(1, round(sent.messages / workers)))


def is_native(exchange: Exchange) -> bool:
    """True for sums that the group performs."""
    return exchange.by == "native" or (bool(exchange.sums) and all(each.route is native for each in exchange.sums))


def copies_of_step(exchanges: Iterable[Exchange], workers: int, *, staged: bool) -> Uses:
    """Kernel uses of the copies of a step, the mean over the period of each exchange.

    A parameter server's pushes and pulls are copied in any case; other tensors where they are `staged`.
    """
    to_host = from_host = to_calls = from_calls = 0.0
    for exchange in exchanges:
        if not (staged or exchange.server):
            continue
        found, period = copies(exchange, workers), exchange.steps.period
        both = (found.to_host > 0) + (found.from_host > 0)
        calls = found.number / max(both, 1) / period
        to_host, from_host = to_host + found.to_host / period, from_host + found.from_host / period
        to_calls += calls * (found.to_host > 0)
        from_calls += calls * (found.from_host > 0)
    uses = KernelUse(TO_HOST, to_calls, to_host), KernelUse(FROM_HOST, from_calls, from_host)
    return tuple(use for use in uses if use.calls)
