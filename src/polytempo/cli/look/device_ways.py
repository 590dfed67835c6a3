"""Ways of tensors on a device, as `explain --device` and `doctor` say them: bytes and copies of a worker's exchange.

a device each     device ══ NCCL, or another backend of torch ══ device
else              device ─▶ pinned memory ─▶ sum, or message, of the host ─▶ pinned memory ─▶ device
a server          device ─▶ pinned memory ─▶ shard on the host ─▶ pinned memory ─▶ device
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from polytempo.cli.options.show import size
from polytempo.core import Strategy
from polytempo.core.calls.refusals import refusal_of
from polytempo.core.cost import Exchange
from polytempo.device import HOST, accelerator_kind, backend_name, backend_of, num_devices
from polytempo.spec.explanation import Explanation
from polytempo.training.model.host_copies import GATHERS, HostCopies, copies, is_native


class DeviceWays(NamedTuple):
    """A kind of device, and the ways between workers on it."""

    kind: str
    devices: int | None
    """None: this machine has none of the kind, and the ways are a GPU machine's with that kind."""
    backend: str | None
    """The backend of torch between devices, as NCCL."""
    shared: bool
    """True if the option names one device, for all workers of a host."""

    def own(self, workers: int) -> tuple[bool, ...]:
        """True where each of so many workers has a device of its own; both where that is not known."""
        if self.backend is None or (self.shared and workers > 1):
            return (False,)
        return (True, False) if self.devices is None else (workers <= self.devices,)


def device_ways(device: str) -> DeviceWays | None:
    """The ways for an option `device`; None for the CPU."""
    here = accelerator_kind()
    kind, _, number = (here or HOST.type if device == "auto" else device).partition(":")
    if kind == HOST.type:
        return None
    found = backend_of(kind) if kind == here else backend_name(kind)
    return DeviceWays(kind, num_devices() if kind == here else None, found, bool(number))


def between_workers(kind: str) -> str:
    """The way of tensors between workers on the accelerator of this machine."""
    sums = backend_of(kind)
    return f"by {sums} where each worker has a device of its own, else through the host" if sums else "through the host"


def device_lines(ways: DeviceWays, strategy: Strategy, found: Explanation) -> Iterator[str]:
    """The ways of a strategy's tensors in words."""
    if (row := refusal_of(strategy.features | {"device"})) is not None and "device" in row.features:
        yield f"refused ({row.code}): " + row.remedy.format_map(_Names(strategy=strategy, device=ways.kind))
        return
    if ways.devices is None:
        yield f"no {ways.kind} is here; on a machine with it:"
    if found.stages:
        yield "activations and their gradients go through the host: each message is one copy to it, and one from it"
    for planned in found.exchanges:
        exchange, each = planned.exchange, copies(planned.exchange, found.workers)
        if exchange.server == "push":
            yield f"a push is copied to pinned memory: {size(round(each.to_host))}, 1 copy; the shards are on the host"
        elif exchange.server == "pull":
            yield f"a pull is copied from pinned memory: {size(round(each.from_host))}, 1 copy, without a wait"
        elif exchange.sent.messages:
            for own in ways.own(found.workers):
                yield f"{exchange.by}, {_who(own, ways)}: {_way(own, ways, exchange, each)}"
    if any(planned.exchange.codec for planned in found.exchanges):
        yield "codecs compute on the device, so these are bytes of wires"


def as_data(ways: DeviceWays, strategy: Strategy, found: Explanation) -> dict[str, Any]:
    """The same, for JSON."""
    row = refusal_of(strategy.features | {"device"})
    refused = row.code if row is not None and "device" in row.features else None
    exchanges = [
        {
            "by": planned.exchange.by,
            "server": planned.exchange.server,
            **copies(planned.exchange, found.workers)._asdict(),
        }
        for planned in found.exchanges
    ]
    own = [*ways.own(found.workers)]
    return {**ways._asdict(), "a_device_each": own, "refused": refused, "through_the_host": exchanges}


class _Names(dict[str, object]):
    def __missing__(self, name: str) -> str:
        return name


def _who(own: bool, ways: DeviceWays) -> str:
    if own:
        return "a device for each worker"
    return "several workers on a device" if ways.backend else f"{ways.kind} has no backend in torch"


def _way(own: bool, ways: DeviceWays, exchange: Exchange, each: HostCopies) -> str:
    collective = is_native(exchange) or exchange.by == "reduce_scatter" or exchange.by.startswith(GATHERS)
    if own:
        return (
            f"by {ways.backend}{'' if collective else ', messages of a round in one batch'}, no copy through the host"
        )
    back = "as many back" if each.from_host == each.to_host else f"{size(round(each.from_host))} back"
    return f"staged: {size(round(each.to_host))} to pinned memory and {back}, {round(each.number):,} copies a worker"
