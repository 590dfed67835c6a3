"""A cluster in one process: an emulator of the API, and a kubelet with processes of this host as containers.

KubernetesEmulator (kmock)  stores objects, gives each a uid, marks missing ones as 404
Kubelet (a thread)          a Job ─▶ pods with numbers ─▶ processes, once their Secret is there;
                            a failed pod ─▶ another one, as its policy says; a deleted Job ─▶ SIGTERM, SIGKILL
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp.web import json_response
from kmock import KubernetesEmulator, Server
from kubernetes import client

from polytempo.engines.on_kubernetes.api import KubernetesApi
from polytempo.engines.on_kubernetes.starter import FAILURES, INDEX

RESOURCES = {
    "Pod": "v1/pods",
    "Secret": "v1/secrets",
    "Job": "batch/v1/jobs",
    "JobSet": "jobset.x-k8s.io/v1alpha2/jobsets",
    "TrainJob": "trainer.kubeflow.org/v1alpha1/trainjobs",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1/trainingruntimes",
}
NAMESPACE = "team"
_PAUSE_S = 0.05


@dataclass
class Pod:
    """A pod that runs, or waits for its Secret."""

    name: str
    job: str
    index: int
    failures: int
    template: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    killed_at_s: float | None = None


@dataclass
class Cluster:
    """The API, and a record of the kubelet."""

    url: str
    emulator: Any
    folder: Path
    logs: dict[str, Path] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    refuses: dict[tuple[str, str], int] = field(default_factory=dict)
    """Answers of the API by method and part of the path, instead of doing it."""

    def api(self) -> KubernetesApi:
        """The library's way to it."""
        return KubernetesApi(NAMESPACE, client.ApiClient(client.Configuration(host=self.url)))

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """The objects of a kind."""
        found = []
        for (resource, _, _), each in list(self.emulator.objects.items()):
            name = f"{resource.group}/{resource.version}" if resource.group else resource.version
            if f"{name}/{resource.plural}" == RESOURCES[kind] and not each.deleted:
                found.append(each.raw)
        return copy.deepcopy(found)

    def kubeconfig(self, path: Path) -> Path:
        """A file for `KubernetesApi.connect` to find this cluster."""
        here = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "here", "context": here}],
        }
        path.write_text(json.dumps(config))
        return path


class Emulator(KubernetesEmulator):
    """Gives each object a uid, and can be made to refuse."""

    cluster: Cluster | None = None

    async def _handle(self, request: Any) -> Any:
        assert self.cluster is not None
        path = str(request.url.path)
        for (method, end), status in self.cluster.refuses.items():
            if str(request.method).upper().endswith(method) and end in f"{path} ":
                return json_response(
                    {"kind": "Status", "code": status, "message": "refused by the test"}, status=status
                )
        if str(request.method).upper().endswith("POST") and isinstance(request.data, dict):
            request.data.setdefault("metadata", {}).setdefault("uid", str(uuid.uuid4()))
        return await super()._handle(request)


@contextmanager
def emulated_cluster(*, kubelet: bool = True) -> Iterator[Cluster]:
    """A cluster with short names for its pods' folders, as in a container. Nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="pods-") as folder, _emulated_cluster(Path(folder), kubelet) as cluster:
        yield cluster


@contextmanager
def _emulated_cluster(folder: Path, kubelet: bool) -> Iterator[Cluster]:
    ready, over, box = threading.Event(), threading.Event(), dict[str, Any]()

    async def serve() -> None:
        async with Emulator() as emulator, Server(emulator) as server:
            for name in RESOURCES.values():
                emulator.resources[name] = {}
            box.update(emulator=emulator, url=str(server.url).rstrip("/"), loop=asyncio.get_running_loop())
            box["cluster"] = emulator.cluster = Cluster(box["url"], emulator, folder)
            box["done"] = asyncio.Event()
            ready.set()
            await box["done"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    cluster: Cluster = box["cluster"]
    keeper = threading.Thread(target=_Kubelet(cluster, over).run, daemon=True)
    if kubelet:
        keeper.start()
    try:
        yield cluster
    finally:
        over.set()
        if kubelet:
            keeper.join(30)
        box["loop"].call_soon_threadsafe(box["done"].set)
        thread.join(30)


class _Kubelet:
    """Plays the controllers of Jobs, JobSets and TrainJobs, the garbage collector and the nodes."""

    def __init__(self, cluster: Cluster, over: threading.Event) -> None:
        self._cluster, self._over = cluster, over
        self._seen: set[tuple[str, int]] = set()
        self._count = 0
        configuration = client.Configuration(host=cluster.url)
        self._core = client.CoreV1Api(client.ApiClient(configuration))

    def run(self) -> None:
        try:
            while not self._over.wait(_PAUSE_S):
                self._step()
        finally:
            for pod in self._cluster.pods.values():
                if pod.process is not None and pod.process.poll() is None:
                    os.killpg(pod.process.pid, signal.SIGKILL)
                    pod.process.wait()

    def _step(self) -> None:
        jobs = dict(self._jobs())
        for name, spec in jobs.items():
            for index in range(spec["completions"]):
                if (name, index) not in self._seen:
                    self._seen.add((name, index))
                    self._add(name, index, spec["template"], 0)
        secrets = {each["metadata"]["name"]: each for each in self._cluster.objects("Secret")}
        for pod in list(self._cluster.pods.values()):
            if pod.job not in jobs:
                self._end(pod)
            elif pod.process is None:
                self._begin(pod, secrets)
            elif pod.process.poll() is not None:
                self._ended(pod, jobs[pod.job])
        self._collect_garbage()

    def _jobs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The specs of Jobs by name, with those behind other objects."""
        for job in self._cluster.objects("Job"):
            yield job["metadata"]["name"], job["spec"]
        for jobset in self._cluster.objects("JobSet"):
            yield jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        runtimes = {each["metadata"]["name"]: each for each in self._cluster.objects("TrainingRuntime")}
        for train_job in self._cluster.objects("TrainJob"):
            runtime = runtimes[train_job["spec"]["runtimeRef"]["name"]]["spec"]["template"]["spec"]
            spec = copy.deepcopy(runtime["replicatedJobs"][0]["template"]["spec"])
            spec["completions"] = train_job["spec"]["trainer"]["numNodes"]
            yield train_job["metadata"]["name"], spec

    def _add(self, job: str, index: int, template: dict[str, Any], failures: int) -> None:
        self._count += 1
        name = f"{job}-{index}-{self._count:04d}"
        annotations = {INDEX: str(index), FAILURES: str(failures)}
        meta = {**template["metadata"], "name": name, "namespace": NAMESPACE, "annotations": annotations}
        meta["creationTimestamp"] = f"2026-01-01T00:00:00.{self._count:06d}Z"
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {**template["spec"], "nodeName": "here"}}
        self._core.create_namespaced_pod(NAMESPACE, {**body, "status": {"phase": "Pending"}})
        self._cluster.pods[name] = Pod(name, job, index, failures, template)

    def _begin(self, pod: Pod, secrets: dict[str, Any]) -> None:
        """Start the pod's container as a process, with its volumes as folders; not before its Secret is there."""
        home = self._cluster.folder / pod.name
        (container,) = pod.template["spec"]["containers"]
        places = {}
        for volume, mount in zip(pod.template["spec"]["volumes"], container["volumeMounts"], strict=True):
            assert volume["name"] == mount["name"]
            places[mount["mountPath"]] = home / volume["name"]
            if "secret" in volume:
                secret = secrets.get(volume["secret"]["secretName"])
                if secret is None:
                    return
                (home / volume["name"]).mkdir(parents=True)
                for file, text in secret["data"].items():
                    path = home / volume["name"] / file
                    path.write_bytes(base64.b64decode(text))
                    path.chmod(volume["secret"]["defaultMode"])
            else:
                (home / volume["name"]).mkdir(parents=True, exist_ok=True)
        command = [word.replace("$(JOB_COMPLETION_INDEX)", str(pod.index)) for word in container["command"]]
        self._cluster.commands.append(command)
        for path, place in places.items():
            command = [word.replace(path, str(place)) for word in command]
        command = [sys.executable if word == "python" else word for word in command]
        variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        for name, value in variables.items():
            variables[name] = str(places[value]) if value in places else value
        log = self._cluster.logs[pod.name] = self._cluster.folder / f"{pod.name}.log"
        with log.open("wb") as file:
            pod.process = subprocess.Popen(
                command,
                env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(pod.index)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._say(pod, {"phase": "Running"})

    def _ended(self, pod: Pod, spec: dict[str, Any]) -> None:
        assert pod.process is not None
        code = pod.process.returncode
        code = code if code >= 0 else 128 - code
        ended = [{"name": "agent", "image": "", "imageID": "", "ready": False, "restartCount": 0}]
        ended[0]["state"] = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}}
        self._say(pod, {"phase": "Failed" if code else "Succeeded", "containerStatuses": ended})
        del self._cluster.pods[pod.name]
        shutil.rmtree(self._cluster.folder / pod.name, ignore_errors=True)
        ignored = code in spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
        failures = pod.failures + (0 if ignored else 1)
        if code and failures <= spec["backoffLimitPerIndex"]:
            self._add(pod.job, pod.index, spec["template"], failures)

    def _end(self, pod: Pod) -> None:
        """The pod's Job is gone: SIGTERM, and SIGKILL when the grace period is over."""
        now_s = time.monotonic()
        if pod.process is not None and pod.process.poll() is None:
            if pod.killed_at_s is None:
                pod.killed_at_s = now_s + pod.template["spec"]["terminationGracePeriodSeconds"]
                os.kill(pod.process.pid, signal.SIGTERM)
            elif now_s > pod.killed_at_s:
                os.killpg(pod.process.pid, signal.SIGKILL)
            return
        del self._cluster.pods[pod.name]
        self._core.delete_namespaced_pod(pod.name, NAMESPACE)
        shutil.rmtree(self._cluster.folder / pod.name, ignore_errors=True)

    def _say(self, pod: Pod, status: dict[str, Any]) -> None:
        self._core.patch_namespaced_pod(
            pod.name, NAMESPACE, {"status": status}, _content_type="application/merge-patch+json"
        )

    def _collect_garbage(self) -> None:
        """Delete objects of deleted owners: Secrets, runtimes, and pods that have ended."""
        kinds = {kind: self._cluster.objects(kind) for kind in RESOURCES}
        uids = {each["metadata"]["uid"] for objects in kinds.values() for each in objects}
        for kind in ("Secret", "TrainingRuntime"):
            for each in kinds[kind]:
                owners = each["metadata"].get("ownerReferences", [])
                if owners and not any(owner["uid"] in uids for owner in owners):
                    self._cluster.api().delete(kind, each["metadata"]["name"])
        jobs = {name for name, _ in self._jobs()}
        for pod in kinds["Pod"]:
            name = pod["metadata"]["name"]
            if name not in self._cluster.pods and name.rsplit("-", 2)[0] not in jobs:
                self._core.delete_namespaced_pod(name, NAMESPACE)
