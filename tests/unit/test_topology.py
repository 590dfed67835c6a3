"""The nodes of a run: literal tables."""

from __future__ import annotations

import pytest

import polytempo as pt
from polytempo.core import Mesh
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.topology import Topology


def test_a_collective_run_has_workers_and_nothing_else() -> None:
    topology = Topology.collective(3, hosts=[0, 0, 1])
    assert topology.workers == (0, 1, 2)
    assert not topology.is_served
    assert (topology.num_nodes, topology.num_servers) == (3, 0)
    assert [topology.host_of(node) for node in range(4)] == [0, 0, 1, 0]
    with pytest.raises(ValueError, match="there is no node 3; there are 3 workers, numbered from 0"):
        topology.role_of(3)


def test_a_parameter_server_stands_behind_the_workers() -> None:
    """Two workers, two shards with a further copy each, a third shard that comes later."""
    topology = Topology.served(2, shards=2, replicas=1, added=1)
    assert topology.chains == ((2, 3), (4, 5))
    assert topology.spares == ((6, 7),)
    assert (topology.coordinator, topology.evaluator) == (8, 9)
    assert (topology.num_nodes, topology.num_servers) == (9, 7)
    roles = ["worker"] * 2 + ["copy"] * 6 + ["coordinator", "evaluator", "copy"]
    assert [topology.role_of(node) for node in range(11)] == roles
    assert [topology.shard_of(node) for node in range(11)] == [None, None, 0, 0, 1, 1, 2, 2, None, None, None]


@pytest.mark.parametrize(
    ("strategy", "reshape", "num_nodes"),
    [
        (pt.strategies.sync_sgd(), {}, 3),
        (pt.strategies.async_sgd(), {}, 3 + 1 + 1),
        (pt.strategies.async_sgd(shards=2, replicas=1), {}, 3 + 2 * 2 + 1),
        (pt.strategies.async_sgd(), {1: 3, 2: 2, 3: 4}, 3 + 1 + (2 + 2) + 1),
    ],
)
def test_a_run_says_its_nodes(strategy: pt.Strategy, reshape: dict[int, int], num_nodes: int) -> None:
    spec = RunSpec.of(pt.jobs.find("digits"), strategy, 3, RunOptions(reshape=reshape))
    assert spec.topology().num_nodes == num_nodes
    assert [spec.topology(hosts=[0, 1]).host_of(node) for node in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    "topology",
    [
        Topology.collective(4, hosts=[0, 0, 1, 1], mesh=Mesh((("data", 2), ("stage", 2)))),
        Topology.served(2, shards=2, replicas=1, added=1),
    ],
    ids=["collective", "served"],
)
def test_it_comes_back_from_json(topology: Topology) -> None:
    assert Topology.from_json(topology.to_json()) == topology


def test_a_mesh_has_a_place_for_each_worker() -> None:
    with pytest.raises(ValueError, match=r"mesh\(data=2, stage=2\) has 4 places, and there are 3 workers"):
        Topology.collective(3, mesh=Mesh((("data", 2), ("stage", 2))))
