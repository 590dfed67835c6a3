"""Meshes: ranks as coordinates, the groups along axes, and messages that groups keep apart."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core import Mesh, Port, world_port
from polytempo.worlds.process.transport import wire_tag

meshes = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(
    lambda lengths: Mesh(tuple((f"axis{i}", length) for i, length in enumerate(lengths)))
)


def ports(mesh: Mesh) -> list[Port]:
    """The ports of every rank of a world with this layout."""
    return [world_port(rank, [0] * mesh.size).meshed(**mesh.lengths) for rank in range(mesh.size)]


def subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    """All subsets of the mesh's axes."""
    names = list(mesh.lengths)
    return [axes for n in range(len(names) + 1) for axes in combinations(names, n)]


# ---- arithmetic ----


@pytest.mark.parametrize(
    ("rank", "coordinates"),
    [(0, (0, 0, 0)), (1, (0, 0, 1)), (2, (0, 0, 2)), (3, (0, 1, 0)), (6, (1, 0, 0)), (11, (1, 1, 2))],
)
def test_the_last_axis_varies_fastest(rank: int, coordinates: tuple[int, ...]) -> None:
    mesh = Mesh((("data", 2), ("stage", 2), ("tensor", 3)))
    named = dict(zip(("data", "stage", "tensor"), coordinates, strict=True))
    assert (mesh.coordinates(rank), mesh.rank(named)) == (named, rank)


@given(meshes)
def test_ranks_and_coordinates_are_two_names_of_one_place(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    lengths = [range(length) for _, length in mesh.axes]
    assert [tuple(place.values()) for place in places] == list(product(*lengths)), "row-major"


@given(meshes, st.data())
def test_a_group_differs_along_its_axes_only(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from(subsets(mesh)))
    rank = data.draw(st.integers(0, mesh.size - 1))
    own = mesh.coordinates(rank)
    expected = [
        other
        for other in range(mesh.size)
        if all(mesh.coordinates(other)[axis] == own[axis] for axis in own if axis not in axes)
    ]
    assert mesh.group(rank, axes) == expected
    assert mesh.group(rank, axes[::-1]) == expected


# ---- groups of a port ----


@given(meshes, st.data())
def test_a_group_keeps_the_mesh(mesh: Mesh, data: st.DataObject) -> None:
    port = data.draw(st.sampled_from(ports(mesh)))
    first, second = (data.draw(st.sampled_from(subsets(mesh))) for _ in range(2))
    group = port.along(*first)
    assert group.along(*second) == port.along(*second)
    assert group.coordinates == port.coordinates == mesh.coordinates(port.rank)
    assert port.along(*mesh.lengths) == port
    assert (port.along().members, group.world_rank) == ((port.rank,), port.rank)


@given(meshes, st.data())
def test_channels_and_deadlines_come_along(mesh: Mesh, data: st.DataObject) -> None:
    port = data.draw(st.sampled_from(ports(mesh)))
    axes = data.draw(st.sampled_from(subsets(mesh)))
    assert port.on_channel(3).on_channel(5).along(*axes) == port.along(*axes).on_channel(3).on_channel(5)
    assert port.within(2).along(*axes) == port.along(*axes).within(2)


@given(meshes)
def test_messages_of_two_groups_never_meet(mesh: Mesh) -> None:
    """Ranks that are in two groups tell their messages apart; one group has one channel on all its members."""
    whole = ports(mesh)
    groups = {axes: [port.along(*axes) for port in whole] for axes in subsets(mesh)}
    for of_all in groups.values():
        assert len({(group.members, group.channel) for group in of_all}) == len({g.members for g in of_all})
    for port in whole:
        own = [groups[axes][port.rank] for axes in groups]
        for a, b in combinations(own, 2):
            shared = set(a.members) & set(b.members) - {port.rank}
            assert a == b or a.channel != b.channel or not shared


@given(st.data())
def test_channels_of_a_mesh_have_numbers_of_their_own_on_the_wire(data: st.DataObject) -> None:
    port = world_port(0, [0] * 32).meshed(a=2, b=2, c=2, d=2, e=2)
    paths = st.lists(st.integers(0, 1022), max_size=2)

    def drawn() -> tuple[Port, int]:
        group = port.along(*data.draw(st.sampled_from(subsets(port.mesh or Mesh(())))))
        for number in data.draw(paths):
            group = group.on_channel(number)
        return group, data.draw(st.integers(0, 1023 if group.size == 32 or group.size == 1 else 31))

    (a, tag), (b, other) = drawn(), drawn()
    assert 0 <= wire_tag(a.channel, tag) < 2**31
    assert (wire_tag(a.channel, tag) == wire_tag(b.channel, other)) == ((a.channel, tag) == (b.channel, other))


def test_an_axis_of_length_1_adds_nothing_to_a_group() -> None:
    port = world_port(5, [0] * 8).meshed(data=8, model=1)
    assert port.along("data") == port.along("data", "model") == port
    assert port.along("model").members == (5,)


def test_a_mesh_within_a_group_of_a_mesh() -> None:
    data = world_port(6, [0] * 8).meshed(data=4, model=2).along("data")
    assert data.members == (0, 2, 4, 6)
    inner = data.meshed(host=2, local=2)
    assert [inner.along(axis).members for axis in ("host", "local")] == [(2, 6), (4, 6)]
    outer = [data.along(axis) for axis in ("data", "model")]
    assert len({group.channel for group in [*outer, inner.along("host"), inner.along("local")]}) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda port: port.along("data", "data"), r"spans each axis once, not \['data', 'data'\]"),
        (lambda port: port.along("tensor"), r"no axis 'tensor' in the mesh \{'data': 4, 'model': 2\}"),
        (lambda port: port.among([0]).along(), r"this group has no mesh; make one with port.meshed"),
        (lambda port: port.meshed(data=8, model=0), r"axis 'model' of a mesh has length 0"),
        (lambda port: port.meshed(data=4), r"a mesh .* has 4 places, but the group has 8 ranks"),
        (lambda port: Mesh(tuple((axis, 2) for axis in "abcdef")), "at most 5 axes longer than 1, got 6"),
        (lambda port: port.mesh.rank({"data": 4}), r"mesh\(data=4, model=2\) has data 0 to 3, not 4"),
        (lambda port: port.on_channel(1).on_channel(2).on_channel(3), "channels nest two deep"),
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong: object, message: str) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=message):
        wrong(world_port(0, [0] * 8).meshed(data=4, model=2))


def test_a_tag_that_has_no_place_is_refused() -> None:
    data = world_port(0, [0] * 8).meshed(data=4, model=2).along("data")
    with pytest.raises(ValueError, match="tags in a group of a mesh run from 0 to 31, got 32"):
        wire_tag(data.channel, 32)
    with pytest.raises(ValueError, match="tags run from 0 to 1023, got 1024"):
        wire_tag(0, 1024)
    with pytest.raises(ValueError, match="make one mesh"):
        wire_tag(data.meshed(host=2, local=2).along("host").channel, 0)
