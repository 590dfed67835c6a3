"""Requests of this library to the API of Kubernetes, through its Python client, in plain dicts.

Each request has a deadline. Requests that the API refuses become one error with the refused request and the remedy.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.engines.extras import missing
from polytempo.engines.on_kubernetes.forms import RESOURCES
from polytempo.engines.on_kubernetes.pods import Manifest

IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""The variable of the environment that each pod has."""

_DEADLINE = (5.0, 30.0)
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_GONE = 404


class KubernetesRefusal(PolytempoError):
    """The API refused a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """HTTP's status; 0 without an answer."""


class KubernetesApi:
    """The objects of one namespace."""

    def __init__(self, namespace: str, client: Any) -> None:
        """`client`: a `kubernetes.client.ApiClient`."""
        library = _library()
        self.namespace = namespace
        self._core, self._custom = library.client.CoreV1Api(client), library.client.CustomObjectsApi(client)
        self._refused, self._no_answer = library.client.ApiException, library.no_answer

    @staticmethod
    def connect(namespace: str | None = None, context: str | None = None) -> KubernetesApi:
        """The account is the pod's own, or the kubeconfig's. ImportError, ValueError where there is no way."""
        library = _library()
        settings = library.client.Configuration()
        if context is None and IN_A_POD in os.environ:
            library.config.load_incluster_config(client_configuration=settings)
            found = _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.is_file() else "default"
        else:
            try:
                file = os.environ.get("KUBECONFIG")  # the client keeps the value of its import
                library.config.load_kube_config(file, context=context, client_configuration=settings)
                contexts, active = library.config.list_kube_config_contexts(file)
            except library.config.ConfigException as error:
                raise ValueError(
                    f"kubernetes: this process is in no pod, and there is no kubeconfig that would do ({error}). "
                    "Set KUBECONFIG, or run the launcher in the cluster: pt.engines.kubernetes(…).to_yaml(…)"
                ) from None
            chosen = active if context is None else next(each for each in contexts if each["name"] == context)
            found = chosen["context"].get("namespace") or "default"
        return KubernetesApi(namespace or found, library.client.ApiClient(settings))

    def create(self, manifest: Manifest) -> Manifest:
        """Create the object; as the API has stored it."""
        what = f"create {manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] == "Secret":
            return self._asked(what, self._core.create_namespaced_secret, self.namespace, manifest)
        resource = RESOURCES[manifest["kind"]]
        place = (resource.group, resource.version, self.namespace, resource.plural)
        return self._asked(what, self._custom.create_namespaced_custom_object, *place, manifest)

    def read(self, kind: str, name: str) -> Manifest | None:
        """The object as it is now; None where it is gone."""
        resource = RESOURCES[kind]
        place = (resource.group, resource.version, self.namespace, resource.plural, name)
        try:
            return self._asked(f"get {kind} {name}", self._custom.get_namespaced_custom_object, *place)
        except KubernetesRefusal as refusal:
            if refusal.status != _GONE:
                raise
            return None

    def delete(self, kind: str, name: str) -> None:
        """Delete the object, and in the background its dependents; nothing if it is gone already."""
        resource, what = RESOURCES[kind], f"delete {kind} {name}"
        try:
            if kind == "Secret":
                self._asked(what, self._core.delete_namespaced_secret, name, self.namespace)
            else:
                place = (resource.group, resource.version, self.namespace, resource.plural, name)
                delete = self._custom.delete_namespaced_custom_object
                self._asked(what, delete, *place, propagation_policy="Background")
        except KubernetesRefusal as refusal:
            if refusal.status != _GONE:
                raise

    def own(self, manifest: Manifest, owner: Mapping[str, Any]) -> None:
        """Let the object be removed together with `owner`, an owner reference, too."""
        resource, name = RESOURCES[manifest["kind"]], manifest["metadata"]["name"]
        owners = [*manifest["metadata"].get("ownerReferences", []), dict(owner)]
        change = [{"op": "add", "path": "/metadata/ownerReferences", "value": owners}]
        place = (resource.group, resource.version, self.namespace, resource.plural, name)
        self._asked(f"patch {manifest['kind']} {name}", self._custom.patch_namespaced_custom_object, *place, change)

    def pods(self, selector: str) -> list[Manifest]:
        """The pods that have these labels."""
        found = self._asked("list pods", self._core.list_namespaced_pod, self.namespace, label_selector=selector)
        wanted = dict(each.split("=", 1) for each in selector.split(","))
        labelled = [(pod, pod["metadata"].get("labels") or {}) for pod in found.get("items", [])]
        return [pod for pod, labels in labelled if wanted.items() <= labels.items()]

    def own_pod(self) -> Manifest | None:
        """The pod that this process is in; None where it is in none, or may not know."""
        if IN_A_POD not in os.environ:
            return None
        with suppress(KubernetesRefusal):
            name = os.environ.get("POD_NAME") or socket.gethostname()  # they differ in an Indexed Job
            return self._asked(f"get pod {name}", self._core.read_namespaced_pod, name, self.namespace)
        return None

    def _asked(self, what: str, method: Callable[..., Any], *arguments: Any, **more: Any) -> Manifest:
        """The answer of the API. Answers are read here: the client's classes differ between its versions."""
        try:
            answer = method(*arguments, **more, _preload_content=False, _request_timeout=_DEADLINE)
        except self._refused as error:
            raise self._refusal(what, error.status or 0, error.body or error.reason) from None
        except self._no_answer as error:
            raise self._refusal(what, 0, error) from None
        if not 200 <= answer.status < 300:
            raise self._refusal(what, answer.status, answer.data)
        found: Manifest = json.loads(answer.data)
        return found

    def _refusal(self, what: str, status: int, body: Any) -> KubernetesRefusal:
        text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
        with suppress(ValueError, AttributeError):
            text = json.loads(text).get("message", text)
        remedy = {
            403: "; give the launcher an account that may do this (docs/kubernetes.md lists the permissions)",
            404: "; is the kind installed in this cluster? form='job' needs nothing beyond Kubernetes",
        }.get(status, "")
        said = f"HTTP {status}" if status else "no answer"
        return KubernetesRefusal(f"kubernetes: cannot {what} in {self.namespace}: {said}: {text[:500]}{remedy}", status)


def _library() -> SimpleNamespace:
    """Modules and errors of the client. Raises ImportError that names the remedy."""
    try:
        from kubernetes import client, config
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise missing(error, "kubernetes") from None
    return SimpleNamespace(client=client, config=config, no_answer=(OSError, HTTPError))
