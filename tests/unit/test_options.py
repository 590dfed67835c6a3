"""The options of a run, as an object and as keywords."""

from __future__ import annotations

import math
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import option_keywords
import polytempo as pt
from polytempo.cli.options.command_options import CommandOptions
from polytempo.spec.run_options import OptionKeywords, with_keywords
from polytempo.spec.table.option import entries


def test_the_keywords_are_those_of_the_table() -> None:
    """`make fmt` writes them."""
    assert option_keywords.FILE.read_text(encoding="utf-8") == option_keywords.written(), "run `make fmt`"
    assert list(OptionKeywords.__annotations__) == list(entries(pt.RunOptions))


@pytest.mark.parametrize("table", [CommandOptions, pt.RunOptions])
def test_each_default_is_one_that_the_option_can_have(table: type) -> None:
    for entry in entries(table).values():
        assert entry.help
        if entry.default is not None:
            assert entry.checked(entry.default) == entry.default, entry.name


@pytest.mark.parametrize("function", [pt.run, pt.compare, pt.simulate, pt.Trainer.__init__])
def test_editors_and_mypy_know_the_keywords(function: object) -> None:
    assert callable(function)
    assert signature(function).parameters["more"].annotation == "Unpack[OptionKeywords]"


def test_keywords_take_the_place_of_the_options() -> None:
    options = with_keywords(pt.RunOptions(epochs=3, lr=0.5), {"lr": 0.1, "out": "runs/here"})
    assert options == pt.RunOptions(epochs=3, lr=0.1, out=Path("runs/here"))
    assert with_keywords(None, {}) == pt.RunOptions()


def test_a_wrong_keyword_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"there is no option 'epohcs' \(did you mean epochs\?\); there are: epochs, "):
        with_keywords(None, {"epohcs": 3})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "0.1"}, "lr='0.1': must be a number, got a text"),
        ({"lr": 0}, "lr=0: must be a number > 0"),
        ({"batch_size": 32.5}, "batch_size=32.5: must be a whole number, got a number"),
        ({"steps": True}, "steps=True: must be a whole number, got true or false"),
        ({"seed": "1"}, "seed='1': must be a whole number, got a text"),
        ({"resume": "yes"}, "resume='yes': must be true or false, got a text"),
        ({"timeout_s": None}, "timeout_s=None: must be a number"),
        ({"timeout_s": math.inf}, "timeout_s=inf: must be a finite number"),
        ({"transport": "udp"}, "transport='udp': must be one of 'shared', 'tcp'"),
        ({"reshape": [2]}, r"reshape=\[2\]: must be a table, got a list"),
        ({"reshape": {0: 1}}, "must be a whole number >= 1 as a key"),
        ({"batch_growth": 3}, "batch_growth=3: must be a table, got a whole number"),
        ({"out": 5}, "out=5: must be a folder or its URL"),
        ({"until": 5}, "until=5: must be a text such as accuracy=0.97"),
        ({"until": "accuracy"}, "until='accuracy': must be written accuracy=0.97"),
        ({"until": {"accuracy": "0.97"}}, "accuracy must be a number, not '0.97'"),
        ({"until": {"accuracy": 97}}, "97 % is accuracy=0.97"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_of_another_type_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pt.RunOptions(**options)


def test_options_as_the_command_line_writes_them() -> None:
    given = pt.RunOptions(until="accuracy=0.97, loss=0.1", batch_size=np.int64(8), lr=np.float32(0.5))  # type: ignore[arg-type]
    assert given.until == {"accuracy": 0.97, "loss": 0.1}
    assert (given.batch_size, given.lr) == (8, 0.5)


def test_a_job_a_strategy_and_a_cluster_by_name() -> None:
    """The same run as with objects, to the bit; anything else is refused before something starts."""
    named = pt.simulate("digits", "local_sgd(period=2)", 2, "ethernet(gbit_per_s=2)", steps=3)
    cluster, local_sgd = pt.cluster.ethernet(gbit_per_s=2), pt.strategies.local_sgd(period=2)
    assert named == pt.simulate(pt.jobs.find("digits"), local_sgd, 2, cluster, steps=3)
    assert pt.explain("local_sgd(period=2)") == pt.explain(local_sgd)
    for run in (pt.run, pt.simulate):
        for job in (nn.Linear, nn.Linear(2, 2)):
            with pytest.raises(ValueError, match=r"write pt\.Job\(model=lambda: Linear\(…\)"):
                run(job, local_sgd)  # type: ignore[operator]
        for workers in ("2", 2.0, True, 0):
            with pytest.raises(ValueError, match="workers"):
                run("digits", local_sgd, workers)  # type: ignore[operator]
        with pytest.raises(TypeError, match=r"write local_sgd\(\)"):
            run("digits", pt.strategies.local_sgd)  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"write ethernet\(\)"):
        pt.simulate("digits", local_sgd, 2, pt.cluster.ethernet)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers"):
        pt.compare("digits", "sync_sgd, adasum", 1.5)  # type: ignore[arg-type]


NUMBERS = {"int", "float", "bool", "int | None", "float | None", "Strategy | None", "Graph"}


@pytest.mark.parametrize("name", pt.strategies.__all__)
def test_arguments_of_another_type_are_refused_by_every_strategy(name: str) -> None:
    """The strategy's constructor refuses, not a worker."""
    function = getattr(pt.strategies, name)
    for argument in signature(function).parameters.values():
        for given in ("exponential", [1], object):
            if argument.annotation in NUMBERS:
                with pytest.raises((ValueError, TypeError), match=r"=…\): expected |, and .* does not; use one of"):
                    function(**{argument.name: given})


def test_what_a_run_raises_can_be_caught_by_name() -> None:
    """Internal errors are not offered."""
    others = [name for name in pt.errors.__all__ if not issubclass(getattr(pt.errors, name), pt.errors.PolytempoError)]
    assert others == ["Incompatible", "Preempted"]  # a wrong argument, and an end that was asked for
    assert set(dir(pt)) == set(pt.__all__)
    assert all(getattr(pt, name) is not None for name in pt.__all__)
    assert "native" not in pt.__all__
    assert not {"slices", "permutation", "random_rows"} & set(pt.data.__all__)


NARROWER = {
    ("attach", "seed"): "int | None",  # None: random numbers are the program's own
    ("attach", "on_drift"): "OnDrift",
    ("pipeline", "on_drift"): "Literal['stop', 'ignore']",
    ("pipeline", "schedule"): "Schedule | Strategy | str",  # of stages
    ("launch", "timeout_s"): "float | None",  # None: no limit
    ("elastic", "min_workers"): "int",
    ("lbfgs", "data"): "Path | None",
    ("lbfgs", "out"): "Path | None",
    ("schedule", "out"): "Path | None",
    ("schedule", "data"): "Sequence[object]",
    ("score", "data"): "Any",
    ("plan_layers", "batch_size"): "int",
    ("compress", "epochs"): "float",
    ("compress", "out"): "str | Path | None",
}
"""Keywords with an option's name and another type, with the reason where the name does not say it."""


def test_an_option_has_one_type_in_all_functions() -> None:
    types = {name: hint.__forward_arg__ for name, hint in OptionKeywords.__annotations__.items()}
    others = {
        (name, each.name): str(each.annotation)
        for module in (pt, pt.interop, pt.training)
        for name in module.__all__
        if isfunction(function := getattr(module, name))
        for each in signature(function).parameters.values()
        if each.name in types and each.annotation != types[each.name]
    }
    assert others == NARROWER
