"""The objects that start a run's pods, as plain dicts: a Job, a JobSet, or a TrainJob with its runtime.

    Job                                     JobSet                              TrainJob ──▶ TrainingRuntime
      completionMode: Indexed                 replicatedJobs: [agents]            numNodes      replicatedJobs: [node]
      completions = parallelism = pods          a Job's spec                                      a Job's spec

All forms share one Job's spec, so they agree on restarts, preemption, deadlines and accounts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from polytempo.engines.on_kubernetes.kubernetes_options import KubernetesOptions
from polytempo.engines.on_kubernetes.pods import IGNORED, Manifest, agent_template, metadata

TRAINER = "trainer.kubeflow.org"


class Resource(NamedTuple):
    """The API's place for objects of a kind. The core group is ""."""

    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """The form as manifests write it."""
        return f"{self.group}/{self.version}" if self.group else self.version


RESOURCES = {
    "Job": Resource("batch", "v1", "jobs"),
    "JobSet": Resource("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "TrainJob": Resource(TRAINER, "v1alpha1", "trainjobs"),
    "TrainingRuntime": Resource(TRAINER, "v1alpha1", "trainingruntimes"),
    "Secret": Resource("", "v1", "secrets"),
}


def workload(
    options: KubernetesOptions, name: str, pods: int, owner: Mapping[str, Any] | None = None
) -> list[Manifest]:
    """The objects that start `pods` pods, in the order of creation. The last one owns the Secret; its end is the pods'
    end.

    `owner`: an owner reference to the launcher's pod, where it runs in one; all is removed with it.
    """
    if options.form == "job":
        return [_object("Job", options, name, owner, _job_spec(options, name, pods))]
    if options.form == "jobset":
        return [_object("JobSet", options, name, owner, _jobset_spec(options, name, pods))]
    runtime = {"mlPolicy": {"numNodes": pods}, "template": {"spec": _jobset_spec(options, name, pods)}}
    return [
        _object("TrainingRuntime", options, name, owner, runtime),
        _object("TrainJob", options, name, owner, _train_job_spec(options, name, pods)),
    ]


def _object(
    kind: str, options: KubernetesOptions, name: str, owner: Mapping[str, Any] | None, spec: Manifest
) -> Manifest:
    found = {"apiVersion": RESOURCES[kind].api_version, "kind": kind}
    return {**found, "metadata": metadata(options, name, name, owner), "spec": spec}


def _job_spec(options: KubernetesOptions, name: str, pods: int) -> Manifest:
    """A Job with numbered pods, `JOB_COMPLETION_INDEX`. Each may fail `restarts` times, whether others fail or not.

    An end through no fault of the pod does not count: a disruption that the control plane knows (preemption, eviction,
    a drained node), and SIGTERM from elsewhere.
    """
    trainer = options.form == "trainer"
    container = "node" if trainer else "agent"
    ignored = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": container, "operator": "In", "values": [*IGNORED]},
        },
    ]
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimitPerIndex": options.restarts,
        "podFailurePolicy": {"rules": ignored},
        "podReplacementPolicy": "Failed",
        "template": agent_template(options, name, container),
    }
    if options.form == "job":
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    if options.deadline_s is not None and not trainer:
        spec["activeDeadlineSeconds"] = options.deadline_s
    return spec


def _jobset_spec(options: KubernetesOptions, name: str, pods: int) -> Manifest:
    """A JobSet of one Job. It is not restarted as a whole: its Job replaces single pods."""
    trainer = options.form == "trainer"
    template: Manifest = {"spec": _job_spec(options, name, pods)}
    if trainer:
        template = {"metadata": {"labels": {f"{TRAINER}/trainjob-ancestor-step": "trainer"}}, **template}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": options.ttl_s,
        "replicatedJobs": [{"name": "node" if trainer else "agents", "replicas": 1, "template": template}],
    }


def _train_job_spec(options: KubernetesOptions, name: str, pods: int) -> Manifest:
    """A TrainJob of the runtime of the same name."""
    spec: Manifest = {
        "runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": pods},
    }
    if options.deadline_s is not None:
        spec["activeDeadlineSeconds"] = options.deadline_s
    return spec
