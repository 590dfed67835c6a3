"""What a process of another system is told to become a rank: the variables that `polytempo.init` and scripts read."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from polytempo.horovod.torch.basics import shutdown


def rank_variables(rank: int, hosts: Sequence[str], address: str, port: int) -> dict[str, str]:
    """Those of `rank`, where `hosts` has each rank's host; ranks meet at `address`, which is rank 0's, and `port`."""
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank, order = here.index(rank), list(dict.fromkeys(hosts))
    across = [host for host in order if list(hosts).count(host) > local_rank]
    values = {
        "RANK": rank,
        "SIZE": len(hosts),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": len(here),
        "CROSS_RANK": across.index(hosts[rank]),
        "CROSS_SIZE": len(across),
    }
    torchs = {
        "MASTER_ADDR": "127.0.0.1" if len(order) == 1 else address,
        "MASTER_PORT": port,
        "RANK": rank,
        "WORLD_SIZE": len(hosts),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": len(here),
        "NODE_RANK": order.index(hosts[rank]),
    }
    named = {f"HOROVOD_{name}": str(value) for name, value in values.items()}
    return {**named, **{name: str(value) for name, value in torchs.items()}}


def free_port(address: str) -> int:
    """A port that is free now at this host's `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def leaves_where_it_fails() -> Iterator[None]:
    """Shut Horovod down where something raises in a process that lives on: others would wait for it."""
    try:
        yield
    except BaseException:
        shutdown()
        raise
