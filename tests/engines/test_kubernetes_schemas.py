"""The manifests against the official schemas, with any options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.kubernetes_schemas import check
from polytempo.engines.on_kubernetes.forms import workload
from polytempo.engines.on_kubernetes.kubernetes_engine import launcher
from polytempo.engines.on_kubernetes.kubernetes_options import TAKEN, KubernetesOptions
from polytempo.engines.on_kubernetes.pods import owner_reference, ticket_secret

names = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
variables = st.from_regex(r"[A-Z_][A-Z0-9_]{0,10}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
paths = names.map(lambda name: f"/{name}").filter(lambda path: path not in TAKEN)
sources = st.one_of(
    names,
    names.map(lambda name: {"configMap": {"name": name}}),
    paths.map(lambda path: {"hostPath": {"path": path, "type": "Directory"}}),
    st.just({"nfs": {"server": "files.example.org", "path": "/data"}}),
)
tolerations = st.one_of(
    names.map(lambda key: {"key": key, "operator": "Exists", "effect": "NoSchedule"}),
    st.tuples(names, names).map(lambda pair: {"key": pair[0], "operator": "Equal", "value": pair[1]}),
)
quantities = st.one_of(st.integers(1, 64), st.sampled_from(["500m", "8Gi", "1.5"]))


@st.composite
def options(draw: st.DrawFn) -> KubernetesOptions:
    """Any options that `KubernetesOptions` takes."""
    env = draw(st.dictionaries(variables, texts, max_size=3))
    secrets = draw(st.dictionaries(variables.filter(lambda each: each not in env), names, max_size=2))
    return KubernetesOptions(
        image=draw(names),
        namespace=draw(st.none() | names),
        form=draw(st.sampled_from(["job", "jobset", "trainer"])),
        resources=draw(st.dictionaries(st.sampled_from(["cpu", "memory", "amd.com/gpu"]), quantities)),
        gpus=draw(st.integers(0, 8)),
        volumes=draw(st.dictionaries(paths, sources, max_size=3)),
        env=env,
        secrets={name: f"{secret}/key" for name, secret in secrets.items()},
        tolerations=draw(st.lists(tolerations, max_size=2)),
        node_selector=draw(st.dictionaries(names, names, max_size=2)),
        service_account=draw(st.none() | names),
        labels=draw(st.dictionaries(names, names, max_size=2)),
        annotations=draw(st.dictionaries(names, texts, max_size=2)),
        image_pull_secrets=draw(st.lists(names, max_size=2)),
        user=draw(st.integers(1, 2**31 - 1)),
        shared_memory=draw(st.sampled_from([None, "64Mi", "2Gi"])),
        restarts=draw(st.integers(0, 100)),
        deadline_s=draw(st.none() | st.integers(1, 10**6)),
        ttl_s=draw(st.integers(0, 10**6)),
        grace_s=draw(st.integers(0, 3600)),
    )


OWNER = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "launcher-x1", "uid": "0-1"}}


@settings(max_examples=40, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
@given(options(), st.integers(1, 500), st.booleans())
def test_every_manifest_is_one_that_the_api_takes(given: KubernetesOptions, pods: int, inside: bool) -> None:
    owner = owner_reference(OWNER) if inside else None
    objects = workload(given, "run", pods, owner)
    objects.append(ticket_secret(given, "run", ["{}"] * pods, owner_reference(OWNER)))
    objects += launcher(given, "run", ["train", "digits"], "/tmp", {"cpu": 1})
    for manifest in objects:
        check(manifest)


@pytest.mark.parametrize("form", ["job", "jobset", "trainer"])
def test_the_check_sees_a_wrong_field(form: Any) -> None:
    """The law above can fail: an unknown field, deep inside, and a value of the wrong type."""
    (first, *_) = workload(KubernetesOptions(image="i", form=form), "run", 2)
    check(first)
    for key, value in (("completionsMode", "Indexed"), ("completions", "two")):
        changed = copy.deepcopy(first)
        spec = changed["spec"]
        spec = spec["template"]["spec"] if form == "trainer" else spec
        spec = spec if form == "job" else spec["replicatedJobs"][0]["template"]["spec"]
        spec[key] = value
        with pytest.raises(Exception, match=r"two|completionsMode"):
            check(changed)
