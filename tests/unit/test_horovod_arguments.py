"""Some test of Horovod's API gives each argument of each public function."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from pathlib import Path

import pytest

import polytempo.horovod.torch as hvd

TESTS = sorted(Path(__file__).parents[1].glob("*/test_horovod*.py"))
PUBLIC = {name: getattr(hvd, name) for name in hvd.__all__}
FUNCTIONS = {name: made for name, made in PUBLIC.items() if inspect.isfunction(made)} | {
    name: PUBLIC[name] for name in ("ProcessSet", "SyncBatchNorm")
}
FUNCTIONS |= {name: getattr(hvd.elastic, name) for name in ("ElasticSampler", "TorchState")}


def given() -> dict[str, set[str]]:
    """The arguments in the tests' calls, by function, by position or by name."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = {"make": "DistributedOptimizer", "together": "DistributedOptimizer"}.get(name, name)
            if name in FUNCTIONS:
                found[name].update(list(inspect.signature(FUNCTIONS[name]).parameters)[: len(node.args)])
                found[name].update(keyword.arg for keyword in node.keywords if keyword.arg)
    return found


GIVEN = given()
ELSEWHERE = {
    "DistributedOptimizer": {"num_groups"},  # out of a dictionary, in process/test_horovod_torch_optimizer.py
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_argument_is_given_in_some_test(name: str) -> None:
    kinds = inspect.signature(FUNCTIONS[name]).parameters
    named = {each for each, parameter in kinds.items() if parameter.kind is not parameter.VAR_KEYWORD}
    assert named - GIVEN[name] - ELSEWHERE.get(name, set()) == set()


GLOBAL, NONE = "global_process_set", "Compression.none"
REDUCED = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=" + GLOBAL
COMPRESSED = REDUCED.replace("name=None, op", f"name=None, compression={NONE}, op")
SCATTERED = f"name=None, op=Average, process_set={GLOBAL}, prescale_factor=1.0, postscale_factor=1.0"
PACKED = SCATTERED.replace("name=None, op", f"name=None, compression={NONE}, op")
SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "mpi_built": "verbose=False",
    "gloo_built": "verbose=False",
    "allreduce": f"tensor, {COMPRESSED}",
    "allreduce_": f"tensor, {REDUCED}",
    "allreduce_async": f"tensor, {REDUCED}",
    "allreduce_async_": f"tensor, {REDUCED}",
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_": f"tensors, {REDUCED}",
    "grouped_allreduce_async": f"tensors, {REDUCED}",
    "grouped_allreduce_async_": f"tensors, {REDUCED}",
    "sparse_allreduce_async": f"tensor, name, op, process_set={GLOBAL}",
    "allgather": f"tensor, name=None, process_set={GLOBAL}",
    "allgather_async": f"tensor, name=None, process_set={GLOBAL}",
    "grouped_allgather": f"tensors, name=None, process_set={GLOBAL}",
    "grouped_allgather_async": f"tensors, name=None, process_set={GLOBAL}",
    "broadcast": f"tensor, root_rank, name=None, process_set={GLOBAL}",
    "broadcast_": f"tensor, root_rank, name=None, process_set={GLOBAL}",
    "broadcast_async": f"tensor, root_rank, name=None, process_set={GLOBAL}",
    "broadcast_async_": f"tensor, root_rank, name=None, process_set={GLOBAL}",
    "alltoall": f"tensor, splits=None, name=None, process_set={GLOBAL}",
    "alltoall_async": f"tensor, splits=None, name=None, process_set={GLOBAL}",
    "reducescatter": f"tensor, {PACKED}",
    "reducescatter_async": f"tensor, {SCATTERED}",
    "grouped_reducescatter": f"tensors, {PACKED}",
    "grouped_reducescatter_async": f"tensors, {SCATTERED}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": f"process_set={GLOBAL}",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks_or_comm",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, process_set={GLOBAL}",
    "broadcast_object_fn": f"root_rank=0, name=None, process_set={GLOBAL}",
    "allgather_object": f"obj, name=None, process_set={GLOBAL}",
    "DistributedOptimizer": f"optimizer, named_parameters=None, compression={NONE}, backward_passes_per_step=1, "
    "op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, "
    f"process_set={GLOBAL}",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "ElasticSampler": "dataset, shuffle=True, seed=0",
    "TorchState": "model=None, optimizer=None",
}
"""Horovod 0.28's. Ours may have others after these."""


def shown(default: object) -> str:
    known = {id(hvd.global_process_set): GLOBAL, id(hvd.Compression.none): NONE, id(hvd.Average): "Average"}
    return known.get(id(default), repr(default))


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_horovods_places_names_and_defaults(name: str) -> None:
    found = []
    for parameter in inspect.signature(getattr(hvd, name, None) or getattr(hvd.elastic, name)).parameters.values():
        given = parameter.default is not parameter.empty
        found.append(f"{parameter.name}={shown(parameter.default)}" if given else parameter.name)
    expected = SIGNATURES[name].split(", ")
    if name == "broadcast_object":
        found[0] = found[0].removesuffix("=None")  # may be left out on ranks that get it
    assert found[: len(expected)] == expected
