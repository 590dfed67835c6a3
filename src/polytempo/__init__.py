"""Polytempo: every distributed-training strategy, written once, run on real processes or under a virtual clock.

Names load when they are first used, so that `import polytempo` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytempo import (
        aggregation,
        cluster,
        collectives,
        compression,
        core,
        data,
        engines,
        jobs,
        large_batch,
        strategies,
        synchronization,
        worlds,
    )
    from polytempo.core import (
        Bundle,
        Deadlock,
        Drifted,
        Mismatch,
        NotFinite,
        PeerLost,
        PolytempoError,
        Port,
        Strategy,
        TimedOut,
        Transform,
    )
    from polytempo.core.errors import JobFailed
    from polytempo.core.system.folder_lock import FolderTaken
    from polytempo.core.system.notice import Preempted
    from polytempo.engines.collective import RunTimedOut
    from polytempo.engines.join.init import init
    from polytempo.engines.launch import launch
    from polytempo.engines.processes.failures import WorkerDied
    from polytempo.interop.ddp_hook import comm_hook
    from polytempo.native.arena import shared_empty
    from polytempo.partition.branches import threads
    from polytempo.runs.compare import compare
    from polytempo.runs.elastic.elastic_loop import elastic
    from polytempo.runs.elastic.run_elastic import WorkersLost
    from polytempo.runs.own_loop.attach import attach
    from polytempo.runs.own_loop.pipeline import pipeline
    from polytempo.runs.own_loop.served_pipeline import ServedPipeline
    from polytempo.runs.programs.run_lbfgs import lbfgs
    from polytempo.runs.programs.run_schedule import schedule
    from polytempo.runs.run import run
    from polytempo.runs.simulated.simulate import simulate
    from polytempo.server.coordinator.lost_shard import ShardLost
    from polytempo.spec.batch_growth import norm_test
    from polytempo.spec.explanation import explain
    from polytempo.spec.job import Data, Job, of_batch
    from polytempo.spec.loss_divisor import divided_by
    from polytempo.spec.options import RunOptions
    from polytempo.spec.precision import precision
    from polytempo.spec.result import Result
    from polytempo.spec.text.catalogue import parse_strategy
    from polytempo.training.elastic.loop_state import ElasticState
    from polytempo.training.hooks.attached_models import no_sync
    from polytempo.training.hooks.handle import Handle
    from polytempo.training.observe.checkpoint_model import checkpoint_model
    from polytempo.training.own_loop.served_handle import ServedHandle
    from polytempo.training.own_loop.shard import shard
    from polytempo.training.parts.hybrid import hybrid
    from polytempo.training.parts.layer_plan import plan_layers
    from polytempo.training.parts.place import place
    from polytempo.training.parts.split import split
    from polytempo.training.pipeline.pipeline import Pipeline
    from polytempo.training.trainer import Trainer
    from polytempo.worlds import ProcessWorld, VirtualWorld

__version__ = "0.1.0"

_FOLDERS = (
    "aggregation",
    "cluster",
    "collectives",
    "compression",
    "core",
    "data",
    "engines",
    "jobs",
    "large_batch",
    "partition",
    "strategies",
    "synchronization",
    "worlds",
)
_HOMES = {
    "polytempo.core": (
        "Bundle",
        "Deadlock",
        "Drifted",
        "Mismatch",
        "NotFinite",
        "PeerLost",
        "PolytempoError",
        "Port",
        "Strategy",
        "TimedOut",
        "Transform",
    ),
    "polytempo.core.errors": ("JobFailed",),
    "polytempo.core.system.folder_lock": ("FolderTaken",),
    "polytempo.core.system.notice": ("Preempted",),
    "polytempo.runs.own_loop.attach": ("attach",),
    "polytempo.runs.own_loop.pipeline": ("pipeline",),
    "polytempo.runs.own_loop.served_pipeline": ("ServedPipeline",),
    "polytempo.engines.join.init": ("init",),
    "polytempo.engines.processes.failures": ("WorkerDied",),
    "polytempo.engines.collective": ("RunTimedOut",),
    "polytempo.engines.launch": ("launch",),
    "polytempo.runs.elastic.elastic_loop": ("elastic",),
    "polytempo.runs.compare": ("compare",),
    "polytempo.runs.run": ("run",),
    "polytempo.runs.programs.run_lbfgs": ("lbfgs",),
    "polytempo.runs.elastic.run_elastic": ("WorkersLost",),
    "polytempo.runs.programs.run_schedule": ("schedule",),
    "polytempo.runs.simulated.simulate": ("simulate",),
    "polytempo.interop.ddp_hook": ("comm_hook",),
    "polytempo.native.arena": ("shared_empty",),
    "polytempo.partition.branches": ("threads",),
    "polytempo.server.coordinator.lost_shard": ("ShardLost",),
    "polytempo.spec.batch_growth": ("norm_test",),
    "polytempo.spec.text.catalogue": ("parse_strategy",),
    "polytempo.spec.explanation": ("explain",),
    "polytempo.training.hooks.attached_models": ("no_sync",),
    "polytempo.training.observe.checkpoint_model": ("checkpoint_model",),
    "polytempo.training.elastic.loop_state": ("ElasticState",),
    "polytempo.training.hooks.handle": ("Handle",),
    "polytempo.training.pipeline.pipeline": ("Pipeline",),
    "polytempo.spec.job": ("Data", "Job", "of_batch"),
    "polytempo.spec.loss_divisor": ("divided_by",),
    "polytempo.spec.options": ("RunOptions",),
    "polytempo.spec.precision": ("precision",),
    "polytempo.spec.result": ("Result",),
    "polytempo.training.own_loop.served_handle": ("ServedHandle",),
    "polytempo.training.own_loop.shard": ("shard",),
    "polytempo.training.parts.hybrid": ("hybrid",),
    "polytempo.training.parts.layer_plan": ("plan_layers",),
    "polytempo.training.parts.place": ("place",),
    "polytempo.training.parts.split": ("split",),
    "polytempo.training.trainer": ("Trainer",),
    "polytempo.worlds": ("ProcessWorld", "VirtualWorld"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Bundle",
    "Data",
    "Deadlock",
    "Drifted",
    "ElasticState",
    "FolderTaken",
    "Handle",
    "Job",
    "JobFailed",
    "Mismatch",
    "NotFinite",
    "PeerLost",
    "Pipeline",
    "PolytempoError",
    "Port",
    "Preempted",
    "ProcessWorld",
    "Result",
    "RunOptions",
    "RunTimedOut",
    "ServedHandle",
    "ServedPipeline",
    "ShardLost",
    "Strategy",
    "TimedOut",
    "Trainer",
    "Transform",
    "VirtualWorld",
    "WorkerDied",
    "WorkersLost",
    "aggregation",
    "attach",
    "checkpoint_model",
    "cluster",
    "collectives",
    "comm_hook",
    "compare",
    "compression",
    "core",
    "data",
    "divided_by",
    "elastic",
    "engines",
    "explain",
    "hybrid",
    "init",
    "jobs",
    "large_batch",
    "launch",
    "lbfgs",
    "no_sync",
    "norm_test",
    "of_batch",
    "parse_strategy",
    "partition",
    "pipeline",
    "place",
    "plan_layers",
    "precision",
    "run",
    "schedule",
    "shard",
    "shared_empty",
    "simulate",
    "split",
    "strategies",
    "synchronization",
    "threads",
    "worlds",
]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f"polytempo.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'polytempo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
