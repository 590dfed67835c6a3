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
    """By function the arguments that calls in the tests give, by position or by name."""
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
