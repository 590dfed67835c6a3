"""The Ray engine: each process of a run in an actor of its own, which a placement group reserves the resources for.

    driver (head of the run) ── placement group: a bundle for each agent ──▶ Ray
           └── actor.hold(ticket) ──▶ AgentActor on a Ray node ── child process ──▶ agent ──▶ process of the run

An agent is a child of its actor: it has the actor's CUDA_VISIBLE_DEVICES, working directory and environment, and ends
when Ray ends the actor. If an agent is lost, a new actor is placed: in the bundle of an actor that has ended, which Ray
moves to another node if its own is lost, otherwise in a new group.
"""

from __future__ import annotations

import math
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polytempo.engines.engine import Engine, Launch
from polytempo.engines.extras import required
from polytempo.engines.on_ray.actor import AgentActor
from polytempo.engines.remote.remote_engine import opened_remote
from polytempo.engines.remote.ticket import AgentTicket, StartedAgent
from polytempo.spec.topology import Topology

STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
_END_S = 15.0
"""Agents may take so long to end when asked: longer than `held_agent` waits before it ends one for certain."""


_JOIN_S = 120.0
"""Agents may take so long to join once they are placed: they load torch."""

_MOST_LETTERS = 300
_REACH_S = 10.0
_HOST_AND_PORT = re.compile(r"(?:ray://)?([^/@\s]+):(\d{1,5})")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Ray:
    """Processes in Ray's actors.

        pt.run(job, strategy, workers=4, engine=pt.engines.ray(num_gpus=1))

    Where this process has called `ray.init`, or runs inside a Ray job, that connection is used; otherwise `address`
    is connected to for the run ("auto": the cluster of this host, or of RAY_ADDRESS; "local": a new one on this host).

    Each actor reserves `num_cpus`, `num_gpus` and `resources` (any of Ray's by name, such as {"TPU": 1} or a
    custom one), placed by `strategy`: "SPREAD" over nodes as far as possible, "STRICT_SPREAD" each on another one,
    "PACK" on few, "STRICT_PACK" all on one. There is an actor for each process of the run: each worker, each copy of a
    shard, the evaluator. With `actors`, there are so many, and they share the processes.

    Errors: ValueError for impossible options; ImportError without Ray; PolytempoError where Ray cannot place all
    actors within `wait_s`.
    """

    address: str = "auto"
    resources: Mapping[str, float] = field(default_factory=dict)
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    strategy: str = "SPREAD"
    actors: int | None = None
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse options that Ray would refuse, in our words."""
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is none of Ray's; use one of {', '.join(STRATEGIES)}")
        if own := sorted({"CPU", "GPU", "memory"} & self.resources.keys()):
            raise ValueError(f"resources are Ray's custom ones, without {', '.join(own)}; give num_cpus=, num_gpus=")
        for name, amount in {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}.items():
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"{name}={amount!r} must be a number of at least 0")
        if self.actors is not None and self.actors < 1:
            raise ValueError(f"actors={self.actors} must be at least 1")
        if self.wait_s <= 0:
            raise ValueError(f"wait_s={self.wait_s} must be more than 0")
        if not self.bundle:
            raise ValueError("an actor reserves nothing, so Ray could place all on one node; give num_cpus=1, say")

    @classmethod
    def from_address(cls, address: str) -> Ray:
        """The engine of the command line's `ray` or `ray:ray://host:port`."""
        return cls(address or "auto")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one actor, as a placement group names them."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: float(amount) for name, amount in named.items() if amount}

    def num_actors(self, topology: Topology) -> int:
        """The number of actors of a run."""
        if self.actors is not None:
            return self.actors
        return topology.num_nodes  # the coordinator is not a process; the evaluator is

    @contextmanager
    def open(self, launch: Launch) -> Iterator[Engine]:
        """See `EngineSetup`."""
        if launch.spec is None:
            raise ValueError("a function cannot travel to a Ray actor; give engine=pt.engines.local()")
        with _connected(self.address) as ray:
            starter = RayStarter(ray, self)
            num_agents = self.num_actors(launch.spec.topology())
            address = ray.util.get_node_ip_address()
            slots = 1 if self.actors is None else None
            wait_s = self.wait_s + _JOIN_S  # the starter names first the actors without a place
            with opened_remote(launch, starter, num_agents, address=address, slots=slots, wait_s=wait_s) as engine:
                yield engine


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected; it is let go of afterwards if it was not connected before."""
    ray = required("ray", "ray")
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        reach(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster answers at address={address!r} ({error}); start one by `ray start --head`, give the "
            "address of one, or address='local' for one on this host"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has put one of its own in its place


def reach(address: str) -> None:
    """OSError where nothing answers at `host:port` or `ray://host:port`: `ray.init` would try that for ever."""
    if found := _HOST_AND_PORT.fullmatch(address):
        socket.create_connection((found[1].strip("[]"), int(found[2])), _REACH_S).close()


class _Place(NamedTuple):
    """A bundle of a placement group."""

    group: Any
    bundle: int


@dataclass(eq=False)
class _Actor:
    started: StartedAgent
    place: _Place
    handle: Any
    node: Any
    """The future id of its Ray node."""
    over: Any
    """The future word on how its agent ended."""
    until_s: float
    placed: bool = False


class RayStarter:
    """See `AgentStarter`."""

    replaces = True

    def __init__(self, ray: Any, setup: Ray) -> None:
        self._ray, self._setup = ray, setup
        self._class = ray.remote(AgentActor)
        self._actors: list[_Actor] = []
        self._groups: list[Any] = []
        self._free: list[_Place] = []
        """Bundles of agents that have ended."""

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> list[StartedAgent]:
        """See `AgentStarter`. It does not wait for Ray: an actor without a place ends after `wait_s`."""
        places, self._free = self._free[: len(numbers)], self._free[len(numbers) :]
        if missing := len(numbers) - len(places):
            group = self._ray.util.placement_group([self._setup.bundle] * missing, strategy=self._setup.strategy)
            self._groups.append(group)
            places += [_Place(group, index) for index in range(missing)]
        begun = [self._begin(number, place, ticket) for number, place in zip(numbers, places, strict=True)]
        self._actors += begun
        return [actor.started for actor in begun]

    def _begin(self, number: int, place: _Place, ticket: AgentTicket) -> _Actor:
        setup, scheduling = self._setup, self._ray.util.scheduling_strategies
        handle = self._class.options(
            num_cpus=setup.num_cpus,
            num_gpus=setup.num_gpus,
            resources=dict(setup.resources),
            max_restarts=0,  # a new one has a new number, and the run knows it
            max_concurrency=2,
            scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(place.group, place.bundle),
        ).remote()
        # The ticket is an argument of a method, which goes from this process to the actor's and no further; arguments
        # of the constructor, names and environments are kept by Ray's control service.
        over = handle.hold.remote(ticket.numbered(number).to_json())
        started = StartedAgent(number, "a Ray actor without a node yet")
        return _Actor(started, place, handle, handle.node.remote(), over, time.monotonic() + setup.wait_s)

    def poll(self) -> None:
        """See `AgentStarter`."""
        for actor in self._actors:
            if actor.started.ended is None:
                self._look(actor)

    def _look(self, actor: _Actor) -> None:
        if not actor.placed and self._is_there(actor.node):
            actor.placed = True
            if isinstance(node := self._said(actor.node), str):
                actor.started.where = f"Ray node {node[:8]}"
        if self._is_there(actor.over):
            said = self._said(actor.over)
            how = said if isinstance(said, str) else f"was lost by Ray ({reason(said)})"
            self._lose(actor, how)
        elif not actor.placed and time.monotonic() > actor.until_s:
            self._ray.kill(actor.handle)
            self._lose(actor, f"was not placed within {self._setup.wait_s:g} s: {self._shortage()}")

    def _lose(self, actor: _Actor, how: str) -> None:
        actor.started.ended = how
        self._ray.kill(actor.handle)
        self._free.append(actor.place)

    def _shortage(self) -> str:
        wanted = self._setup.bundle
        there = {name: self._ray.cluster_resources().get(name, 0.0) for name in wanted}
        free = {name: self._ray.available_resources().get(name, 0.0) for name in wanted}
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        return (
            f"each of {len(self._actors)} actors asks for {wanted} by strategy {self._setup.strategy}, and the {nodes} "
            f"nodes of the cluster have {there}, with {free} free; use fewer workers, ask for less, or wait "
            "longer (wait_s) for nodes that are to come"
        )

    def _is_there(self, future: Any) -> bool:
        return bool(self._ray.wait([future], timeout=0)[0])

    def _said(self, future: Any) -> object:
        """The value of a future that is there, or the error in its place."""
        try:
            return self._ray.get(future)
        except self._ray.exceptions.RayError as error:
            return error

    def stop(self) -> None:
        """See `AgentStarter`."""
        running = [actor for actor in self._actors if actor.started.ended is None]
        with suppress(self._ray.exceptions.RayError):
            if placed := [actor for actor in running if self._is_there(actor.node)]:
                asked = [actor.handle.end.remote() for actor in placed]
                futures = [*asked, *(actor.over for actor in placed)]
                self._ray.wait(futures, num_returns=len(futures), timeout=_END_S)
        for actor in running:
            self._lose(actor, "was ended")
        self._free.clear()
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._groups.clear()


def reason(error: object) -> str:
    """The first and the last line of Ray's text: the event, and its cause."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    told = dict.fromkeys([*lines[:1], *lines[-1:]])
    return "; ".join(line[:_MOST_LETTERS] for line in told) or type(error).__name__
