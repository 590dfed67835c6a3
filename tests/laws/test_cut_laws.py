"""A cut model is the model: outputs, gradients, buffers and names, with any cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cut_models import MODELS, chained, loss_of
from polytempo.partition.cut import Cut
from polytempo.partition.cutting import cut

every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, tuple[Any, ...]]:
    torch.manual_seed(1)
    model, sample = MODELS[name][0]().to(dtype), MODELS[name][1]()
    each = sample.values() if isinstance(sample, Mapping) else sample
    values = tuple(
        value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in each
    )
    return model, dict(zip(sample, values, strict=True)) if isinstance(sample, Mapping) else values, values


class InThree(NamedTuple):
    """A model, its arguments, and a cut of it for several laws."""

    model: nn.Module
    sample: Any
    values: tuple[Any, ...]
    found: Cut


@cache
def in_three(name: str) -> InThree:
    model, sample, values = made(name)
    return InThree(model, sample, values, cut(model, 3, sample=sample, by="traffic"))


def called(model: nn.Module, sample: Any) -> Any:
    return model(**sample) if isinstance(sample, Mapping) else model(*sample)


def tensors(output: Any) -> list[Tensor]:
    return list(output.values()) if isinstance(output, dict) else [output]


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def adds_otherwise(found: Cut) -> bool:
    """True if a stage uses a value twice that another stage uses, too: gradients are then added in another order."""
    for value in found.values:
        for target in value.targets:
            nodes = found.stages[target].module.graph.nodes
            several = [node for node in nodes if node.name == value.name.replace(".", "_") and len(node.users) > 1]
            if several and len(value.targets) > 1:
                return True
    return False


def check_equal(model: nn.Module, sample: Any, values: tuple[Any, ...], made_cut: Cut) -> None:
    """The stages of `made_cut`, a cut of `model`, compute the bits of a copy of the model."""
    whole = deepcopy(model)
    torch.manual_seed(2)
    expected = called(whole, sample)
    loss_of(expected).backward()
    torch.manual_seed(2)
    output = chained(made_cut, values)
    assert equal(output, expected)
    for (name, one), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert other.grad is not None
        assert one.grad is not None, name
        if adds_otherwise(made_cut):
            torch.testing.assert_close(one.grad, other.grad, msg=name)
        else:
            assert torch.equal(one.grad, other.grad), name
    for (name, one), (_, other) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(one, other), name


@every_model
@pytest.mark.parametrize(("stages", "dtype"), [(1, torch.float64), (2, torch.float32), (4, torch.float64)])
def test_stages_chained_are_the_model_to_the_bit(name: str, stages: int, dtype: torch.dtype) -> None:
    model, sample, values = made(name, dtype)
    stages = min(stages, 3) if name == "recurrent" else stages
    before = {key: each.clone() for key, each in model.state_dict().items()}
    found = cut(model, stages, sample=sample)
    assert all(torch.equal(each, before[key]) for key, each in model.state_dict().items()), "cutting changes nothing"
    check_equal(model, sample, values, found)
    for module in (model, *(stage.module for stage in found.stages)):
        module.eval()
    assert equal(chained(found, values), called(model, sample))


@every_model
def test_names_stay_and_every_value_crosses_once(name: str) -> None:
    model, sample, _, found = in_three(name)
    states = [stage.module.state_dict() for stage in found.stages]
    assert {key for state in states for key in state} == set(model.state_dict())
    assert all(each.data_ptr() == model.state_dict()[key].data_ptr() for state in states for key, each in state.items())
    takes = [(value, stage.index) for stage in found.stages for value in stage.takes]
    assert len(takes) == len(set(takes))
    assert sorted(takes) == sorted((value.name, target) for value in found.values for target in value.targets)
    gives = [(value, stage.index) for stage in found.stages for value in stage.gives]
    assert sorted(gives) == sorted((value.name, value.source) for value in found.values)
    assert all(value.source < min(value.targets) for value in found.values)
    assert cut(model, sample=sample, by=found.begins).values == found.values, "begins say where the cut is"


@every_model
def test_layouts_are_those_of_the_values_that_are_sent(name: str) -> None:
    _, _, values, found = in_three(name)
    known: dict[str, Tensor] = {}
    shorter = tuple(value[:3] if isinstance(value, Tensor) and len(value) > 1 else value for value in values)
    for stage in found.stages:
        taken = (*found.inputs_of(stage.index, shorter), *(known[each] for each in stage.takes))
        known |= dict(zip(stage.gives, stage.module(*taken), strict=False))
    assert found.layouts(*shorter) == {key: (tuple(each.shape), each.dtype) for key, each in known.items()}


@pytest.mark.parametrize("name", ["tied", "tied by name"])
def test_tied_weights_are_shared_or_together(name: str) -> None:
    model, sample, _ = made(name)
    found = cut(model, 3, sample=sample)
    last = "head.weight" if name == "tied by name" else "characters.weight"
    assert found.shared == {"characters.weight": {0: "characters.weight", 2: last}}
    with pytest.raises(ValueError, match="at most 1 part"):
        cut(model, 3, sample=sample, tied="together")


def test_no_cut_into_two_sends_less_than_the_least() -> None:
    """A residual net is not a chain: two stages' value is sent twice, and its gradient comes back from both."""
    model, sample, _ = made("residual")

    def sent(found: Cut) -> int:
        layouts = found.layouts(*sample)
        assert all(value.requires_grad for value in found.values)
        bytes_of = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in layouts.items()}
        return sum(2 * bytes_of[value.name] * len(value.targets) for value in found.values)

    places = [f"layers.{number}{part}" for number in range(1, 5) for part in ("", ".1")] + ["relu", "relu_1", "tanh_1"]
    least = min(sent(cut(model, sample=sample, by=[name])) for name in [*places, "mul", "top"])
    assert sent(cut(model, 2, sample=sample, by="traffic", within=math.inf)) == least
