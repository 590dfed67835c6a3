"""Ports: the places in a group, and the operations that a port builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core import Port, world_port
from polytempo.core.op import (
    AllGather,
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    Mark,
    Now,
    Op,
    Recv,
    ReduceScatter,
    Send,
)

X = torch.zeros(6)


def port(rank: int, size: int = 8) -> Port:
    """A port of a world with two ranks a host."""
    return world_port(rank, [r // 2 for r in range(size)])


def test_a_world_port_sees_everybody_in_order() -> None:
    assert port(3) == Port(rank=3, members=(0, 1, 2, 3, 4, 5, 6, 7), hosts=(0, 0, 1, 1, 2, 2, 3, 3))
    assert port(3).size == 8


@pytest.mark.parametrize(
    ("rank", "positions", "new_rank", "members", "hosts"),
    [
        (2, [2], 0, (2,), (1,)),
        (2, [0, 2, 4, 6], 1, (0, 2, 4, 6), (0, 1, 2, 3)),
        (6, [6, 4, 2, 0], 0, (6, 4, 2, 0), (3, 2, 1, 0)),
        (7, [0, 1, 7], 2, (0, 1, 7), (0, 0, 3)),
    ],
)
def test_among_renumbers_in_the_order_given(
    rank: int, positions: list[int], new_rank: int, members: tuple[int, ...], hosts: tuple[int, ...]
) -> None:
    assert port(rank).among(positions) == Port(rank=new_rank, members=members, hosts=hosts)


def test_groups_of_groups_name_world_ranks() -> None:
    evens = port(6).among([0, 2, 4, 6])
    last_two = evens.among([3, 2])
    assert last_two.members == (6, 4)
    assert last_two.send(X, to=1).to == 4  # type: ignore[attr-defined]


# meshed(stage=2, data=4):   stage 0: 0 1 2 3      stage 1: 4 5 6 7
@pytest.mark.parametrize(
    ("rank", "axis", "new_rank", "members"),
    [
        (0, "data", 0, (0, 1, 2, 3)),
        (0, "stage", 0, (0, 4)),
        (2, "data", 2, (0, 1, 2, 3)),
        (2, "stage", 0, (2, 6)),
        (5, "data", 1, (4, 5, 6, 7)),
        (5, "stage", 1, (1, 5)),
        (7, "data", 3, (4, 5, 6, 7)),
        (7, "stage", 1, (3, 7)),
    ],
)
def test_along_an_axis_of_a_mesh(rank: int, axis: str, new_rank: int, members: tuple[int, ...]) -> None:
    group = port(rank).meshed(stage=2, data=4).along(axis)
    assert (group.rank, group.members) == (new_rank, members)


def test_along_the_middle_axis_of_three() -> None:
    cube = port(5).meshed(a=2, b=2, c=2)  # 5 is a=1, b=0, c=1
    assert [cube.along(axis).members for axis in "abc"] == [(1, 5), (5, 7), (4, 5)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_the_groups_along_an_axis_partition_the_world(lengths: list[int], data: st.DataObject) -> None:
    size = int(torch.tensor(lengths).prod())
    axes = {f"axis{i}": length for i, length in enumerate(lengths)}
    axis = data.draw(st.sampled_from(sorted(axes)))
    groups = [world_port(rank, [0] * size).meshed(**axes).along(axis) for rank in range(size)]
    assert all(group.members[group.rank] == rank for rank, group in enumerate(groups))
    assert all(group.size == axes[axis] for group in groups)
    assert sorted(member for group in {g.members for g in groups} for member in group) == list(range(size))


def test_channels_keep_messages_apart_and_nest() -> None:
    inside = [port(0).on_channel(a).on_channel(b).channel for a in range(3) for b in range(3)]
    outside = [port(0).channel] + [port(0).on_channel(a).channel for a in range(3)]
    assert len(set(inside + outside)) == 13


def test_a_channel_and_a_deadline_reach_every_operation() -> None:
    door = port(1).on_channel(4).within(2.5)
    operations: list[Op[Any]] = [
        door.send(X, 0),
        door.recv(X, 0),
        door.all_reduce(X),
        door.all_gather(X),
        door.broadcast(X),
        door.barrier(),
    ]
    assert {op.timeout_s for op in operations} == {2.5}
    assert {op.channel for op in operations if isinstance(op, Send | Recv | Collective)} == {5}


def test_a_deadline_survives_into_sub_groups() -> None:
    assert port(0).within(3).meshed(a=2, b=4).along("b").timeout_s == 3


@pytest.mark.parametrize(
    ("op", "kind", "text"),
    [
        (port(0).send(X, 3, tag=2), Send, "send to rank 3 (tag 2)"),
        (port(0).recv(X, 7), Recv, "recv from rank 7 (tag 0)"),
        (port(0).all_reduce(X), AllReduce, "all_reduce among 8 ranks"),
        (port(0).all_gather(X), AllGather, "all_gather among 8 ranks"),
        (port(0, 6).reduce_scatter(X), ReduceScatter, "reduce_scatter among 6 ranks"),
        (port(0).broadcast(X, 1), Broadcast, "broadcast among 8 ranks"),
        (port(0).barrier(), Barrier, "barrier among 8 ranks"),
        (port(0).now(), Now, "now"),
        (port(0).mark(3), Mark, "mark"),
    ],
)
def test_operations_are_data_and_say_what_they_are(op: Op[Any], kind: type, text: str) -> None:
    assert type(op) is kind
    assert str(op) == text


def test_awaiting_an_operation_hands_it_to_the_world_and_returns_the_answer() -> None:
    async def program() -> float:
        return await port(0).now() + 1.0

    coroutine = program()
    assert isinstance(coroutine.send(None), Now)
    with pytest.raises(StopIteration) as stop:
        coroutine.send(41.0)
    assert stop.value.value == 42.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: port(0).among([1, 2]), r"rank 0 can only join a group that names it once, not \[1, 2\]"),
        (lambda: port(0).among([0, 0]), r"rank 0 can only join a group that names it once, not \[0, 0\]"),
        (lambda: port(0).among([0, 8]), "the group has ranks 0 to 7, not 8"),
        (lambda: port(0).send(X, to=-1), "the group has ranks 0 to 7, not -1"),
        (lambda: port(0).recv(X, source=8), "the group has ranks 0 to 7, not 8"),
        (lambda: port(0).broadcast(X, source=9), "the group has ranks 0 to 7, not 9"),
        (lambda: port(0).meshed(data=3, stage=2), r"a mesh .* has 6 places, but the group has 8 ranks"),
        (lambda: port(0).along("data"), r"no axis 'data' in the mesh \{\}; make one with port.meshed\(data=…\)"),
        (lambda: port(0).reduce_scatter(X), "needs a multiple of 8 elements, got 6; pad the buffer"),
        (lambda: port(0).all_to_all([X], [X]), "all_to_all needs 8 pieces and likes, got 1 and 1"),
        (lambda: port(0).on_channel(1023), "a port has 1023 channels, got number 1023"),
        (lambda: port(0).on_channel(-1), "a port has 1023 channels, got number -1"),
        (lambda: port(0).within(0), "a deadline must be a positive number of seconds, got 0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong: object, message: str) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=message):
        wrong()
