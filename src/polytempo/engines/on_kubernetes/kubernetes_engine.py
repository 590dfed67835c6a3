"""The Kubernetes engine: agents in pods of a Job, a JobSet or a TrainJob, which this process creates and deletes.

pt.run(job, strategy, workers=8, engine=pt.engines.kubernetes(image="registry.example.org/polytempo:0.1", gpus=1))
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from polytempo.engines.engine import Launch
from polytempo.engines.extras import required
from polytempo.engines.on_kubernetes.api import KubernetesApi
from polytempo.engines.on_kubernetes.forms import RESOURCES
from polytempo.engines.on_kubernetes.kubernetes_options import KubernetesOptions
from polytempo.engines.on_kubernetes.pods import Manifest, metadata, owner_reference, pod_template
from polytempo.engines.on_kubernetes.starter import KubernetesStarter
from polytempo.engines.remote.remote_engine import RemoteEngine, opened_remote

_MAX_FILE_BYTES = 100_000


@dataclass(frozen=True, kw_only=True)
class Kubernetes(KubernetesOptions):
    """Pods of a cluster, each with one agent; `KubernetesOptions` lists the choices.

    The launcher either runs in a pod itself (see `to_yaml`), or anywhere with a kubeconfig and an `address` that pods
    reach. It creates the Job and a Secret with the run's keys, and deletes both at the end, also after Ctrl-C. If it is
    killed, the agents end, then the Job ends, and Kubernetes removes it and the Secret after `ttl_s`.

    Errors: ImportError without the extra `kubernetes`; ValueError for options that Kubernetes would refuse, and where
    pods could not reach the launcher; PolytempoError where the API refuses a request, or pods are not there in time.
    """

    address: str | None = None
    """The launcher's address for pods. None: its pod's address."""
    context: str | None = None
    """The context of the kubeconfig. None: the current one, or in a pod the pod's own account."""
    wait_s: float = 600.0
    """Pods may take so long to start: nodes may have to be added, and images to be fetched."""

    @classmethod
    def from_address(cls, address: str) -> Kubernetes:
        """The engine of the command line's `kubernetes:FILE`; FILE has the options as JSON or TOML."""
        if not address:
            raise ValueError("name a file with the options: --engine kubernetes:pods.toml; it has at least image = …")
        return cls(**_read_options(Path(address)))

    @contextmanager
    def open(self, launch: Launch) -> Iterator[RemoteEngine]:
        """See `EngineSetup`."""
        api = KubernetesApi.connect(self.namespace, self.context)
        pod = api.own_pod()
        address = reachable(
            self.address, os.environ.get("POD_IP") if pod is None else pod.get("status", {}).get("podIP")
        )
        owner = None if pod is None else owner_reference({"apiVersion": "v1", "kind": "Pod", **pod})
        starter = KubernetesStarter(self, api, owner)
        with opened_remote(launch, starter, self.pods or launch.workers, address=address, wait_s=self.wait_s) as engine:
            yield engine

    def to_yaml(
        self,
        arguments: Sequence[str],
        *,
        name: str | None = None,
        folder: str = "/tmp",  # noqa: S108 - of the pod
        resources: Mapping[str, str | int] | None = None,
        launcher_account: str | None = None,
    ) -> str:
        """Manifests for `kubectl apply -f -`: a Job with a pod that runs `polytempo ARGUMENTS` on this engine.

            print(pt.engines.kubernetes(image="…").to_yaml(["train", "digits", "--workers", "4"]))

        `folder`: the launcher pod's folder for the run's folder; one of `volumes` keeps it. `resources`: the launcher's
        own (1 cpu, 2Gi). `launcher_account`: a service account with the rights that docs/kubernetes.md lists. None: the
        manifests make one, with its Role.
        """
        if any(word == "--engine" or word.startswith("--engine=") for word in arguments):
            raise ValueError("to_yaml names the engine itself; leave --engine out of the arguments")
        own: Mapping[str, str | int] = {"cpu": 1, "memory": "2Gi"} if resources is None else resources
        run = name or f"polytempo-{secrets.token_hex(4)}"
        return to_yaml(launcher(self, run, arguments, folder, own, launcher_account))


def reachable(given: str | None, pod_address: str | None) -> str:
    """The launcher's address for pods. ValueError where they cannot, or where it is not known."""
    address = given or pod_address
    if address is None:
        raise ValueError(
            "this process is in no pod that it may look at, so where pods reach it is not known; give address=, an "
            "address of this host that pods reach, or run the launcher in the cluster: "
            "pt.engines.kubernetes(…).to_yaml(…)"
        )
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        raise ValueError(
            f"address={address!r} is not an IP address; give an address of this host that pods reach"
        ) from None
    if loopback:
        raise ValueError(f"address={address} is this host's loopback: in a pod, it is the pod itself; give another one")
    return address


def _read_options(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{path}: a file of options has at most {_MAX_FILE_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: the options of engine kubernetes cannot be read ({error.strerror})") from None
    readers = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix not in readers:
        raise ValueError(f"{path}: options are read from {' and '.join(readers)} files; name the file so")
    try:
        found = readers[path.suffix](text)
    except ValueError as error:
        raise ValueError(f"{path}: this is not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(found, dict) or "image" not in found:
        raise ValueError(f"{path}: expected a table of options with at least image = …")
    known = [each.name for each in fields(Kubernetes)]
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"{path}: {', '.join(unknown)} is not an option; there are: {', '.join(known)}")
    return found


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
    """All objects of the run `name`, with a launcher that runs `polytempo ARGUMENTS` in `folder` of its pod.

    `service_account`: an existing account with the rights that `rules` lists. None: one is made, with a Role.
    """
    found = [] if service_account is not None else _account(options, name)
    own = replace(options, resources=resources, gpus=0, service_account=service_account or name)
    return [*found, _config_map(options, name), _job(own, name, arguments, folder)]


def rules(options: KubernetesOptions) -> list[Manifest]:
    """The launcher's rights in its namespace. It cannot read Secrets, its own ones included."""
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
    """The options that differ from the defaults, as JSON has them."""
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
    """The launcher's Job. It is not tried twice: a second launcher would begin the run again."""
    engine = f"kubernetes:{OPTIONS_FOLDER}/{OPTIONS_FILE}"
    command = [options.python, "-m", "polytempo", *arguments, "--engine", engine]
    template = pod_template(options, name, "launcher", command, {OPTIONS_FOLDER: {"configMap": {"name": name}}})
    template["spec"]["containers"][0]["workingDir"] = folder
    spec: Manifest = {"backoffLimit": 0, "ttlSecondsAfterFinished": options.ttl_s, "template": template}
    if options.deadline_s is not None:
        spec["activeDeadlineSeconds"] = options.deadline_s
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(options, name, name), "spec": spec}
