"""Layer plans: the table and the scaling of FireCaffe from traced models, choices, and figures worked out by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import log2

import pytest
import torch
from torch import nn

from paper_models import IMAGE, GoogLeNet, alexnet, nin, vgg19
from polytempo.collectives import halving_doubling_price, ring_price, tree_price
from polytempo.partition.plan import LayerPlan, LayerVolume, Reduction, ScalingLaw, chosen, volumes
from polytempo.partition.plan.choice import exchange_seconds
from polytempo.server.worker.transforms import server_price

BATCH = 1024
RING = Reduction("ring", ring_price)


def traced(model: Callable[[], nn.Module]) -> tuple[LayerVolume, ...]:
    with torch.device("meta"):
        return volumes(model(), torch.empty(2, *IMAGE))


def planned(model: Callable[[], nn.Module], workers: int = 32) -> LayerPlan:
    return chosen(traced(model), workers=workers, batch_size=BATCH, latency_s=0.0, bytes_per_s=1.25e9, reduction=RING)


# ------------------------------------------------------------------ the paper's figures

TABLE: list[tuple[Callable[[], nn.Module], float, float, float]] = [
    (nin, 30.4, 5793, 6.76),
    (alexnet, 249.5, 1683, 6.98),
    (GoogLeNet, 54, 19100, 9.7),
    (vgg19, 575, 42700, 120),
]
"""Network, |W| and |D| in MB, and floating-point operations in Tflop, of 1,024 samples: within 1 % as the paper has it,
where that rounds to less (30, 5800, 249, 1680, 6.7, 7.0) as its formulas give it."""


@pytest.mark.parametrize(("model", "weights", "inputs", "flops"), TABLE, ids=["nin", "alexnet", "googlenet", "vgg19"])
def test_the_table_of_the_paper(model: Callable[[], nn.Module], weights: float, inputs: float, flops: float) -> None:
    found = planned(model)
    assert found.weight_bytes / 1e6 == pytest.approx(weights, rel=0.01)
    assert found.input_bytes / 1e6 == pytest.approx(inputs, rel=0.01)
    assert found.flops / 1e12 == pytest.approx(flops, rel=0.01)


def test_nin_scales_as_by_a_tree_and_not_as_by_a_parameter_server() -> None:
    """13 times on 32 workers at 256 samples; then the paper has 23 on 32 and 39 on 128 workers, at 1,024 samples."""
    tree = ScalingLaw.calibrated(tree_price, 13.0, 32, 256)
    assert tree.speed_up(32, 256) == pytest.approx(13.0)
    assert tree.speed_up(32, 1024) == pytest.approx(23.4, abs=0.05)
    assert tree.speed_up(128, 1024) == pytest.approx(42.0, abs=0.1)
    assert abs(tree.speed_up(128, 1024) - 39) < 0.1 * 39
    server = ScalingLaw.calibrated(server_price, 13.0, 32, 256)
    assert server.speed_up(32, 1024) == pytest.approx(23.4, abs=0.05)
    assert server.speed_up(128, 1024) == pytest.approx(18.7, abs=0.05)
    assert abs(server.speed_up(128, 1024) - 39) > 0.5 * 39
    with pytest.raises(ValueError, match="32 workers cannot have been 40 times as fast as one"):
        ScalingLaw.calibrated(tree_price, 40.0, 32, 256)


def test_a_parameter_server_of_one_shard_takes_128_sevenths_of_a_trees_time() -> None:
    seconds = {name: price(128, 30e6, 0.0, 1e9).seconds for name, price in (("s", server_price), ("t", tree_price))}
    assert seconds["s"] / seconds["t"] == pytest.approx(128 / log2(128))


@pytest.mark.parametrize(("workers", "shards", "times"), [(8, 1, 16), (8, 4, 4), (8, 8, 2), (8, 100, 2)])
def test_shards_share_the_load_until_a_workers_own_link_is_full(workers: int, shards: int, times: int) -> None:
    assert server_price(workers, 1e9, 0.5, 1e9, shards=shards).seconds == pytest.approx(1.0 + times)


# ------------------------------------------------------------------ data or model


def test_alexnets_wide_layers_go_by_model_parallelism() -> None:
    """fc6 151 MB of weights and 38 MB of inputs; fc7 67 and 17; fc8 16.4 and 16.8, by 1,024 samples: just not."""
    plan = planned(alexnet)
    assert plan.model_parallel == ("9", "12")
    assert {each.volume.kind for each in plan.layers if each.way == "data"} == {"convolution", "linear"}
    by_name = {each.volume.name: each for each in plan.layers}
    assert by_name["9"].data_bytes == 4 * 9216 * 4096
    assert by_name["9"].model_bytes == 4 * BATCH * 9216
    assert by_name["15"].data_bytes < by_name["15"].model_bytes
    saved = plan.bytes_of("data") - plan.bytes_of("hybrid")
    assert saved == 4 * (9216 * 4096 + 4096 * 4096) - 4 * BATCH * (9216 + 4096)
    assert plan.bytes_of("model") == plan.input_bytes


@pytest.mark.parametrize("model", [nin, GoogLeNet], ids=["nin", "googlenet"])
def test_convolutional_networks_go_by_data_parallelism(model: Callable[[], nn.Module]) -> None:
    plan = planned(model)
    assert plan.model_parallel == ()
    assert plan.bytes_of("hybrid") == plan.bytes_of("data") == plan.weight_bytes


def test_a_smaller_batch_makes_model_parallelism_pay_for_more_layers() -> None:
    layers = traced(alexnet)
    found = [
        chosen(layers, workers=4, batch_size=b, latency_s=0, bytes_per_s=1e9, reduction=RING).model_parallel
        for b in (64, 1024, 8192)
    ]
    assert [len(each) for each in found] == [3, 2, 0]


def test_seconds_count_latency_and_the_outputs_that_go_back() -> None:
    """A layer of 1,000 inputs and 1,000 outputs, 4 workers, 100 samples: |D| is 0.4 MB, and the outputs as much."""
    (layer,) = volumes(nn.Sequential(nn.Linear(1000, 1000, bias=False)), torch.empty(2, 1000).requires_grad_())
    assert layer.gradient
    expected = 4 * 0.01 + 0.75 * (2 * 0.4 + 2 * 0.4 / 4)
    assert exchange_seconds(layer, 4, 100, 0.01, 1e6) == pytest.approx(expected)
    common = {"workers": 4, "batch_size": 100, "bytes_per_s": 1e6, "reduction": RING}
    assert chosen([layer], by="seconds", latency_s=0.01, **common).model_parallel == ("0",)
    wide = LayerVolume("wide", "linear", 10_000, inputs=10, outputs=1000, features=1000)
    assert chosen([wide], latency_s=0.0, **common).model_parallel == ("wide",)
    assert chosen([wide], by="seconds", latency_s=0.0, **common).model_parallel == ()


def test_a_step_is_one_reduction_of_what_goes_by_data_and_each_exchange_of_the_others() -> None:
    plan = planned(alexnet)
    data = sum(each.volume.gradient_bytes for each in plan.layers if each.way == "data")
    exchanges = [each.model_s for each in plan.layers if each.way == "model"]
    expected = ring_price(32, data, 0.0, 1.25e9).seconds + sum(exchanges)
    assert plan.seconds_of("hybrid") == pytest.approx(expected)
    halving = plan.seconds_of("data", Reduction("halving_doubling", halving_doubling_price))
    assert halving == pytest.approx(plan.seconds_of("data"))
    assert plan.seconds_of("data", Reduction("tree", tree_price)) > 5 * plan.seconds_of("data")


# ------------------------------------------------------------------ volumes of a layer


@pytest.mark.parametrize("model", [nin, alexnet, vgg19], ids=["nin", "alexnet", "vgg19"])
def test_operations_for_a_byte_are_those_of_das_whatever_kernel_and_features(model: Callable[[], nn.Module]) -> None:
    """1.5 · width · height · samples where sending is hidden by receiving, half of it where it is not."""
    for layer in traced(model):
        if layer.kind == "convolution":
            places = layer.products / layer.weights
            assert layer.flops_per_byte(8) == 1.5 * places * 8
            assert layer.flops_per_byte(8, overlap=0.0) == 1.5 * places * 8 / 2
    places = [layer.products / layer.weights for layer in traced(alexnet) if layer.kind == "convolution"]
    assert places == [55 * 55, 27 * 27, 13 * 13, 13 * 13, 13 * 13]


def test_volumes_of_embeddings_attention_and_layers_called_twice() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.twice = nn.LayerNorm(8), nn.Linear(8, 8)
            self.scores, self.unused = nn.Linear(8, 100, bias=False), nn.Linear(8, 2)
            self.scores.weight = self.table.weight

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            x = self.table(indices)
            x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
            return self.scores(self.twice(self.twice(x)))  # type: ignore[no-any-return]

    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = {each.name: each for each in volumes(model, torch.zeros(3, 5, dtype=torch.long))}
    assert list(found) == ["table", "attention", "norm", "twice", "scores", "unused"]
    table, attention, twice, scores = (found[name] for name in ("table", "attention", "twice", "scores"))
    assert (table.kind, table.weights, table.inputs, table.outputs) == ("embedding", 800, 5, 40)
    assert (table.input_itemsize, table.gradient, table.tied) == (8, False, True)
    assert (attention.kind, attention.weights) == ("attention", 4 * 64)
    assert (attention.inputs, attention.products) == (80, 4 * 40 * 8 + 2 * 40 * 5)
    assert (twice.inputs, twice.outputs, twice.products) == (80, 80, 640)
    assert (scores.weights, scores.tied, found["unused"].inputs) == (0, True, 0)
    assert found["norm"].kind == "other"
    plan = chosen(list(found.values()), workers=2, batch_size=1, latency_s=0, bytes_per_s=1, reduction=RING)
    assert {each.way for each in plan.layers if each.volume.tied or each.volume.kind in ("attention", "other")} == {
        "data"
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ------------------------------------------------------------------ mistakes


class Told(logging.Handler):
    """A logger's messages."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def test_what_cannot_be_planned_is_refused(request: pytest.FixtureRequest) -> None:
    stack, log = Told(), logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(stack)
    request.addfinalizer(lambda: log.removeHandler(stack))
    with pytest.raises(ValueError, match="the sample has no tensor with samples"):
        volumes(nn.Linear(2, 2), 3)
    with pytest.raises(ValueError, match=r"cannot be seen on the sample, without values: RuntimeError: .*"):
        volumes(nn.Linear(2, 2), torch.ones(3, 5))
    assert not stack.told, "torch would also log its own stack"
    with pytest.raises(ValueError, match="no layers with parameters"):
        volumes(nn.ReLU(), torch.ones(3, 5))
    common = {"latency_s": 0.0, "bytes_per_s": 1.0, "reduction": RING}
    for wrong in (0, 2.5, "2"):
        with pytest.raises(ValueError, match=f"workers={wrong!r}: must be a whole number, at least 1"):
            chosen([], workers=wrong, batch_size=4, **common)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='by=\'time\': must be "bytes" or "seconds"'):
        chosen([], workers=2, batch_size=4, by="time", **common)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 shard, got 0"):
        server_price(4, 1.0, 0.0, 1.0, shards=0)
