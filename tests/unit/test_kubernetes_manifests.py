"""The manifests that start a run's pods: literal tables, and laws for any options."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import yaml

from polytempo.engines.on_kubernetes.forms import workload
from polytempo.engines.on_kubernetes.kubernetes_engine import given_options, launcher, to_yaml
from polytempo.engines.on_kubernetes.kubernetes_options import KubernetesOptions
from polytempo.engines.on_kubernetes.pods import owner_reference, ticket_secret

SMALL = KubernetesOptions(image="i:1", namespace="n")
FULL = KubernetesOptions(
    image="i:1",
    namespace="n",
    resources={"cpu": 4, "memory": "8Gi"},
    gpus=2,
    volumes={"/data": "digits", "/scratch": {"hostPath": {"path": "/ssd"}}},
    env={"LEVEL": "2", "HOME": "/scratch"},
    secrets={"PASSWORD": "storage/password"},
    tolerations=[{"key": "gpu", "operator": "Exists"}],
    node_selector={"zone": "b"},
    service_account="trainer",
    labels={"team": "vision"},
    annotations={"why": "digits"},
    image_pull_secrets=["registry"],
    user=77,
    shared_memory="2Gi",
    restarts=5,
    deadline_s=3600,
    ttl_s=60,
    grace_s=90,
)
OWN = {
    "app.kubernetes.io/name": "polytempo",
    "app.kubernetes.io/managed-by": "polytempo",
    "app.kubernetes.io/instance": "run",
}


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The template of the pods, wherever the form keeps it."""
    spec = manifest["spec"]
    spec = spec["template"]["spec"] if manifest["kind"] == "TrainingRuntime" else spec
    spec = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
    found: dict[str, Any] = spec["template"]
    return found


def test_the_job_of_two_pods() -> None:
    (job,) = workload(SMALL, "run", 2)
    assert job == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "run", "labels": OWN, "namespace": "n"},
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimitPerIndex": 3,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "Ignore",
                        "onExitCodes": {"containerName": "agent", "operator": "In", "values": [75, 143]},
                    },
                ]
            },
            "podReplacementPolicy": "Failed",
            "template": {
                "metadata": {"labels": OWN},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 30,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 1000,
                        "runAsGroup": 1000,
                        "fsGroup": 1000,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [
                        {
                            "name": "agent",
                            "image": "i:1",
                            "command": [
                                "python",
                                "-P",
                                "-m",
                                "polytempo.agent",
                                "/run/polytempo/$(JOB_COMPLETION_INDEX).json",
                            ],
                            "env": [
                                {"name": "HOME", "value": "/tmp"},
                                {"name": "TMPDIR", "value": "/tmp"},
                                {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
                                {"name": "POLYTEMPO_ECHO_LOGS", "value": "1"},
                                {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                            ],
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "readOnlyRootFilesystem": True,
                                "capabilities": {"drop": ["ALL"]},
                            },
                            "volumeMounts": [
                                {"name": "temporary", "mountPath": "/tmp"},
                                {"name": "shared-memory", "mountPath": "/dev/shm"},
                                {"name": "given-0", "mountPath": "/run/polytempo", "readOnly": True},
                            ],
                        }
                    ],
                    "volumes": [
                        {"name": "temporary", "emptyDir": {}},
                        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
                        {"name": "given-0", "secret": {"secretName": "run-tickets", "defaultMode": 0o400}},
                    ],
                },
            },
            "ttlSecondsAfterFinished": 300,
        },
    }


def test_every_option_reaches_the_pod() -> None:
    (job,) = workload(FULL, "run", 4)
    pod = pod_of(job)["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "2"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert pod["volumes"][1:] == [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
        {"name": "given-0", "secret": {"secretName": "run-tickets", "defaultMode": 0o400}},
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "digits"}},
        {"name": "volume-1", "hostPath": {"path": "/ssd"}},
    ]
    assert container["volumeMounts"][3:] == [
        {"name": "volume-0", "mountPath": "/data"},
        {"name": "volume-1", "mountPath": "/scratch"},
    ]
    variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    assert variables["LEVEL"] == "2"
    assert variables["HOME"] == "/scratch"
    assert variables["PASSWORD"] == {"secretKeyRef": {"name": "storage", "key": "password"}}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["nodeSelector"] == {"zone": "b"}
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("trainer", True)
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert {pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {77}
    assert pod["terminationGracePeriodSeconds"] == 90
    spec = job["spec"]
    found = (spec["backoffLimitPerIndex"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"])
    assert found == (5, 3600, 60)
    for meta in (job["metadata"], pod_of(job)["metadata"]):
        assert meta["labels"] == {"team": "vision", **OWN}
        assert meta["annotations"] == {"why": "digits"}


def test_the_jobset_holds_the_same_job() -> None:
    options = KubernetesOptions(image="i:1", namespace="n", form="jobset", deadline_s=9)
    (jobset,) = workload(options, "run", 2)
    spec = jobset.pop("spec")
    (inner,) = spec.pop("replicatedJobs")
    assert jobset == {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "run", "labels": OWN, "namespace": "n"},
    }
    assert spec == {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": 300,
    }
    (job,) = workload(KubernetesOptions(image="i:1", namespace="n", deadline_s=9), "run", 2)
    del job["spec"]["ttlSecondsAfterFinished"]
    assert inner == {"name": "agents", "replicas": 1, "template": {"spec": job["spec"]}}


def test_the_train_job_refers_to_a_runtime_of_its_own() -> None:
    options = KubernetesOptions(image="i:1", namespace="n", form="trainer", deadline_s=9)
    runtime, train_job = workload(options, "run", 2)
    assert train_job == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "run", "labels": OWN, "namespace": "n"},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "run"},
            "trainer": {"numNodes": 2},
            "activeDeadlineSeconds": 9,
        },
    }
    assert (runtime["kind"], runtime["spec"]["mlPolicy"]) == ("TrainingRuntime", {"numNodes": 2})
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert pod_of(runtime)["spec"]["containers"][0]["name"] == "node"
    rules = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[1]["onExitCodes"]["containerName"] == "node"


def test_the_secret_ends_with_its_owner() -> None:
    answered = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run", "uid": "u-1"}, "spec": {}}
    secret = ticket_secret(SMALL, "run", ['{"key": "k"}', "{}"], owner_reference(answered))
    tickets = {name: base64.b64decode(text) for name, text in secret["data"].items()}
    assert tickets == {"0.json": b'{"key": "k"}', "1.json": b"{}"}
    with pytest.raises(ValueError, match="3000 pods need a Secret of more than 1 MiB"):
        ticket_secret(SMALL, "run", ["x" * 300] * 3000, owner_reference(answered))
    assert secret["metadata"] == {
        "name": "run-tickets",
        "labels": OWN,
        "namespace": "n",
        "ownerReferences": [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": "run",
                "uid": "u-1",
                "controller": False,
                "blockOwnerDeletion": False,
            }
        ],
    }


@pytest.mark.parametrize("form", ["job", "jobset", "trainer"])
def test_the_launcher_may_do_no_more_than_it_does(form: Any) -> None:
    options = KubernetesOptions(image="i:1", namespace="n", form=form, gpus=1, resources={"cpu": 4})
    account, role, binding, config, job = launcher(options, "run", ["train", "digits"], "/tmp", {"cpu": 1})
    plurals = {"job": ["jobs"], "jobset": ["jobsets"], "trainer": ["trainingruntimes", "trainjobs"]}[form]
    assert [rule["resources"] for rule in role["rules"]] == [plurals, ["secrets"], ["pods"]]
    assert role["rules"][1]["verbs"] == ["create", "delete"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "run", "namespace": "n"}]
    assert account["metadata"]["name"] == binding["roleRef"]["name"] == role["metadata"]["name"] == "run"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == [
        *["python", "-m", "polytempo", "train", "digits"],
        *["--engine", "kubernetes:/etc/polytempo/engine.json"],
    ]
    assert container["resources"]["limits"] == {"cpu": "1"}, "the launcher needs no GPU"
    assert container["workingDir"] == "/tmp"
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("run", True)
    assert KubernetesOptions(**json.loads(config["data"]["engine.json"])) == options
    assert job["spec"]["backoffLimit"] == 0


def test_a_given_account_is_used_as_it_is() -> None:
    found = launcher(SMALL, "run", ["train", "digits"], "/tmp", {}, "mine")
    assert [each["kind"] for each in found] == ["ConfigMap", "Job"]
    assert found[1]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_the_yaml_reads_back() -> None:
    found = launcher(FULL, "run", ["train", "digits"], "/data", {"cpu": 1})
    assert list(yaml.safe_load_all(to_yaml(found))) == found
    assert "&id" not in to_yaml(found), "no aliases: people read and edit this"
    assert given_options(SMALL) == {"image": "i:1", "namespace": "n"}


WRONG = [
    ({"image": " "}, "image of the pods"),
    ({"form": "pod"}, "job, jobset, trainer"),
    ({"pods": 0}, "pods=0 must be a whole number, at least 1"),
    ({"gpus": -1}, "gpus=-1"),
    ({"gpus": True}, "gpus=True"),
    ({"user": 0}, "not run as root"),
    ({"gpus": 1, "resources": {"nvidia.com/gpu": 1}}, "say the same"),
    ({"namespace": "A b"}, "not a name of an object"),
    ({"volumes": {"data": "digits"}}, "not an absolute path"),
    ({"volumes": {"/tmp/": "digits"}}, "one of /, /tmp"),
    ({"volumes": {"/data": {}}}, "not a volume source"),
    ({"env": {"A-B": "1"}}, "not a name of a variable"),
    ({"env": {"A": "1"}, "secrets": {"A": "s/k"}}, "both give A"),
    ({"secrets": {"A": "password"}}, "SECRET/KEY"),
    ({"tolerations": ["gpu"]}, "tolerations holds 'gpu'"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_mistakes_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KubernetesOptions(**({"image": "i:1"} | given))
