"""Helpers of several test files: a cluster with round numbers, and ways to run one transform on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polytempo.cluster import Cluster, Link
from polytempo.core import Bundle, Port, Route, State, Transform
from polytempo.core.state import settled
from polytempo.worlds import Outcome, VirtualWorld

SECOND = Link(latency_s=0.25, bytes_per_s=100.0)
"""100 bytes take a second, and a quarter of one to be there: times that binary fractions hold exactly."""

CLUSTER = Cluster(network=SECOND, memory=Link(0.125, 200.0), flops_per_s=1000.0)


def payload(num_bytes: int) -> Tensor:
    """A message of that many bytes."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


def bundle(*values: float, share: float | None = None, dtype: torch.dtype = torch.float64) -> Bundle:
    """One tensor "w" of these values."""
    return Bundle({"w": torch.tensor(values, dtype=dtype)}, share)


def applied(transform: Transform, given: Sequence[Bundle]) -> list[Bundle | None]:
    """Each rank's result of one `transform`, rank i starting from `given[i]`."""

    async def program(port: Port) -> Bundle | None:
        answer, _ = await transform.apply(port, given[port.rank], transform.init(given[port.rank]))
        return answer

    outcome = VirtualWorld(CLUSTER, len(given)).run(program)
    assert outcome.unreceived == 0
    return outcome.results


def after_steps(transform: Transform, num_steps: int, start: Sequence[Bundle]) -> list[list[Tensor]]:
    """Each rank's values after each of `num_steps` applications, each to the answer of the one before."""

    async def program(port: Port) -> list[Tensor]:
        values: Bundle | None = start[port.rank]
        state: State = transform.init(start[port.rank])
        history = []
        for _ in range(num_steps):
            assert values is not None
            values, state = await transform.apply(port, values, state)
            assert values is not None
            history.append(values.flat.clone())
        await settled(state)
        return history

    outcome: Outcome[list[Tensor]] = VirtualWorld(CLUSTER, len(start)).run(program)
    assert outcome.unreceived == 0
    return [history for history in outcome.results if history is not None]


def exchanged(
    route: Route,
    num_ranks: int,
    numel: int,
    link: Link = Link(1e-5, 1e9),
    workers_per_host: int = 1,
    meta: bool = False,
) -> Outcome[Tensor]:
    """One exchange of random values, float64, different on each rank."""
    device = "meta" if meta else "cpu"

    async def program(port: Port) -> Tensor:
        return await route(port, values(port.rank, numel).to(device))

    return VirtualWorld(Cluster(link, workers_per_host=workers_per_host), num_ranks).run(program)


def values(rank: int, numel: int) -> Tensor:
    """Each rank's input of an exchange."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def flats(transform: Transform, given: Sequence[Bundle]) -> list[Tensor]:
    """Every rank's answer."""
    return [answer.flat for answer in applied(transform, given) if answer is not None]


def normal(num_ranks: int, numel: int = 6) -> list[Tensor]:
    """A vector of float64 for each rank."""
    return list(torch.randn(num_ranks, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(num_ranks)))


def bundles(rows: Sequence[Tensor]) -> list[Bundle]:
    """A bundle for each rank."""
    return [Bundle({"w": row.clone()}) for row in rows]
