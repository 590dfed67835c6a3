"""A launcher that is a pod itself, as manifests for `kubectl apply -f -`: it creates the workers, and removes them.

kubectl apply ─▶ ServiceAccount, Role, RoleBinding   may create Jobs and Secrets, and look at pods
                 ConfigMap                           the options of the workers' pods
                 Job NAME ─▶ pod: polytempo train … --engine kubernetes:/etc/polytempo/engine.json
                              └─ creates ─▶ Job NAME's workers and their Secret, which its own pod owns
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from polytempo.engines.extras import required
from polytempo.engines.on_kubernetes.forms import RESOURCES
from polytempo.engines.on_kubernetes.kubernetes_options import KubernetesOptions
from polytempo.engines.on_kubernetes.pods import Manifest, metadata, pod_template

OPTIONS_FOLDER = "/etc/polytempo"
OPTIONS_FILE = "engine.json"

_RBAC = "rbac.authorization.k8s.io"


def launcher(
    options: KubernetesOptions,
    name: str,
    arguments: Sequence[str],
    folder: str,
    resources: Mapping[str, str | int],
    service_account: str | None = None,
) -> list[Manifest]:
    """All objects of the run `name`, whose launcher runs `polytempo ARGUMENTS` in `folder` of its pod.

    `service_account`: one that exists and may do what `rules` lists. None: one is made, with a Role.
    """
    found = [] if service_account is not None else _account(options, name)
    own = replace(options, resources=resources, gpus=0, service_account=service_account or name)
    return [*found, _config_map(options, name), _job(own, name, arguments, folder)]


def rules(options: KubernetesOptions) -> list[Manifest]:
    """What the launcher must be allowed to do in its namespace. It cannot read Secrets, its own ones included."""
    verbs = ["create", "get", "delete", "patch"]
    kinds = {"job": ["Job"], "jobset": ["JobSet"], "trainer": ["TrainingRuntime", "TrainJob"]}[options.form]
    return [
        {"apiGroups": [RESOURCES[kinds[0]].group], "resources": [RESOURCES[k].plural for k in kinds], "verbs": verbs},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "delete"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
    ]


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """The manifests as documents of one YAML file. ImportError without the extra `kubernetes`."""
    text: str = required("yaml", "kubernetes").safe_dump_all(manifests, sort_keys=False, width=120)
    return text


def given_options(options: KubernetesOptions) -> dict[str, Any]:
    """What differs from the defaults, as JSON has it."""
    found: dict[str, Any] = {}
    for each in fields(KubernetesOptions):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        value = getattr(options, each.name)
        if value != default:
            found[each.name] = value
    return found


def _account(options: KubernetesOptions, name: str) -> list[Manifest]:
    account: Manifest = {"kind": "ServiceAccount", "name": name}
    if options.namespace is not None:
        account["namespace"] = options.namespace
    meta = metadata(options, name, name)
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": meta, "rules": rules(options)},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
            "subjects": [account],
        },
    ]


def _config_map(options: KubernetesOptions, name: str) -> Manifest:
    text = json.dumps(given_options(options), indent=1)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(options, name, name),
        "data": {OPTIONS_FILE: text},
    }


def _job(options: KubernetesOptions, name: str, arguments: Sequence[str], folder: str) -> Manifest:
    """The launcher's Job. It is not tried twice: a second launcher would begin the run anew."""
    engine = f"kubernetes:{OPTIONS_FOLDER}/{OPTIONS_FILE}"
    command = [options.python, "-m", "polytempo", *arguments, "--engine", engine]
    template = pod_template(options, name, "launcher", command, {OPTIONS_FOLDER: {"configMap": {"name": name}}})
    template["spec"]["containers"][0]["workingDir"] = folder
    spec: Manifest = {"backoffLimit": 0, "ttlSecondsAfterFinished": options.ttl_s, "template": template}
    if options.deadline_s is not None:
        spec["activeDeadlineSeconds"] = options.deadline_s
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(options, name, name), "spec": spec}
