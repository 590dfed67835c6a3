"""Agents in pods: creates what starts the pods, looks at them, and deletes it.

    start ─▶ Job RUN (pods 0…n-1) ─▶ Secret RUN-tickets, which the Job owns       the pods wait for the Secret
    poll  ─▶ list pods, every two seconds at most; one that has failed is replaced by the Job
    stop  ─▶ delete Job RUN, and in the background its pods and its Secret; waits until no pod is left

The Job comes first, so that there is no moment at which a Secret has no owner: were the launcher killed in between, the
pods would wait for their tickets until `deadline_s`. Where the launcher is a pod, it owns the Job.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.engines.on_kubernetes.api import KubernetesApi, KubernetesRefusal
from polytempo.engines.on_kubernetes.forms import workload
from polytempo.engines.on_kubernetes.kubernetes_options import KubernetesOptions
from polytempo.engines.on_kubernetes.pods import Manifest, owner_reference, selector, ticket_secret
from polytempo.engines.on_kubernetes.status import describe, ended_for_good, finished, latest, phase
from polytempo.engines.remote.starter import StartedAgent
from polytempo.engines.remote.ticket import AgentTicket

_LOOK_S = 2.0
_PAUSE_S = 0.2
_POLITE_S = 5.0
_SPARE_S = 10.0


@dataclass(eq=False)
class PodAgent(StartedAgent):
    """An agent in a pod with a number, whichever pod that is at the moment."""

    index: int = -1
    """-1: the pod that takes a lost one's place, whichever that is."""


class KubernetesStarter:
    """See `AgentStarter`. `launcher`: an owner reference to the launcher's own pod, where it is in one."""

    replaces = True

    def __init__(
        self, options: KubernetesOptions, api: KubernetesApi, launcher: Mapping[str, Any] | None = None
    ) -> None:
        self.name = f"polytempo-{secrets.token_hex(4)}"
        self._options, self._api, self._launcher = options, api, launcher
        self._created: list[Manifest] = []
        self._agents: list[PodAgent] = []
        self._look_at_s = 0.0

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> list[PodAgent]:
        """See `AgentStarter`. The first call creates all pods; later ones wait for those that replace lost ones."""
        if self._created:
            if over := self._finished():
                raise PolytempoError(f"no pod takes the place of a lost one: {over}")
            spares = [PodAgent(number, f"the next pod of {self.name}") for number in numbers]
            self._agents += spares
            return spares
        try:
            self._create(len(numbers), [ticket.numbered(number).to_json() for number in numbers])
        except BaseException:
            with suppress(KubernetesRefusal):  # the first one says more
                self._delete()
            raise
        self._agents = [PodAgent(number, f"pod {i} of {self.name}", index=i) for i, number in enumerate(numbers)]
        return list(self._agents)

    def poll(self) -> None:
        """See `AgentStarter`. Where the API does not answer, nothing changes: agents say themselves that they live."""
        now_s = time.monotonic()
        if now_s < self._look_at_s or not self._created:
            return
        self._look_at_s = now_s + _LOOK_S
        with suppress(KubernetesRefusal):
            pods = self._api.pods(selector(self.name))
            for agent in self._agents:
                if (pod := latest(pods, agent.index)) is not None:
                    agent.where = describe(pod)
                    agent.ended = ended_for_good(pod, self._options.restarts)
            spares = [agent for agent in self._agents if agent.index < 0 and agent.ended is None]
            if spares and (over := self._finished()):
                for agent in spares:
                    agent.ended = f"does not come: {over}"

    def stop(self) -> None:
        """See `AgentStarter`. KubernetesRefusal where the API does not delete what was created; it names that."""
        if self._created:
            self._wait(_POLITE_S, ("Running",))  # agents that were told to leave need no SIGTERM
            self._delete()
            self._wait(self._options.grace_s + _SPARE_S, ("Running", "Pending", "Unknown"))

    def _delete(self) -> None:
        """Delete what was created, as far as the API does that; KubernetesRefusal names what is left."""
        created, self._created = self._created, []
        refused: KubernetesRefusal | None = None
        for manifest in reversed(created):
            try:
                self._api.delete(manifest["kind"], manifest["metadata"]["name"])
            except KubernetesRefusal as refusal:
                refused = refusal
        if refused is not None:
            raise refused

    def _create(self, pods: int, tickets: Sequence[str]) -> None:
        for manifest in workload(self._options, self.name, pods, self._launcher):
            self._created.append(manifest)  # before it is there: were this interrupted, `stop` would delete it
            self._created[-1] = {**manifest, **self._api.create(manifest)}
        owner = owner_reference(self._created[-1])
        self._api.create(ticket_secret(self._options, self.name, tickets, owner))
        for manifest in self._created[:-1]:
            self._api.own(manifest, owner)

    def _finished(self) -> str | None:
        """How what starts the pods has ended, or that it is gone."""
        main = self._created[-1]
        kind, name = main["kind"], main["metadata"]["name"]
        found = self._api.read(kind, name)
        return f"{kind} {name} was deleted" if found is None else finished({**found, "kind": kind})

    def _wait(self, most_s: float, phases: Sequence[str]) -> None:
        """Wait until no pod is in one of these phases, at most so long."""
        until_s = time.monotonic() + most_s
        while time.monotonic() < until_s:
            with suppress(KubernetesRefusal):
                if not any(phase(pod) in phases for pod in self._api.pods(selector(self.name))):
                    break
            time.sleep(_PAUSE_S)
