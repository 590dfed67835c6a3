"""Trackers of runs: TensorBoard, W&B, MLflow, Trackio, Prometheus, OpenTelemetry, Kubeflow, or your own.

pt.run(job, strategy, out="runs/first", trackers=[pt.trackers.tensorboard(), pt.trackers.wandb(project="digits")])
"""

from polytempo.spec.tracker_call import (
    TrackerCall,
    comet,
    kubeflow,
    mlflow,
    opentelemetry,
    prometheus,
    tensorboard,
    trackio,
    wandb,
)
from polytempo.trackers.tracker import TrackedRun, Tracker, scalars

__all__ = [
    "TrackedRun",
    "Tracker",
    "TrackerCall",
    "comet",
    "kubeflow",
    "mlflow",
    "opentelemetry",
    "prometheus",
    "scalars",
    "tensorboard",
    "trackio",
    "wandb",
]
