"""An elastic run in actors of Ray: processes on the nodes that there are, as `horovodrun --min-np` has them on hosts.

nodes of the Ray cluster ── slots ──▶ ElasticRanks ── start, stop ──▶ RayLives ──▶ an actor for each process
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from polytempo.engines.engine import EngineProcess, Role
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.horovod.launcher.elastic_ranks import ElasticRanks
from polytempo.horovod.launcher.run_ranks import OutputRelay
from polytempo.horovod.launcher.settings import ElasticSettings, LaunchSettings

_LOOK_S = 1.0
"""The interval between questions to Ray about its nodes."""


class ActorNeeds(NamedTuple):
    """The resources that each process reserves, and the function that makes its actor."""

    make: Callable[[Mapping[str, str]], Any]
    """An actor, with options of Ray's; it has the method `live`."""
    cpus: float
    gpus: float


class NodeDiscovery:
    """The Ray nodes that are alive, by id, and how many processes each has room for."""

    def __init__(self, ray: Any, needs: ActorNeeds) -> None:
        self._ray, self._needs = ray, needs
        self._found: dict[str, int] = {}
        self._asked_s = float("-inf")

    def __call__(self) -> Mapping[str, int]:
        """Asks Ray at most once a second."""
        if time.monotonic() - self._asked_s > _LOOK_S:
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
            slots = {node["NodeID"]: self._slots(node["Resources"]) for node in nodes}
            self._found = {node: number for node, number in slots.items() if number > 0}
            self._asked_s = time.monotonic()
        return self._found

    def _slots(self, has: Mapping[str, float]) -> int:
        asked = {"CPU": self._needs.cpus, "GPU": self._needs.gpus}
        return int(min(has.get(name, 0.0) // amount for name, amount in asked.items() if amount))


class RayLives:
    """A `LifeStarter`: each process is an actor, which calls the function once and is ended then.

    `call`: the function with its arguments, as `RankActor.live` takes it. `values` has the results by life.
    """

    def __init__(self, ray: Any, needs: ActorNeeds, call: tuple[Any, ...], variables: Mapping[str, str]) -> None:
        self._ray, self._needs, self._call, self._variables = ray, needs, call, variables
        self._actors: dict[EngineProcess, Any] = {}
        self._answers: dict[Any, EngineProcess] = {}
        self.values: dict[int, Any] = {}

    def begin(self, name: str, slots: int) -> None:
        """Ray makes actors without preparation."""

    def is_open(self, name: str) -> bool:
        """Actors of nodes that are lost meanwhile end immediately."""
        return True

    def problem(self, name: str) -> Exception | None:
        """None; `poll` tells of actors that cannot be."""
        return None

    def start(self, name: str, role: Role, label: str, environment: Mapping[str, str]) -> EngineProcess:
        """Make an actor on the node `name`, and have it call the function."""
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
        actor = self._needs.make({"scheduling_strategy": strategy})
        process = EngineProcess(role, Path(os.devnull), host=name)
        self._actors[process] = actor
        self._answers[actor.live.remote({**self._variables, **environment}, *self._call)] = process
        return process

    def poll(self, wait_s: float) -> list[EngineProcess]:
        """Actors with a function that has returned, and lost actors. Without actors it waits, too: nodes may come."""
        if not self._answers:
            time.sleep(wait_s)
            return []
        waited = list(self._answers)
        ready, _ = self._ray.wait(waited, num_returns=1, timeout=wait_s)
        if ready:
            ready, _ = self._ray.wait(waited, num_returns=len(waited), timeout=0)
        return [self._ended(answer) for answer in ready]

    def _ended(self, answer: Any) -> EngineProcess:
        process = self._answers.pop(answer)
        life = process.role.life
        try:
            self.values[life] = self._ray.get(answer)
            process.exit_code, process.result = 0, json.dumps({"code": 0, "answer": str(life)}).encode()
        except Exception as error:  # of the function, or Ray's about the actor
            print(f"polytempo: process {life}: {error}", file=sys.stderr)
            process.exit_code = 1
        self._ray.kill(self._actors.pop(process))
        return process

    def stop(self, process: EngineProcess | None = None) -> None:
        """Kill its actor; `poll` finds it. None: all."""
        for each in list(self._actors) if process is None else [process]:
            if each in self._actors:
                self._ray.kill(self._actors[each])


def run_elastic_actors(
    ray: Any,
    needs: ActorNeeds,
    call: tuple[Any, ...],
    variables: Mapping[str, str],
    elastic: ElasticSettings,
    watch: Callable[[ElasticRanks], object] = lambda ranks: None,
) -> list[Any]:
    """The results of the last group's processes, by rank. Errors: `RanksFailed`, as `run_elastic_ranks`; ValueError
    where there was no group."""
    discover = NodeDiscovery(ray, needs)
    with ExitStack() as stack:
        nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        own = str(ray.util.get_node_ip_address())
        rendezvous = Rendezvous.held("127.0.0.1" if nodes == {own} else own)
        stack.callback(rendezvous.close)
        lives = RayLives(ray, needs, call, variables)
        stack.callback(lives.stop)
        ranks = ElasticRanks(lives, rendezvous, OutputRelay(), discover, LaunchSettings(), elastic)
        answers: Sequence[str | None] = ranks.conduct(watch)
        if ranks.view is None:
            raise ValueError("no process has called hvd.init(), and an elastic run answers the results of its group")
        return [None if answer is None else lives.values[int(answer)] for answer in answers]
