"""Networks of the scaling curves: parameters and operations of their papers; a ring is faster than servers."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import polytempo as pt
from benchmark_module import benchmark


@pytest.fixture(scope="module")
def networks() -> ModuleType:
    return benchmark("scaling/networks.py")


@pytest.mark.parametrize(
    ("name", "side", "parameters", "billions"),
    [
        ("InceptionV3", 299, 23_834_568, 5.71),
        ("resnet101", 224, 44_549_160, 7.80),
        ("vgg16", 224, 138_357_544, 15.47),
    ],
)
def test_parameters_and_multiplications(
    networks: ModuleType, name: str, side: int, parameters: int, billions: float
) -> None:
    with torch.device("meta"):
        model: nn.Module = getattr(networks, name)()
        image = torch.zeros(1, 3, side, side)
    with FlopCounterMode(display=False) as counter:
        assert model.eval()(image).shape == (1, 1000)
    assert sum(each.numel() for each in model.parameters()) == parameters
    assert counter.get_total_flops() / 2e9 == pytest.approx(billions, rel=0.005)


def test_the_auxiliary_head_of_inception(networks: ModuleType) -> None:
    with torch.device("meta"):
        model = networks.InceptionV3(auxiliary=True)
        scores = model(torch.zeros(2, 3, 299, 299))
    assert [each.shape for each in scores] == [(2, 1000), (2, 1000)]
    assert sum(each.numel() for each in model.parameters()) == 27_161_264


def test_a_ring_scales_and_servers_lose(networks: ModuleType) -> None:
    """Eight GPUs on two hosts with 25 Gbit/s, of a speed that makes 142 images a second of one."""
    cluster = pt.cluster.ethernet(gbit_per_s=25, workers_per_host=4, gflops=4862)
    found = {}
    for strategy in (pt.strategies.sync_sgd(route=pt.collectives.ring), pt.strategies.backup_workers(0, shards=2)):
        ends = [
            pt.simulate(networks.inception_v3, strategy, 8, cluster, meta=True, steps=steps).seconds for steps in (2, 4)
        ]
        found[strategy.name.partition("(")[0]] = 64 / 142 / ((ends[1] - ends[0]) / 2)
    assert found["sync_sgd"] > 0.95
    assert 0.5 < found["backup_workers"] < 0.75
