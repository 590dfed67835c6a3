"""Engines start the processes of a run: `pt.run(job, strategy, engine=pt.engines.subprocess())`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_ENGINES = {
    "dask": ("on_dask.dask_engine", "Dask"),
    "kubernetes": ("on_kubernetes.kubernetes_engine", "Kubernetes"),
    "local": ("local_engine", "Local"),
    "mpi": ("mpi_engine", "Mpi"),
    "ray": ("on_ray.ray_engine", "Ray"),
    "slurm": ("on_slurm.slurm_engine", "Slurm"),
    "spark": ("on_spark.spark_engine", "Spark"),
    "ssh": ("ssh_engine", "Ssh"),
    "subprocess": ("subprocess_engine", "Subprocess"),
}

__all__ = ["dask", "kubernetes", "local", "mpi", "ray", "slurm", "spark", "ssh", "subprocess"]


def __getattr__(name: str) -> Any:
    if name not in _ENGINES:
        raise AttributeError(f"module 'polytempo.engines' has no engine {name!r}; there are: {', '.join(__all__)}")
    module, setup = _ENGINES[name]
    return getattr(import_module(f"polytempo.engines.{module}"), setup)


def __dir__() -> list[str]:
    return sorted(__all__)
