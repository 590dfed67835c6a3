"""Agents in pods: the starter creates an object that starts the pods, looks at them, and deletes it.

    start ─▶ Job RUN (pods 0…n-1) ─▶ Secret RUN-tickets, which the Job owns       the pods wait for the Secret
    poll  ─▶ list pods, every two seconds at most; one that has failed is replaced by the Job
    stop  ─▶ delete Job RUN, and in the background its pods and its Secret; waits until no pod is left

The Job comes first, so that a Secret always has an owner: if the launcher is killed in between, the pods wait for their
tickets until `deadline_s`. Where the launcher is a pod, it owns the Job.
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
from polytempo.engines.on_kubernetes.pods import IGNORED, Manifest, owner_reference, selector, ticket_secret
from polytempo.engines.remote.ticket import AgentTicket, StartedAgent

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
        """See `AgentStarter`. The first call creates all pods; later calls wait for replacements of lost pods."""
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
        """See `AgentStarter`. KubernetesRefusal, with the name of the object, if the API does not delete it."""
        if self._created:
            self._wait(_POLITE_S, ("Running",))  # agents that were told to leave need no SIGTERM
            self._delete()
            self._wait(self._options.grace_s + _SPARE_S, ("Running", "Pending", "Unknown"))

    def _delete(self) -> None:
        """Delete the created objects, as far as the API does that; KubernetesRefusal names the others."""
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
        """The end, or the deletion, of the object that starts the pods, in words; None while it goes on."""
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


INDEX = "batch.kubernetes.io/job-completion-index"
"""The annotation of a pod that says its number."""
FAILURES = "batch.kubernetes.io/job-index-failure-count"
"""The annotation of a pod that says how often pods of its number had failed before."""

_FINISHED = ("Failed", "FailureTarget", "Complete", "Completed")


def index_of(pod: Manifest) -> int:
    """The pod's number; -1 where it has none."""
    return int(_annotations(pod).get(INDEX, -1))


def latest(pods: Sequence[Manifest], index: int) -> Manifest | None:
    """The newest pod with this number; a pod that is not ending comes first."""
    mine = [pod for pod in pods if index_of(pod) == index]
    return max(mine, key=lambda pod: (_goes_on(pod), pod["metadata"].get("creationTimestamp", "")), default=None)


def phase(pod: Manifest) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def describe(pod: Manifest) -> str:
    """The pod's node, and the reason for its delay or end: "pod run-0-x7 on node n1 (OOMKilled, exit code 137)"."""
    node = pod.get("spec", {}).get("nodeName")
    where = f"pod {pod['metadata']['name']}" + (f" on node {node}" if node else "")
    found = _trouble(pod)
    return f"{where} ({found})" if found else where


def ended_for_good(pod: Manifest, restarts: int) -> str | None:
    """The end of the newest pod with a number, if it is not replaced; None while it runs, or is to be replaced.

    A pod that has failed is replaced `restarts` times; failures that the policy ignores do not count.
    """
    if phase(pod) == "Succeeded":
        return "has completed"
    if phase(pod) != "Failed" or _ignored(pod):
        return None
    failures = int(_annotations(pod).get(FAILURES, 0)) + 1
    if failures <= restarts:
        return None
    return f"has failed {failures} times; see `kubectl logs {pod['metadata']['name']}`"


def finished(workload: Manifest) -> str | None:
    """The end of a Job, JobSet or TrainJob, in words; None while it goes on."""
    for condition in workload.get("status", {}).get("conditions") or []:
        if condition.get("type") in _FINISHED and condition.get("status") == "True":
            said = condition.get("message") or condition.get("reason") or condition["type"]
            return f"{workload['kind']} {workload['metadata']['name']} has ended: {said}"
    return None


def _annotations(pod: Manifest) -> dict[str, str]:
    return pod["metadata"].get("annotations") or {}


def _goes_on(pod: Manifest) -> bool:
    return phase(pod) not in ("Succeeded", "Failed") and "deletionTimestamp" not in pod["metadata"]


def _conditions(pod: Manifest) -> dict[str, dict[str, Any]]:
    return {each["type"]: each for each in pod.get("status", {}).get("conditions") or []}


def _ignored(pod: Manifest) -> bool:
    """True if the pod's end does not count: see `engines.on_kubernetes.forms`."""
    disrupted = _conditions(pod).get("DisruptionTarget", {}).get("status") == "True"
    return disrupted or _terminated(pod).get("exitCode") in IGNORED


def _states(pod: Manifest) -> list[dict[str, Any]]:
    return [each.get("state") or {} for each in pod.get("status", {}).get("containerStatuses") or []]


def _terminated(pod: Manifest) -> dict[str, Any]:
    return next((state["terminated"] for state in _states(pod) if state.get("terminated")), {})


def _trouble(pod: Manifest) -> str:
    """The reason why the pod does not run: its container's end, a wait, or the lack of a node."""
    if ended := _terminated(pod):
        return f"{ended.get('reason', 'ended')}, exit code {ended.get('exitCode')}"
    waits = [state["waiting"] for state in _states(pod) if state.get("waiting")]
    scheduled = _conditions(pod).get("PodScheduled", {})
    if not waits and scheduled.get("status") == "False":
        waits = [scheduled]
    for each in waits:
        return ": ".join(str(each[key]) for key in ("reason", "message") if each.get(key))
    return "" if phase(pod) == "Running" else phase(pod).lower()
