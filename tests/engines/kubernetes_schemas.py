"""The API takes the manifests: the official schemas, and the models of the Kubeflow Trainer."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
from kubeflow_trainer_api import models

VERSION = "1.37"

CUSTOM = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def check(manifest: dict[str, Any]) -> None:
    """Raise where the API would refuse the manifest, or leave out a field that it does not know."""
    if manifest["kind"] == "JobSet":
        same(manifest["spec"], models.JobsetV1alpha2JobSetSpec)
    elif manifest["kind"] in CUSTOM:
        same(manifest, CUSTOM[manifest["kind"]])
    else:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    for job in jobs_in(manifest):
        kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", **job}, VERSION, strict=True)


def same(manifest: dict[str, Any], model: Any) -> None:
    """The model keeps no unknown field: it has read all written fields."""
    read = model.from_dict(manifest)
    if without_nothing(read.to_dict()) != without_nothing(manifest):
        raise ValueError(f"{model.__name__} knows not all of {manifest}")


def without_nothing(value: Any) -> Any:
    """`value` with numbers as text (quantities), and without the models' None."""
    if isinstance(value, dict):
        return {key: without_nothing(each) for key, each in value.items() if each is not None}
    return [without_nothing(each) for each in value] if isinstance(value, list) else value


def jobs_in(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The Jobs that a JobSet or a runtime would create."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    found: list[dict[str, Any]] = []
    for each in spec.get("replicatedJobs", []):
        template = each["template"]
        found.append({"metadata": {"name": each["name"], **template.get("metadata", {})}, "spec": template["spec"]})
    return found
