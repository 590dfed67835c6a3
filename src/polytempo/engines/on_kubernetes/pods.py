"""The pod that an agent runs in, as a plain dict: not root, nothing writable but /tmp and /dev/shm.

Secret NAME-ticket ── mounted, mode 0400 ──▶ /run/polytempo/ticket.json ── standard input ──▶ python -m polytempo.agent
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from polytempo.core.system.notice import PREEMPTED
from polytempo.engines.on_kubernetes.kubernetes_options import TICKET_FOLDER, WRITABLE, KubernetesOptions
from polytempo.engines.remote.messages import ECHO

Manifest = dict[str, Any]

_TERMINATED = 143
IGNORED = (PREEMPTED, _TERMINATED)
"""The exit codes of processes that SIGTERM has ended, which eviction, preemption and a node's shutdown send: 75 after
saving, 143 without. In ascending order, as Kubernetes wants them."""

_OWN_LABELS = {"app.kubernetes.io/name": "polytempo", "app.kubernetes.io/managed-by": "polytempo"}
_READ_BY_OWNER = 0o400
_MOST_SECRET_BYTES = 1 << 20


def labels(options: KubernetesOptions, name: str) -> dict[str, str]:
    """The metadata of each object of the run `name`; `selector` finds them."""
    return {**options.labels, **_OWN_LABELS, "app.kubernetes.io/instance": name}


def selector(name: str) -> str:
    """Finds the pods of the run `name`, whichever object has started them."""
    return f"app.kubernetes.io/name=polytempo,app.kubernetes.io/instance={name}"


def metadata(options: KubernetesOptions, name: str, instance: str, owner: Mapping[str, Any] | None = None) -> Manifest:
    """True for an object that belongs to the run `instance`. It is removed together with its `owner`."""
    found: Manifest = {"name": name, "labels": labels(options, instance)}
    if options.namespace is not None:
        found["namespace"] = options.namespace
    if options.annotations:
        found["annotations"] = dict(options.annotations)
    if owner is not None:
        found["ownerReferences"] = [dict(owner)]
    return found


def owner_reference(owner: Mapping[str, Any]) -> Manifest:
    """The reference that makes Kubernetes remove an object together with `owner`, as the API has answered it."""
    meta = owner["metadata"]
    named = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"]}
    return {**named, "controller": False, "blockOwnerDeletion": False}


def secret_name(name: str) -> str:
    """The Secret that holds the tickets of the run `name`."""
    return f"{name}-tickets"


def agent_template(options: KubernetesOptions, name: str, container: str = "agent") -> Manifest:
    """The template of a pod with one agent, which reads the ticket of its pod's number from the run's Secret.

    A Secret's files belong to root; `fsGroup` lets the pod's own group read them (0440), and no other one.
    """
    agent = [options.python, "-P", "-m", "polytempo.agent", f"{TICKET_FOLDER}/$(JOB_COMPLETION_INDEX).json"]
    tickets = {"secretName": secret_name(name), "defaultMode": _READ_BY_OWNER}
    return pod_template(options, name, container, agent, {TICKET_FOLDER: {"secret": tickets}})


def pod_template(
    options: KubernetesOptions, name: str, container: str, command: list[str], mounts: Mapping[str, Any]
) -> Manifest:
    """The template of a pod that runs `command`. `mounts`: further volume sources."""
    volumes, mounted = _volumes(options, mounts)
    contained: Manifest = {
        "name": container,
        "image": options.image,
        "command": command,
        "env": _environment(options),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounted,
    }
    if resources := _resources(options):
        contained["resources"] = {"requests": resources, "limits": dict(resources)}
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        "automountServiceAccountToken": options.service_account is not None,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [contained],
        "volumes": volumes,
    }
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        spec["tolerations"] = [dict(each) for each in options.tolerations]
    if options.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in options.image_pull_secrets]
    meta: Manifest = {"labels": labels(options, name)}
    if options.annotations:
        meta["annotations"] = dict(options.annotations)
    return {"metadata": meta, "spec": spec}


def _resources(options: KubernetesOptions) -> dict[str, str]:
    found = {key: str(value) for key, value in options.resources.items()}
    return {**found, "nvidia.com/gpu": str(options.gpus)} if options.gpus else found


def _environment(options: KubernetesOptions) -> list[Manifest]:
    """The variables. The pod can write to HOME and TMPDIR; `kubectl logs` shows the output of its processes."""
    given = {"HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", ECHO: "1"} | dict(options.env)  # noqa: S108
    plain: list[Manifest] = [
        {"name": name, "value": value} for name, value in given.items() if name not in options.secrets
    ]
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    return [*plain, *own, *(_from_secret(name, place) for name, place in options.secrets.items())]


def _from_secret(name: str, place: str) -> Manifest:
    secret, _, key = place.partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _volumes(options: KubernetesOptions, mounts: Mapping[str, Any]) -> tuple[list[Manifest], list[Manifest]]:
    """The pod's volumes, and where its container has them."""
    memory: Manifest = {"medium": "Memory"}
    if options.shared_memory is not None:
        memory["sizeLimit"] = options.shared_memory
    emptied = {"/tmp": {}, "/dev/shm": memory}  # noqa: S108 - folders of the pod
    volumes: list[Manifest] = [{"name": name, "emptyDir": emptied[path]} for path, name in WRITABLE.items()]
    mounted: list[Manifest] = [{"name": name, "mountPath": path} for path, name in WRITABLE.items()]
    for number, (path, source) in enumerate(mounts.items()):
        volumes.append({"name": f"given-{number}", **source})
        mounted.append({"name": f"given-{number}", "mountPath": path, "readOnly": True})
    for number, (path, source) in enumerate(options.volumes.items()):
        claimed = {"persistentVolumeClaim": {"claimName": source}} if isinstance(source, str) else dict(source)
        volumes.append({"name": f"volume-{number}", **claimed})
        mounted.append({"name": f"volume-{number}", "mountPath": path})
    return volumes, mounted


def ticket_secret(options: KubernetesOptions, name: str, tickets: Sequence[str], owner: Mapping[str, Any]) -> Manifest:
    """The Secret of the run `name`, with a ticket for each pod. `owner`: an owner reference; it ends with its owner.

    ValueError where there are too many for one Secret, which holds 1 MiB.
    """
    data = {f"{number}.json": base64.b64encode(ticket.encode()).decode() for number, ticket in enumerate(tickets)}
    if sum(map(len, data.values())) > _MOST_SECRET_BYTES:
        raise ValueError(
            f"{len(tickets)} pods need a Secret of more than 1 MiB; give fewer pods with more workers each"
        )
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(options, secret_name(name), name, owner),
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }
