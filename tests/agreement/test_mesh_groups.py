"""Collectives and messages along several axes of a mesh at the same time: the same answers in both worlds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from polytempo.cluster import one_host
from polytempo.collectives import ring, tree
from polytempo.core import Port, Work
from polytempo.worlds import ProcessWorld, VirtualWorld
from process.crew import together

pytestmark = pytest.mark.process

SHAPES = [{"data": 2, "model": 2}, {"data": 2, "stage": 2, "tensor": 1}, {"model": 4}, {"data": 4}]
"""Shapes of four ranks."""


def own(port: Port, salt: int) -> Tensor:
    """A rank's part of an exchange; its sum depends on the order of adding."""
    return torch.randn(6, generator=torch.Generator().manual_seed(100 * salt + port.world_rank))


def groups_of(port: Port) -> list[Port]:
    """This rank's groups along each axis, and the whole; groups of several ranks, each once."""
    found = [port.along(axis) for axis in (port.mesh.lengths if port.mesh else {})] + [port]
    return [group for i, group in enumerate(found) if group.size > 1 and group not in found[:i]]


async def at_once(port: Port) -> list[Any]:
    """Two routes of messages, a sum, a gather and a broadcast in every group; all begin before any is awaited."""
    groups = [*groups_of(port), port.along()]
    under_way: list[Work[Any]] = []
    for salt, group in enumerate(groups):
        under_way += [
            await port.start(ring(group, own(group, salt))),
            await port.start(tree(group.on_channel(1), own(group, salt + 10))),
            await port.start(group.all_reduce(own(group, salt + 20))),
            await port.start(group.all_gather(own(group, salt + 30))),
            await port.start(group.broadcast(own(group, salt + 40), group.size - 1)),
        ]
    answers = [await work for work in reversed(under_way)]  # the order of waiting differs from the order of beginning
    return [torch.stack(a).tolist() if isinstance(a, list) else a.tolist() for a in answers]


async def around(port: Port) -> list[list[float]]:
    """Every rank sends its vector to the next one of each of its groups at the same time, and takes the arrivals."""
    groups = groups_of(port)
    coming = [await port.start(g.recv(torch.empty(6), (g.rank - 1) % g.size)) for g in groups]
    going = [await port.start(g.send(own(g, salt), (g.rank + 1) % g.size)) for salt, g in enumerate(groups)]
    answers = [(await work).tolist() for work in coming]
    for work in going:
        await work
    return answers


async def everything(port: Port) -> list[Any]:
    found: list[Any] = []
    for shape in SHAPES:
        meshed = port.meshed(**shape)
        found += [await at_once(meshed), await around(meshed)]
    return found


@cache
def real() -> list[Any]:
    def work(world: ProcessWorld) -> Any:
        return world.drive(everything(world.port))

    return together(4, work)


def test_several_axes_at_once_in_both_worlds() -> None:
    async def program(port: Port) -> list[Any]:
        return await everything(port)

    outcome = VirtualWorld(one_host(4), 4).run(program)
    assert outcome.unreceived == 0
    for rank in range(4):
        assert _rounded(real()[rank]) == _rounded(outcome.results[rank])


def test_a_vector_goes_around_every_axis() -> None:
    answers = real()[3][1]  # of mesh(data=2, model=2)
    senders = [1, 2, 2]  # along data, along model, along the whole
    expected = [own(_port(sender), salt).tolist() for salt, sender in enumerate(senders)]
    assert answers == expected


def _port(rank: int) -> Port:
    return VirtualWorld(one_host(4), 4).port(rank).meshed(data=2, model=2)


def _rounded(answers: Any) -> Any:
    """Native sums of the transport add in another order than the virtual world's."""
    return [_rounded(a) for a in answers] if isinstance(answers, list) else round(answers, 5)
