"""The API requests of the starter of pods, their order, and the rest when one is refused. No cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.core.errors import PolytempoError
from polytempo.engines.engine import parse_engine
from polytempo.engines.on_kubernetes import starter as kubernetes_starter
from polytempo.engines.on_kubernetes.api import KubernetesApi, KubernetesRefusal
from polytempo.engines.on_kubernetes.kubernetes_engine import reachable
from polytempo.engines.on_kubernetes.kubernetes_options import KubernetesOptions
from polytempo.engines.on_kubernetes.starter import KubernetesStarter
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.wire.keys import make_keys

TICKET = AgentTicket("tcp://10.0.0.1:4242", make_keys())
LAUNCHER = {"apiVersion": "v1", "kind": "Pod", "name": "launcher-x", "uid": "u-0"}


class Api(KubernetesApi):
    """Objects in a dict. `refuses` is the kind that cannot be created."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[str] = []
        self.there: dict[tuple[str, str], dict[str, Any]] = {}
        self.found: list[dict[str, Any]] = []
        self._refuses = refuses

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self.calls.append(f"create {kind}")
        if kind == self._refuses:
            raise KubernetesRefusal(f"cannot create {kind}", 403)
        stored = {**manifest, "metadata": {**manifest["metadata"], "uid": f"uid of {kind}"}}
        self.there[kind, name] = stored
        return stored

    def own(self, manifest: dict[str, Any], owner: Any) -> None:
        self.calls.append(f"{owner['kind']} owns {manifest['kind']}")

    def delete(self, kind: str, name: str) -> None:
        self.calls.append(f"delete {kind}")
        self.there.pop((kind, name), None)

    def read(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.there.get((kind, name))

    def pods(self, selector: str) -> list[dict[str, Any]]:
        return self.found


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_PAUSE_S", "_POLITE_S"):
        monkeypatch.setattr(kubernetes_starter, name, 0.0)


def starter(api: Api, launcher: Any = None, **more: Any) -> KubernetesStarter:
    return KubernetesStarter(KubernetesOptions(image="i:1", **more), api, launcher)


def pod(number: int, phase: str, failures: int = 0) -> dict[str, Any]:
    prefix = "batch.kubernetes.io/job"
    annotations = {f"{prefix}-completion-index": str(number), f"{prefix}-index-failure-count": str(failures)}
    return {"metadata": {"name": f"run-{number}-x", "annotations": annotations}, "status": {"phase": phase}}


CALLS = {
    "job": ["create Job", "create Secret"],
    "jobset": ["create JobSet", "create Secret"],
    "trainer": ["create TrainingRuntime", "create TrainJob", "create Secret", "TrainJob owns TrainingRuntime"],
}


@pytest.mark.parametrize("form", CALLS)
def test_the_secret_comes_last_and_has_an_owner(form: str) -> None:
    api = Api()
    agents = starter(api, LAUNCHER, form=form).start([0, 1, 2], TICKET)
    assert api.calls == CALLS[form]
    assert [agent.number for agent in agents] == [0, 1, 2]
    *others, secret = api.there.values()
    assert [each["metadata"]["ownerReferences"] for each in others] == [[LAUNCHER]] * len(others)
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == (others[-1]["kind"], f"uid of {others[-1]['kind']}")
    assert set(secret["data"]) == {"0.json", "1.json", "2.json"}


def test_the_keys_are_in_the_secret_and_nowhere_else() -> None:
    api = Api()
    starter(api).start([0, 1], TICKET)
    job, _ = api.there.values()
    for secret in TICKET.keys.to_plain().values():
        assert str(secret) not in json.dumps(job)
    assert "4242" not in json.dumps(job)


@pytest.mark.parametrize(
    ("form", "refuses"), [("job", "Job"), ("job", "Secret"), ("trainer", "TrainJob"), ("trainer", "Secret")]
)
def test_what_is_refused_leaves_nothing(form: str, refuses: str) -> None:
    api = Api(refuses)
    with pytest.raises(PolytempoError, match=f"cannot create {refuses}"):
        starter(api, form=form).start([0], TICKET)
    assert api.there == {}


def test_stop_deletes_once_what_was_created() -> None:
    api = Api()
    started = starter(api, form="trainer")
    started.stop()
    assert api.calls == [], "nothing was created"
    started.start([0], TICKET)
    api.calls.clear()
    started.stop()
    started.stop()
    assert api.calls == ["delete TrainJob", "delete TrainingRuntime"], "the garbage collector deletes the Secret"


def test_a_refused_deletion_is_said_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    started = starter(api, form="trainer")
    started.start([0], TICKET)
    deleted: list[str] = []

    def delete(kind: str, name: str) -> None:
        deleted.append(kind)
        if kind == "TrainJob":
            raise KubernetesRefusal("cannot delete TrainJob", 403)

    monkeypatch.setattr(api, "delete", delete)
    with pytest.raises(KubernetesRefusal, match="cannot delete TrainJob"):
        started.stop()
    assert deleted == ["TrainJob", "TrainingRuntime"]


def test_a_pod_that_is_replaced_has_not_ended() -> None:
    api = Api()
    started = starter(api, restarts=1)
    first, second = started.start([0, 1], TICKET)
    assert (first.where, second.where) == (f"pod 0 of {started.name}", f"pod 1 of {started.name}")
    api.found = [pod(0, "Running"), pod(1, "Failed", failures=0)]
    started.poll()
    assert (first.ended, second.ended) == (None, None)
    api.found = [pod(0, "Succeeded"), pod(1, "Failed", failures=1)]
    started.poll()
    assert first.ended == "has completed"
    assert second.ended == "has failed 2 times; see `kubectl logs run-1-x`"
    assert second.where == "pod run-1-x (failed)"


def test_a_spare_agent_is_the_pod_that_the_job_makes() -> None:
    """The Job replaces pods: a later `start` creates nothing, and says so where no pod can come."""
    api = Api()
    started = starter(api)
    started.start([0], TICKET)
    api.calls.clear()
    (spare,) = started.start([1], TICKET)
    started.poll()
    assert (api.calls, spare.number, spare.ended) == ([], 1, None)
    job = api.there["Job", started.name]
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "ran too long"}]}
    started.poll()
    assert spare.ended == f"does not come: Job {started.name} has ended: ran too long"
    with pytest.raises(PolytempoError, match=r"no pod takes the place of a lost one: .* ran too long"):
        started.start([2], TICKET)
    api.there.clear()
    with pytest.raises(PolytempoError, match="was deleted"):
        started.start([2], TICKET)


def test_an_api_that_does_not_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    started = starter(api)
    (agent,) = started.start([0], TICKET)

    def pods(selector: str) -> list[dict[str, Any]]:
        raise KubernetesRefusal("no answer", 0)

    monkeypatch.setattr(api, "pods", pods)
    started.poll()
    assert agent.ended is None


@pytest.mark.parametrize(
    ("given", "pod_address", "message"),
    [
        (None, None, "this process is in no pod"),
        ("127.0.0.1", None, "address=127.0.0.1 is this host's loopback"),
        ("::1", "10.0.0.7", "loopback"),
        ("head.example.org", None, "not an IP address"),
    ],
)
def test_pods_must_reach_the_launcher(given: str | None, pod_address: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reachable(given, pod_address)


def test_the_launchers_address_is_its_pods() -> None:
    assert reachable(None, "10.0.0.7") == "10.0.0.7"
    assert reachable("192.0.2.9", "10.0.0.7") == "192.0.2.9"


FILES: list[tuple[str, str, str]] = [
    ("pods.toml", 'image = "i:1"\npods = 0', "pods=0"),
    ("pods.toml", "image = ", "this is not TOML"),
    ("pods.json", '{"image": "i:1", "imagee": 1}', "imagee is not an option"),
    ("pods.json", "[]", "at least image"),
    ("pods.yaml", "image: i", r"read from \.json and \.toml files"),
    ("none.toml", "", "cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "message"), FILES)
def test_a_file_of_options_is_checked(name: str, text: str, message: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_engine(f"kubernetes:{tmp_path / name}")


def test_the_command_line_names_a_file(tmp_path: Path) -> None:
    (tmp_path / "pods.toml").write_text('image = "i:1"\ngpus = 2\n[resources]\ncpu = 4\n')
    found = parse_engine(f"kubernetes:{tmp_path / 'pods.toml'}")
    assert found == pt.engines.kubernetes(image="i:1", gpus=2, resources={"cpu": 4})
    with pytest.raises(ValueError, match=r"--engine kubernetes:pods\.toml"):
        parse_engine("kubernetes")


def test_the_yaml_names_the_engine_itself() -> None:
    engine = pt.engines.kubernetes(image="i:1")
    assert "kubernetes:/etc/polytempo/engine.json" in engine.to_yaml(["train", "digits"])
    with pytest.raises(ValueError, match="leave --engine out"):
        engine.to_yaml(["train", "digits", "--engine", "local"])


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match=r"pip install 'polytempo\[kubernetes\]'"):
        KubernetesApi.connect()
