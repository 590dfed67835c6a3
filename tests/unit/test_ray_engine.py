"""The Ray engine without Ray: reservations of actors, refusals, and the actors of a fake Ray."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from polytempo import engines
from polytempo.engines.engine import Launch, parse_engine
from polytempo.engines.on_ray.ray_engine import Ray, RayStarter, reach
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.spec.topology import Topology
from polytempo.wire.keys import make_keys

TICKET = AgentTicket("tcp://127.0.0.1:1", make_keys())

# --- options


@pytest.mark.parametrize(
    ("setup", "bundle"),
    [
        (Ray(), {"CPU": 1.0}),
        (Ray(num_cpus=2, num_gpus=0.5), {"CPU": 2.0, "GPU": 0.5}),
        (Ray(num_cpus=0, num_gpus=1), {"GPU": 1.0}),
        (Ray(num_cpus=0, resources={"TPU": 4, "fast_disk": 0}), {"TPU": 4.0}),
    ],
)
def test_what_an_actor_reserves(setup: Ray, bundle: dict[str, float]) -> None:
    assert setup.bundle == bundle


@pytest.mark.parametrize(
    ("setup", "topology", "actors"),
    [
        (Ray(), Topology.collective(3), 3),
        (Ray(), Topology.served(2, shards=2, replicas=1), 2 + 4 + 1),  # workers, copies, the evaluator
        (Ray(actors=2), Topology.served(2, shards=2, replicas=1), 2),
    ],
)
def test_there_is_an_actor_for_each_process(setup: Ray, topology: Topology, actors: int) -> None:
    assert setup.num_actors(topology) == actors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "WIDE"}, "'WIDE'.*SPREAD, STRICT_SPREAD, PACK, STRICT_PACK"),
        ({"num_gpus": -1}, "num_gpus=-1"),
        ({"num_cpus": float("nan")}, "num_cpus=nan"),
        ({"resources": {"TPU": -2}}, "TPU=-2"),
        ({"resources": {"GPU": 1}}, "without GPU.*num_gpus="),
        ({"num_cpus": 0}, "reserves nothing"),
        ({"actors": 0}, "actors=0"),
        ({"wait_s": 0}, "wait_s=0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Ray(**options)


def test_the_command_line_gives_an_address() -> None:
    assert parse_engine("ray") == engines.ray(address="auto")
    assert parse_engine("ray:ray://head:10001") == engines.ray(address="ray://head:10001")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    launch = Launch(lambda role: None, SimpleNamespace(topology=lambda: Topology.collective(1)), dict, 1, 1)  # type: ignore[arg-type] # no run
    with pytest.raises(ImportError, match=r"pip install 'polytempo\[ray\]'"), Ray().open(launch):
        pass
    monkeypatch.delitem(sys.modules, "polytempo.engines.on_ray.train", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'polytempo\[ray\]'"):
        __import__("polytempo.engines.on_ray.train")


def test_a_function_is_refused_before_ray_is_asked() -> None:
    with (
        pytest.raises(ValueError, match="a function cannot travel"),
        Ray().open(Launch(lambda role: 1, None, dict, 1, 1)),
    ):
        pass


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_an_address_is_tried_before_ray_waits_for_it(form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = form.format(f"127.0.0.1:{listener.getsockname()[1]}")
        reach(address)
    with pytest.raises(OSError, match="refused"):
        reach(address)
    reach("auto")
    reach("local")


# --- following actors


class Lost(Exception):
    """Ray's word on an actor that is gone."""


class FakeActor:
    """The attributes for `poll`: `node` and `over` are futures, and texts once they are there."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.tickets, self.killed = options, list[dict[str, Any]](), False
        self.futures: dict[str, Any] = {}
        self.node, self.hold, self.end = (SimpleNamespace(remote=self._call(name)) for name in ("node", "hold", "end"))

    def _call(self, name: str) -> Any:
        def call(*given: str) -> tuple[FakeActor, str]:
            self.tickets += [json.loads(text) for text in given]
            if name == "end":
                self.futures |= {"end": None, "hold": "was killed by signal 15"}
            return self, name

        return call


class FakeRay:
    """So much of Ray as `RayStarter` calls."""

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.groups: list[list[dict[str, float]]] = []
        self.exceptions = SimpleNamespace(RayError=Lost)
        scheduling = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, bundle: (group, bundle))
        self.util = SimpleNamespace(
            placement_group=self._group, remove_placement_group=self.groups.remove, scheduling_strategies=scheduling
        )

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> list[dict[str, float]]:
        self.groups.append(bundles)
        return bundles

    def remote(self, _: type) -> Any:
        def made(**options: Any) -> Any:
            def remote() -> FakeActor:
                self.actors.append(FakeActor(options))
                return self.actors[-1]

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=made)

    def wait(self, futures: Sequence[Any], timeout: float, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
        assert 0 < num_returns <= len(futures), "as Ray refuses it"
        ready = [future for future in futures if future[1] in future[0].futures]
        return ready, [future for future in futures if future not in ready]

    def get(self, future: tuple[FakeActor, str]) -> Any:
        said = future[0].futures[future[1]]
        if isinstance(said, Exception):
            raise said
        return said

    def kill(self, actor: FakeActor) -> None:
        actor.killed = True

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": False}]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0, "node:10.0.0.1": 1.0}

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}


def test_each_agent_has_a_bundle_and_a_ticket_with_its_number() -> None:
    ray = FakeRay()
    RayStarter(ray, Ray(num_gpus=1)).start([0, 1], TICKET)
    assert ray.groups == [[{"CPU": 1.0, "GPU": 1.0}] * 2]
    assert [actor.options["scheduling_strategy"][1] for actor in ray.actors] == [0, 1]
    assert [ticket["number"] for actor in ray.actors for ticket in actor.tickets] == [0, 1]
    assert all(TICKET.keys.client_secret.decode() not in str(actor.options) for actor in ray.actors)


def test_its_node_is_named_once_it_is_placed() -> None:
    ray = FakeRay()
    starter = RayStarter(ray, Ray())
    [agent] = starter.start([0], TICKET)
    starter.poll()
    assert agent.where == "a Ray actor without a node yet"
    ray.actors[0].futures["node"] = "3f2a55aa77"
    starter.poll()
    assert (agent.where, agent.ended) == ("Ray node 3f2a55aa", None)


def test_a_new_actor_takes_the_bundle_of_one_that_has_ended() -> None:
    """1. agent 1 ends, 2. its actor is gone, 3. agent 3 has its bundle, 4. agent 4 needs a group of its own."""
    ray = FakeRay()
    starter = RayStarter(ray, Ray())
    agents = starter.start([0, 1, 2], TICKET)
    ray.actors[1].futures |= {
        "node": "aa",
        "hold": Lost("\x1b[36mthe actor died\x1b[39m\n\tat once\nits node has died\n\n"),
    }
    starter.poll()
    assert [agent.ended for agent in agents] == [None, "was lost by Ray (the actor died; its node has died)", None]
    assert ray.actors[1].killed
    starter.start([3], TICKET)
    assert ray.actors[3].options["scheduling_strategy"] == (ray.groups[0], 1)
    starter.start([4], TICKET)
    assert [len(group) for group in ray.groups] == [3, 1]


def test_what_is_not_placed_in_time_ends_with_what_is_missing() -> None:
    ray = FakeRay()
    starter = RayStarter(ray, Ray(num_cpus=8, wait_s=1e-9))
    [agent] = starter.start([0], TICKET)
    starter.poll()
    assert agent.ended is not None
    assert "{'CPU': 8.0} by strategy SPREAD, and the 1 nodes of the cluster have {'CPU': 4.0}" in agent.ended
    assert ray.actors[0].killed


def test_stopping_asks_those_that_are_placed_and_gives_everything_back() -> None:
    ray = FakeRay()
    starter = RayStarter(ray, Ray())
    agents = starter.start([0, 1], TICKET)
    ray.actors[0].futures["node"] = "aa"
    starter.stop()
    assert ["end" in actor.futures for actor in ray.actors] == [True, False]
    assert all(actor.killed for actor in ray.actors)
    assert all(agent.ended for agent in agents)
    assert ray.groups == []
    starter.stop()
