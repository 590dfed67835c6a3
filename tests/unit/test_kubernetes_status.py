"""The API's facts about pods, in words and decisions: literal tables."""

from __future__ import annotations

from typing import Any

import pytest

from polytempo.engines.on_kubernetes.starter import describe, ended_for_good, finished, index_of, latest, phase


def pod(phase: str, number: int = 0, name: str = "run-0-x", **more: Any) -> dict[str, Any]:
    """A pod as the API answers it."""
    annotations = {"batch.kubernetes.io/job-completion-index": str(number)}
    annotations |= {"batch.kubernetes.io/job-index-failure-count": str(more.pop("failures", 0))}
    meta = {"name": name, "annotations": annotations, "creationTimestamp": more.pop("created", "2026-01-01T00:00:00Z")}
    if more.pop("leaves", False):
        meta["deletionTimestamp"] = "2026-01-01T00:00:09Z"
    return {"metadata": meta, "spec": {"nodeName": "n1"}, "status": {"phase": phase, **more}}


def ended(code: int, reason: str = "Error") -> list[dict[str, Any]]:
    return [{"state": {"terminated": {"exitCode": code, "reason": reason}}}]


def waiting(reason: str, message: str = "") -> list[dict[str, Any]]:
    return [{"state": {"waiting": {"reason": reason, "message": message}}}]


PREEMPTED = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]

DESCRIBED = [
    (pod("Running"), "pod run-0-x on node n1"),
    (pod("Pending"), "pod run-0-x on node n1 (pending)"),
    (pod("Failed", containerStatuses=ended(137, "OOMKilled")), "pod run-0-x on node n1 (OOMKilled, exit code 137)"),
    (
        pod("Pending", containerStatuses=waiting("ImagePullBackOff", "no such image")),
        "pod run-0-x on node n1 (ImagePullBackOff: no such image)",
    ),
    (pod("Pending", conditions=UNSCHEDULABLE), "pod run-0-x on node n1 (Unschedulable: 0/3 nodes)"),
    ({"metadata": {"name": "bare"}}, "pod bare (pending)"),
]


@pytest.mark.parametrize(("given", "text"), DESCRIBED, ids=[text for _, text in DESCRIBED])
def test_a_pod_is_described(given: dict[str, Any], text: str) -> None:
    assert describe(given) == text


ENDS = [
    (pod("Running"), None),
    (pod("Succeeded", containerStatuses=ended(0)), "has completed"),
    (pod("Failed", containerStatuses=ended(1)), None),
    (pod("Failed", failures=1, containerStatuses=ended(1)), None),
    (pod("Failed", failures=2, containerStatuses=ended(1)), "has failed 3 times; see `kubectl logs run-0-x`"),
    (pod("Failed", failures=2, containerStatuses=ended(143)), None),
    (pod("Failed", failures=2, containerStatuses=ended(75)), None),
    (pod("Failed", failures=2, containerStatuses=ended(137), conditions=PREEMPTED), None),
    ({"metadata": {"name": "bare"}}, None),
]


@pytest.mark.parametrize(("given", "how"), ENDS)
def test_a_pod_that_is_replaced_has_not_ended_for_good(given: dict[str, Any], how: str | None) -> None:
    """Two restarts: the third failure is the last one. Preemption never is."""
    assert ended_for_good(given, restarts=2) == how


def test_the_newest_pod_of_a_number_counts() -> None:
    old = pod("Failed", 1, "run-1-a", created="2026-01-01T00:00:00Z")
    new = pod("Running", 1, "run-1-b", created="2026-01-01T00:00:05Z")
    leaving = pod("Running", 1, "run-1-c", created="2026-01-01T00:00:07Z", leaves=True)
    other = pod("Running", 0, "run-0-a", created="2026-01-01T00:00:09Z")
    assert latest([leaving, new, other, old], 1) is new
    assert latest([old, leaving], 1) is leaving
    assert latest([old], 0) is None
    assert [phase(each) for each in (old, new, {"metadata": {"name": "bare"}})] == ["Failed", "Running", "Pending"]
    assert [index_of(each) for each in (old, other, {"metadata": {"name": "bare"}})] == [1, 0, -1]


FINISHED = [
    (None, None),
    ([], None),
    ([{"type": "Suspended", "status": "True"}], None),
    ([{"type": "Failed", "status": "False"}], None),
    (
        [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "ran too long"}],
        "Job run has ended: ran too long",
    ),
    ([{"type": "Completed", "status": "True", "reason": "AllJobsCompleted"}], "Job run has ended: AllJobsCompleted"),
    ([{"type": "Complete", "status": "True"}], "Job run has ended: Complete"),
]


@pytest.mark.parametrize(("conditions", "how"), FINISHED)
def test_a_workload_says_how_it_has_ended(conditions: Any, how: str | None) -> None:
    assert finished({"kind": "Job", "metadata": {"name": "run"}, "status": {"conditions": conditions}}) == how
