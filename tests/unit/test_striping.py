"""A linear layer in stripes of rows: the same function, the same state, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polytempo.partition import cut, striped, unstriped
from polytempo.partition.schedules import interleaved, pipelined_backprop
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import facts
from polytempo.partition.schedules.timetable import StageTimes, played


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 7)).double()


def test_stripes_compute_what_the_layer_does_and_their_state_is_its_own() -> None:
    whole, x = model(), torch.randn(3, 5, dtype=torch.float64)
    stripes = striped(whole, "2", 3)
    assert [len(each.weight) for each in stripes[2].stripes] == [3, 2, 2]
    torch.testing.assert_close(stripes(x), whole(x), rtol=0, atol=1e-15)
    state = unstriped(stripes.state_dict())
    assert list(state) == list(whole.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.state_dict().items())
    assert type(whole[2]) is nn.Linear


def test_each_stripe_is_a_stage_and_the_last_one_gathers() -> None:
    stripes = striped(model(), "2", 2)
    parts = cut(stripes, sample=torch.randn(3, 5, dtype=torch.float64), by=["2.stripes.0", "2.stripes.1"])
    assert [len(stage.takes) for stage in parts.stages] == [0, 1, 2]
    assert [value.targets for value in parts.values] == [(1, 2), (2,)]


def test_stripes_are_one_step_from_the_top_and_wait_for_nothing_once_the_pipeline_is_full() -> None:
    schedule = pipelined_backprop(5, stripes=3)
    assert [facts(schedule, stage).delay for stage in range(5)] == [6, 4, 2, 2, 0]
    assert [facts(schedule, stage).held for stage in range(5)] == [7, 5, 3, 3, 1]
    times = [StageTimes(1.0, 2.0), StageTimes(0.5, 1.0), *[StageTimes(1.0, 2.0)] * 3]
    assert played(schedule, 30, times).step_s == pytest.approx(3.0)
    assert played(schedule, 30, times, link_s=1.4).step_s == pytest.approx(3.0)
    assert played(pipelined_backprop(3, stripes=3), 20).bubble == pytest.approx(0.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def test_what_cannot_be_striped_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'1' is a Tanh; name an nn\.Linear"):
        striped(model(), "1", 2)
    with pytest.raises(ValueError, match="'top' is not there"):
        striped(model(), "top", 2)
    with pytest.raises(ValueError, match="has 7 rows and cannot be in 8 stripes"):
        striped(model(), "2", 8)
    with pytest.raises(ValueError, match=r"first.weight and second.weight are one tied weight"):
        striped(Tied(), "second", 2)
    with pytest.raises(ValueError, match="give stripes of 2 or less"):
        pipelined_backprop(2, stripes=3)
    with pytest.raises(ValueError, match="one part each"):
        Schedule("striped", 4, 4, interleaved(4, 4).order, parts=2, stripes=2)
