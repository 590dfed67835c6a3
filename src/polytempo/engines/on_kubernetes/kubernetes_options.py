"""The options of a run's pods on Kubernetes, and the checks of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Form = Literal["job", "jobset", "trainer"]
"""The kind of object that starts the pods: a Job of Kubernetes, a JobSet, or a TrainJob of the Kubeflow Trainer."""

TICKET_FOLDER = "/run/polytempo"
WRITABLE = {"/tmp": "temporary", "/dev/shm": "shared-memory"}  # noqa: S108 - folders of the pod
TAKEN = (*WRITABLE, TICKET_FOLDER)
"""Paths of the volumes that each pod has already."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The pods of a run: their image, resources, environment and time limits."""

    image: str
    """Has this version of Polytempo, and the job's file where the launcher has it."""
    namespace: str | None = None
    """None: the launcher's own namespace in a pod, or the namespace of the kubeconfig's context."""
    form: Form = "job"
    pods: int | None = None
    """The number of pods; they share the run's processes evenly. None: one for each worker."""
    resources: Mapping[str, str | int] = field(default_factory=dict)
    """The request of each pod, which is also its limit: {"cpu": 4, "memory": "8Gi"}."""
    gpus: int = 0
    """The number of "nvidia.com/gpu" for each pod; others are written into `resources`."""
    volumes: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    """Mounts by path: the name of a PersistentVolumeClaim, or a volume source: {"/data": {"nfs": {…}}}."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment; all users that may look at the pods can read them."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variables from Secrets of the namespace: {"AWS_SECRET_ACCESS_KEY": "storage/key"} takes `key` of `storage`."""
    tolerations: Sequence[Mapping[str, Any]] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    """The account of the workers' pods, with its token. None: no token is mounted; the workers do not call the API."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of all objects and pods: {"kueue.x-k8s.io/queue-name": "research"}."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    image_pull_secrets: Sequence[str] = ()
    python: str = "python"
    """The interpreter in the image."""
    user: int = 1000
    """The numbers of user and group that everything runs as; not root."""
    shared_memory: str | None = None
    """The most that /dev/shm may hold: "2Gi". It counts as memory. None: the pod's memory allows it."""
    restarts: int = 3
    """Each pod is replaced so often after a failure. Preemption does not count."""
    deadline_s: int | None = None
    """Kubernetes ends the pods after so long, even if they are at work. None: never."""
    ttl_s: int = 300
    """Kubernetes removes ended objects after so long, if the launcher could not."""
    grace_s: int = 30
    """A pod has so long between SIGTERM and SIGKILL."""

    def __post_init__(self) -> None:
        """Refuse options that Kubernetes would refuse later, or take in another sense."""
        if not self.image.strip():
            raise ValueError('kubernetes needs the image of the pods: image="registry.example.org/polytempo:0.1"')
        if self.form not in get_args(Form):
            raise ValueError(f"form={self.form!r} is none of {', '.join(get_args(Form))}; give one of these")
        at_least = {"pods": 1, "gpus": 0, "user": 1, "restarts": 0, "deadline_s": 1, "ttl_s": 0, "grace_s": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                root = "; the pods do not run as root" if name == "user" else ""
                raise ValueError(f"{name}={value!r} must be a whole number, at least {least}{root}")
        if self.gpus and "nvidia.com/gpu" in self.resources:
            raise ValueError("gpus and resources['nvidia.com/gpu'] say the same; give one of them")
        _check_names(self)
        _check_volumes(self.volumes)
        _check_environment(self)


def _check_names(options: KubernetesOptions) -> None:
    names = {"namespace": options.namespace, "service_account": options.service_account}
    names |= {f"image_pull_secrets[{i}]": each for i, each in enumerate(options.image_pull_secrets)}
    for what, name in names.items():
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError(f"{what}={name!r} is not a name of an object: lower-case letters, digits, '-' and '.'")
    for each in options.tolerations:
        if not isinstance(each, Mapping):
            raise ValueError(f'tolerations holds {each!r}; write {{"key": "gpu", "operator": "Exists"}}')


def _check_volumes(volumes: Mapping[str, str | Mapping[str, Any]]) -> None:
    for path, source in volumes.items():
        if not path.startswith("/") or ":" in path or path.rstrip("/") in ("", *TAKEN):
            raise ValueError(f"volumes: {path!r} is not an absolute path, or is one of {', '.join(('/', *TAKEN))}")
        if isinstance(source, str) and not _NAME.fullmatch(source):
            raise ValueError(f"volumes: {path}: {source!r} is not a name of a PersistentVolumeClaim")
        if not isinstance(source, str) and len(source) != 1:
            raise ValueError(
                f'volumes: {path}: {source!r} is not a volume source, such as {{"hostPath": {{"path": …}}}}'
            )


def _check_environment(options: KubernetesOptions) -> None:
    for name in (*options.env, *options.secrets):
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of a variable of the environment")
    if both := sorted(set(options.env) & set(options.secrets)):
        raise ValueError(f"env and secrets both give {', '.join(both)}")
    for name, place in options.secrets.items():
        secret, slash, key = place.partition("/")
        if not (slash and key and _NAME.fullmatch(secret)):
            raise ValueError(f"secrets: {name}: {place!r} must be written SECRET/KEY, as in 'storage/password'")
