"""The law of branches on threads: a pass has the bits of plain execution.

`BRANCH_MODELS=500` searches for more than the few models of every run.
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from branch_models import WIDTH, Drawn, Towers, trained
from polytempo.partition.branches import threads

SEEDS = range(int(os.environ.get("BRANCH_MODELS", "3")))


def equal(one: Any, other: Any) -> bool:
    """Bits: where both are NaN they are equal, where one is missing both are."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if one is None or other is None:
        return one is other
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not equal(one[name], other[name])]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_model_computes_the_same_bits(seed: int) -> None:
    """Training with dropout and batch norm, a second step with present gradients, and evaluation."""
    torch.manual_seed(seed)
    model = Drawn(seed)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some have no branches
        threads(inter=2 + seed % 2, least_operations=0).apply(model)
        for training in (True, True, False):
            model.train(training), plain.train(training)
            x = torch.randn(4, WIDTH)
            found = []
            for each in (model, plain):
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    found.append(trained(each, x, needs_gradient=seed % 2 == 0))
            assert differences(*found) == []


def test_three_uses_of_one_layer_are_summed_in_order() -> None:
    """a + b + c is not a + (b + c): each tower's gradient of the common layer is added separately."""

    class Siamese(Towers):
        def forward(self, x: Tensor) -> Tensor:
            tower = self.towers[0]
            return self.scores(torch.cat([tower(x), tower(x * 1.7 + 1), tower(x.sin())], 1))

    torch.manual_seed(1)
    model = Siamese(8, 3)
    plain, x = copy.deepcopy(model), torch.randn(5, 8)
    threaded = threads(inter=3, least_operations=0).apply(model)
    assert differences(trained(model, x), trained(plain, x)) == []
    assert threaded.parts is not None
    used = [dict(task.code.modules) for task in threaded.parts.regions[0].tasks]
    assert sum("towers.0.0" in modules for modules in used) == 3


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_caller_s_modes_hold_on_all_threads(dtype: torch.dtype | None) -> None:
    """Autocast, no_grad and inference mode."""
    torch.manual_seed(2)
    model = Towers()
    plain, x = copy.deepcopy(model), torch.randn(5, 8)
    threads(inter=2, least_operations=0).apply(model)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        assert differences(trained(model, x), trained(plain, x)) == []
        with torch.no_grad():
            answer = model(x)
            assert not answer.requires_grad
            assert equal(answer, plain(x))
        with torch.inference_mode():
            assert model(x).is_inference()
            assert equal(model(x), plain(x))
