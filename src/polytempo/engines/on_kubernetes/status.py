"""What the API says about pods, and about what starts them, in words and decisions; without asking it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polytempo.engines.on_kubernetes.pods import IGNORED, Manifest

INDEX = "batch.kubernetes.io/job-completion-index"
"""The annotation of a pod that says its number."""
FAILURES = "batch.kubernetes.io/job-index-failure-count"
"""The annotation of a pod that says how often pods of its number had failed before."""

_FINISHED = ("Failed", "FailureTarget", "Complete", "Completed")


def index_of(pod: Manifest) -> int:
    """The pod's number; -1 where it has none."""
    return int(_annotations(pod).get(INDEX, -1))


def latest(pods: Sequence[Manifest], index: int) -> Manifest | None:
    """The newest pod with this number; the one that is not ending, where there is one."""
    mine = [pod for pod in pods if index_of(pod) == index]
    return max(mine, key=lambda pod: (_goes_on(pod), pod["metadata"].get("creationTimestamp", "")), default=None)


def phase(pod: Manifest) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def describe(pod: Manifest) -> str:
    """Where the pod is, and what holds it up or has ended it: "pod run-0-x7 on node n1 (OOMKilled, exit code 137)"."""
    node = pod.get("spec", {}).get("nodeName")
    where = f"pod {pod['metadata']['name']}" + (f" on node {node}" if node else "")
    found = _trouble(pod)
    return f"{where} ({found})" if found else where


def ended_for_good(pod: Manifest, restarts: int) -> str | None:
    """How the newest pod with a number has ended, if it is not replaced; None while it runs, or is to be replaced.

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
    """How a Job, JobSet or TrainJob has ended, in words; None while it goes on."""
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
    """Whether the pod's end does not count: see `engines.on_kubernetes.forms`."""
    disrupted = _conditions(pod).get("DisruptionTarget", {}).get("status") == "True"
    return disrupted or _terminated(pod).get("exitCode") in IGNORED


def _states(pod: Manifest) -> list[dict[str, Any]]:
    return [each.get("state") or {} for each in pod.get("status", {}).get("containerStatuses") or []]


def _terminated(pod: Manifest) -> dict[str, Any]:
    return next((state["terminated"] for state in _states(pod) if state.get("terminated")), {})


def _trouble(pod: Manifest) -> str:
    """Why the pod does not run: how its container ended, what it waits for, why it has no node."""
    if ended := _terminated(pod):
        return f"{ended.get('reason', 'ended')}, exit code {ended.get('exitCode')}"
    waits = [state["waiting"] for state in _states(pod) if state.get("waiting")]
    scheduled = _conditions(pod).get("PodScheduled", {})
    if not waits and scheduled.get("status") == "False":
        waits = [scheduled]
    for each in waits:
        return ": ".join(str(each[key]) for key in ("reason", "message") if each.get(key))
    return "" if phase(pod) == "Running" else phase(pod).lower()
