"""An optimizer's state as tensors and JSON: types come back, and other state is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, NAdam, Optimizer

from polytempo.core.state import Saved
from polytempo.training.checkpoint.optimizer_state import optimizer_restore, optimizer_saved, state_device


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (2,)))


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.full_like(one, 0.5)
    optimizer.step()
    return optimizer


def kinds(value: Any) -> Any:
    """The types of a hyper-parameter, tuples' parts too."""
    if isinstance(value, tuple):
        return tuple(kinds(part) for part in value)
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def test_tensors_among_the_hyper_parameters_stay_tensors() -> None:
    def adam() -> Adam:
        rate = torch.tensor(0.1, dtype=torch.float64)
        return Adam([parameter()], lr=rate, betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False)

    before, after = stepped(adam()), adam()
    before.param_groups[0]["lr"].mul_(0.5)
    optimizer_restore(after, optimizer_saved(before))
    group = after.param_groups[0]
    assert kinds(group["lr"]) == "torch.float64"
    assert kinds(group["betas"]) == ("torch.float32", "torch.float32")
    assert torch.equal(group["lr"], before.param_groups[0]["lr"])
    assert [float(beta) for beta in group["betas"]] == [float(torch.tensor(0.8)), float(torch.tensor(0.9))]


def test_state_keeps_its_dtype_where_parameters_have_another() -> None:
    def nadam() -> NAdam:
        return NAdam([nn.Parameter(torch.ones(2, dtype=torch.float64))])

    before, after = stepped(nadam()), nadam()
    optimizer_restore(after, optimizer_saved(before))
    [own], [given] = after.state.values(), before.state.values()
    assert given["mu_product"].dtype == torch.float32
    assert {key: (value.dtype, value.tolist()) for key, value in own.items()} == {
        key: (value.dtype, value.tolist()) for key, value in given.items()
    }


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda o: o.param_groups[0].update(rule=len),
            "SGD: 'rule' of parameter group 0 is builtin_function_or_method",
        ),
        (
            lambda o: o.param_groups[0].update(mask=torch.ones(3)),
            r"'mask' of parameter group 0 is a tensor of shape \(3,\)",
        ),
        (lambda o: o.state[o.param_groups[0]["params"][0]].update(seen={1}), "SGD: state 'seen' of parameter 0 is set"),
        (lambda o: o.state.update(everywhere={"n": 1}), "SGD keeps state under 'everywhere'; only state of parameters"),
    ],
)
def test_what_json_cannot_hold_is_named(harm: Any, message: str) -> None:
    optimizer = stepped(SGD([parameter()], lr=0.1, momentum=0.9))
    harm(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer_saved(optimizer)


def test_another_number_of_parameters_is_refused() -> None:
    source = optimizer_saved(SGD([parameter()], lr=0.1))
    with pytest.raises(ValueError, match="the saved optimizer has other parameter groups"):
        optimizer_restore(SGD([parameter(), parameter()], lr=0.1), source)
    with pytest.raises(ValueError, match="no optimizer state under 'optimizer'"):
        optimizer_restore(SGD([parameter()], lr=0.1), Saved({}, {}))


@pytest.mark.parametrize(("elsewhere", "here"), [("cpu", "cpu"), ("cuda", "meta")])
def test_state_goes_where_its_parameter_is_unless_it_stays_on_the_cpu(elsewhere: str, here: str) -> None:
    optimizer = SGD([{"params": [parameter()]}, {"params": [nn.Parameter(torch.ones(2, device="meta"))]}], lr=0.1)
    assert state_device(optimizer, "optimizer/1/momentum_buffer", elsewhere).type == here
