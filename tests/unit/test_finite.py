"""Values that are not finite: found in tensors of any kind, named, and sent to another process."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.core import Bundle
from polytempo.training.step.guard import Guard, check_saved, first_bad, unfinite_names

TENSORS: dict[str, Tensor] = {
    "float64": torch.ones(5, 7, dtype=torch.float64),
    "float32 that is not contiguous": torch.ones(5, 7).T,
    "bfloat16": torch.ones(5, 7, dtype=torch.bfloat16),
    "float8": torch.ones(5, 7).to(torch.float8_e5m2),
    "complex": torch.ones(5, 7, dtype=torch.complex64),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_the_first_value_is_found_in_every_kind_of_tensor(kind: str, value: float) -> None:
    good = TENSORS[kind]
    assert first_bad([("a", good), ("b", torch.arange(3)), ("empty", good[:0])]) is None
    bad = good.to(torch.complex64 if good.is_complex() else torch.float64).clone()
    bad[1, 2] = value
    found = first_bad([("a", good), ("b", bad.to(good.dtype))])
    assert found is not None
    assert found.name == "b"
    assert str(found.value) == str(value)


def test_large_values_are_no_infinities_and_rows_are_looked_at() -> None:
    assert first_bad([("a", torch.full((9,), torch.finfo(torch.float32).max))]) is None
    rows = torch.sparse_coo_tensor([[1, 3]], torch.tensor([[1.0, 2.0], [3.0, math.nan]]), (5, 2), check_invariants=True)
    assert first_bad([("rows", rows)]) is not None


def test_a_mask_of_infinities_that_was_there_from_the_beginning_hinders_no_checkpoint() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    unchecked = unfinite_names(model)
    assert unchecked == {"mask"}
    saved = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    check_saved(saved, unchecked, step=3, rank=1)
    saved["model/weight"] = torch.tensor([[1.0, math.nan]])
    with pytest.raises(
        pt.errors.NotFinite, match="rank 1, step 2: element 1 of parameter 'weight' is nan, so the checkpoint"
    ):
        check_saved(saved, unchecked, step=3, rank=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_another_process_can_raise_the_same_error(value: float) -> None:
    error = pt.errors.NotFinite("", 3, value, "the gradient of 'w'", step=5, rank=2, parameter="w", advice="look at it")
    again = pt.errors.NotFinite.from_facts(json.loads(json.dumps(error.facts)))
    assert str(again) == str(error) == f"rank 2, step 5: element 3 of the gradient of 'w' is {value}, look at it"
    assert (again.step, again.rank, again.parameter, str(again.value)) == (5, 2, "w", str(value))


def test_a_codec_learns_its_step_once() -> None:
    error = pt.errors.NotFinite("one_bit()", 0, math.nan, "w").at(4)
    assert (error.step, error.at(5).step) == (4, 4)
    assert str(error).startswith("step 4: element 0 of w is nan, which one_bit() cannot encode")


def test_a_loss_that_only_its_parameters_explain() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.bias.fill_(math.inf)
    guard = Guard(model, dict(model.named_parameters()))
    with pytest.raises(
        pt.errors.NotFinite, match="the loss is inf, because element 0 of parameter 'bias' is inf"
    ) as caught:
        guard.loss(model(torch.ones(1, 2)).sum(), 7, 1)
    assert (caught.value.step, caught.value.rank, caught.value.parameter) == (7, 1, "bias")


def test_looking_packs_no_bundle() -> None:
    model = nn.Linear(2, 1)
    guard = Guard(model, dict(model.named_parameters()))
    bundle = Bundle({"weight": torch.ones(1, 2), "bias": torch.tensor([math.nan])})
    with pytest.raises(pt.errors.NotFinite, match="element 0 of the gradient of 'bias' is nan"):
        guard.bundle(bundle, 0, 0)
    assert not bundle.packed
    assert bundle.flat.isnan().any()
    with pytest.raises(pt.errors.NotFinite, match="element 0 of the gradient of 'bias' is nan"):
        guard.bundle(bundle, 0, 0)
