"""The cost of a step: counted without values, and divided among buckets by operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost, counted, meta_model

CLUSTER = pt.cluster.ethernet(gbit_per_s=1, gflops=0.1)


class Pictures(nn.Module):
    """Most operations are the convolution's, most parameters the last layer's, as in VGG-16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.head = nn.Linear(4 * 36, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().flatten(1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x)).mean(1)


def job(model: type[nn.Module], x: Tensor) -> pt.Job:
    return pt.Job(
        model=model,
        data=lambda folder: pt.Data(TensorDataset(x, torch.zeros(len(x), dtype=torch.long))),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=2,
    )


PICTURES = job(Pictures, torch.zeros(8, 1, 6, 6))
WORDS = job(Words, torch.zeros(8, 5, dtype=torch.long))
HEAD, CONV = 2 * 144 * 10, 2 * 36 * 4 * 9
"""Operations forward for a sample; the convolution's input needs no gradient."""


def test_operations_at_each_gradient() -> None:
    found = counted(PICTURES, Pictures(), PICTURES.data(None), 0)
    assert found.flops_per_sample == 3 * HEAD + 2 * CONV
    backward = 2 * HEAD + CONV
    assert found.done == {"head.weight": 2 * HEAD / backward, "conv.weight": 1.0}


def test_backward_is_divided_among_buckets_by_operations() -> None:
    net = Pictures()
    replica = Replica(net, torch.optim.SGD(net.parameters()), pt.strategies.sync_sgd(), 2, bucket_bytes=64)
    assert [list(bucket.parameters) for bucket in replica.buckets] == [["head.weight"], ["conv.weight"]]
    by_operations = StepCost(1.0, done={"head.weight": 0.25, "conv.weight": 0.75})
    assert by_operations.shares(replica) == (0.25, 0.75)  # nothing is left behind the last one
    late = StepCost(1.0, done={"head.weight": 1.0, "conv.weight": 0.5})
    assert late.shares(replica) == (1.0, 0.0)  # an exchange waits for those before it
    assert StepCost(1.0).shares(replica) == (1440 / 1476, 36 / 1476)


@pytest.mark.parametrize("counted_job", [PICTURES, WORDS], ids=["pictures", "words"])
def test_counts_without_values_are_the_same(counted_job: pt.Job) -> None:
    """A fused kernel of attention on the CPU was not counted."""
    data = counted_job.data(None)
    with_values = counted(counted_job, counted_job.model(), data, 0)
    assert with_values == counted(counted_job, meta_model(counted_job), data, 0)
    assert set(with_values.done) == {name for name, _ in counted_job.model().named_parameters()}


def test_a_parameter_without_a_gradient_waits_for_the_end() -> None:
    found = counted(WORDS, Words(), WORDS.data(None), 0).done
    assert found["unused"] == 1.0
    assert found["layer.linear2.weight"] < found["layer.self_attn.out_proj.weight"] < found["table.weight"]


class OnlySizes(nn.Sequential):
    """A model that must not be made with values: 10^9 parameters would be 4 GB."""

    def __init__(self) -> None:
        assert torch.empty(0).device.type == "meta"
        super().__init__(nn.Flatten(), *(nn.Linear(36, 36) for _ in range(4)))


@pytest.mark.parametrize(
    "strategy",
    ["sync_sgd()", "split(rules='auto', parts=2)", "split(rules='*', parts=2)", "hybrid()", "gpipe(stages=2)"],
)
def test_a_run_without_values_makes_no_model_with_values(strategy: str) -> None:
    if "'*'" in strategy:
        made = pt.strategies.split({"1": "column", "2": "row"}, parts=2)
    else:
        made = pt.parse_strategy(strategy)
    result = pt.simulate(job(OnlySizes, torch.zeros(8, 1, 6, 6)), made, 2, CLUSTER, meta=True, steps=2)
    assert result.seconds > 0


class ByValues(nn.Sequential):
    """A model that looks at its values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + float(self[1].weight.sum() > 1e9))


def test_a_model_that_looks_at_values_is_counted_with_them() -> None:
    x = torch.zeros(8, 1, 6, 6)
    looking, plain = (
        job(lambda made=made: made(nn.Flatten(), nn.Linear(36, 10)), x) for made in (ByValues, nn.Sequential)
    )
    times = [pt.simulate(each, "sync_sgd()", 2, CLUSTER, meta=True, steps=2).seconds for each in (looking, plain)]
    assert times[0] == times[1] > 0
