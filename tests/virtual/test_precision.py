"""Every strategy with 16-bit parameters: it trains as in float32, or says why it does not; overflows; bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import GROUPED, ROWS, SERVED, STAGED, Row, label
from polytempo.cluster import one_host
from polytempo.compression import int8
from polytempo.core import NotFinite, Strategy
from polytempo.spec.result import Result

_random = torch.Generator().manual_seed(0)
INPUTS = torch.randn(64, 6, generator=_random)
CLASSES = (INPUTS @ torch.randn(6, 3, generator=_random)).argmax(1)


def network() -> nn.Module:
    return nn.Sequential(
        *[nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    )


def normed() -> nn.Module:
    """The first layer's norm stays float32 beside 16-bit parameters."""
    first, *others = network().children()
    return nn.Sequential(first, nn.LayerNorm(16), *others)


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def momentum(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def job(**other: Any) -> pt.Job:
    data = pt.Data(TensorDataset(INPUTS, CLASSES), TensorDataset(INPUTS, CLASSES))
    parts: dict[str, Any] = {
        "model": network,
        "data": lambda path: data,
        "loss": nn.functional.cross_entropy,
        "optimizer": sgd,
        "lr": 0.2,
        "batch_size": 8,
    }
    return pt.Job(**(parts | other))


def trained(
    strategy: Strategy, precision: str | None, *, workers: int = 4, of: pt.Job | None = None, **more: Any
) -> Result:
    return pt.simulate(of or job(), strategy, workers, one_host(), precision=precision, threads=1, **more)


def is_refused(strategy: Strategy) -> bool:
    server = strategy.server
    return strategy.one_copy is not None or (
        server is not None and (strategy.schedule is not None or server.reassigns is not None)
    )


DECIDES = ("sign_sgd", "krum", "terngrad", "pipemare", "spectrain", "synthetic_gradients")
"""Strategies that decide by gradients or predict them, so that a little rounding may lead elsewhere."""


@pytest.mark.parametrize("row", [*ROWS, *SERVED, *STAGED, *GROUPED], ids=label)
def test_every_strategy_trains_or_is_refused_by_name(row: Row) -> None:
    strategy = row.make()
    if is_refused(strategy):
        with pytest.raises(ValueError, match=r"precision=bf16: .*" + row.name):
            trained(strategy, "bf16")
        return
    workers = strategy.stages if strategy.stages > 1 else 4
    model = normed if strategy.stages > 1 else network
    of = job(model=model, optimizer=momentum if "spectrain" in str(strategy) else sgd)
    whole, low = (trained(strategy, precision, workers=workers, of=of, steps=8) for precision in (None, "bf16"))
    assert low.precision is not None
    assert low.parameters_sha256 != whole.parameters_sha256
    assert whole.loss is not None
    if any(name in str(strategy) for name in DECIDES):
        assert low.loss is not None
        assert max(low.loss, whole.loss) < 1.3
    else:
        assert low.loss == pytest.approx(whole.loss, rel=0.02)


def test_layers_in_parts_exchange_16_bits() -> None:
    whole, low = (trained(pt.strategies.split(), precision, workers=2, steps=8) for precision in (None, "bf16"))
    assert low.loss == pytest.approx(whole.loss, rel=0.02)
    assert low.bytes_sent_per_rank < 0.6 * whole.bytes_sent_per_rank
    eight = trained(pt.strategies.split(activations=int8(), gradients=int8()), "bf16", workers=2, steps=8)
    assert eight.loss == pytest.approx(whole.loss, rel=0.02)
    assert eight.bytes_sent_per_rank < 0.8 * low.bytes_sent_per_rank, "half of the bytes for layers of 8 features"
    divided = pt.strategies.hybrid(layers="2")
    whole, low = (trained(divided, precision, workers=2, steps=8) for precision in (None, "bf16"))
    assert low.loss == pytest.approx(whole.loss, rel=0.02)
    encoded = pt.strategies.hybrid(layers="2", activations=int8(8), gradients=int8(8))
    eight = trained(encoded, "bf16", workers=2, steps=8)
    assert eight.loss == pytest.approx(whole.loss, rel=0.02)
    sent = [sum(each["forward_bytes"] + each["backward_bytes"] for each in run.layers or []) for run in (low, eight)]
    assert 0 < sent[1] < sent[0]


@pytest.mark.parametrize(
    "strategy", [pt.strategies.async_sgd(), pt.strategies.async_sgd(shards=2), pt.strategies.ssp(bound=3)], ids=str
)
def test_the_only_worker_of_a_server_makes_the_steps_of_one_alone(strategy: Strategy) -> None:
    """The shards hold the masters, and step these as the worker itself would."""
    served, alone = (trained(each, "bf16", workers=1, steps=8) for each in (strategy, pt.strategies.sync_sgd()))
    assert (served.parameters_sha256, served.loss) == (alone.parameters_sha256, alone.loss)
    assert served.parameters_sha256 != trained(strategy, None, workers=1, steps=8).parameters_sha256


def test_pushes_and_pulls_of_16_bits_carry_all_that_there_is() -> None:
    """Gradients have 16 bits anyway, and weights are rounded to 16 before they are used."""
    bf16, digits = pt.compression.bf16(), pt.jobs.find("digits")
    plain, coded = pt.strategies.async_sgd(), pt.strategies.async_sgd(codec=bf16, pull_codec=bf16)
    whole, low = (trained(each, "bf16", workers=1, of=digits, steps=8) for each in (plain, coded))
    assert whole.loss == low.loss
    assert low.bytes_sent_per_rank < 0.52 * whole.bytes_sent_per_rank
    for result, carried in ((whole, "float32"), (low, "bf16()")):
        assert result.precision is not None
        assert (result.precision["pushes"], result.precision["pulls"]) == (carried, carried)


@pytest.mark.parametrize("meta", [False, True])
def test_workers_of_a_server_send_float32_unless_codecs_say_otherwise(meta: bool) -> None:
    options: dict[str, Any] = {"meta": True} if meta else {}
    whole, low = (
        pt.simulate(job(), pt.strategies.async_sgd(), 1, one_host(), steps=6, precision=precision, **options)
        for precision in (None, "bf16")
    )
    assert whole.server is not None
    assert low.server is not None
    assert low.server["bytes_sent"] == whole.server["bytes_sent"]
    assert low.bytes_sent_per_rank == pytest.approx(whole.bytes_sent_per_rank, rel=0.01), "rows of metrics are text"
    assert low.precision is not None
    assert (low.precision["parameter_bytes"], low.precision["pushes"]) == (low.precision["master_bytes"] / 2, "float32")


@pytest.mark.parametrize("meta", [False, True])
def test_means_of_gradients_send_half_and_means_of_parameters_all(meta: bool) -> None:
    def sent(strategy: Strategy, precision: str | None) -> float:
        options: dict[str, Any] = {"meta": True} if meta else {}
        return pt.simulate(job(), strategy, 4, one_host(), steps=6, precision=precision, **options).bytes_sent_per_rank

    synchronous, local = pt.strategies.sync_sgd(), pt.strategies.local_sgd(period=3)
    assert sent(synchronous, "bf16") == sent(synchronous, None) / 2
    assert sent(local, "bf16") == sent(local, None)


def test_a_message_of_half_the_bytes_takes_half_the_links_time() -> None:
    """A link that is slow against the computation."""
    wide = job(model=lambda: nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3)))
    cluster = pt.cluster.ethernet(gbit_per_s=0.01)
    whole, low = (
        pt.simulate(wide, pt.strategies.sync_sgd(), 4, cluster, steps=4, precision=precision).seconds
        for precision in (None, "bf16")
    )
    assert low == pytest.approx(whole / 2, rel=0.05)


# ---------------------------------------------------------------------- overflows


class Spiked(nn.Module):
    """The mean squared error; the samples of one class are multiplied so that float16 gradients overflow."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        weights = torch.where(target == 0, self.times, 1.0)
        return (nn.functional.cross_entropy(output, target, reduction="none") * weights).mean()


EXCHANGES = [
    pt.strategies.sync_sgd(),
    pt.strategies.top_k_sgd(0.2, exact_below=0),
    pt.strategies.local_sgd(period=3),
    pt.strategies.delayed_sgd(delay=1),
    pt.strategies.acco(),
]


@pytest.mark.parametrize("strategy", EXCHANGES, ids=str)
def test_all_workers_leave_out_a_step_in_which_one_overflows(strategy: Strategy) -> None:
    found = trained(strategy, "fp16(loss_scale=dynamic)", of=job(loss=Spiked(64.0), lr=0.01), steps=24)
    whole = trained(strategy, None, of=job(loss=Spiked(64.0), lr=0.01), steps=24)
    assert found.precision is not None
    skipped, scale = found.precision["skipped_steps"], found.precision["loss_scale"]
    assert 1 <= skipped <= 12
    assert scale == 2.0 ** (16 - skipped)
    assert found.loss == pytest.approx(whole.loss, rel=0.5)


def test_a_scale_does_not_change_what_is_learned() -> None:
    """A power of 2 comes out again, to the bit, where nothing overflows or is too small."""
    strategy = pt.strategies.top_k_sgd(0.2, exact_below=0)
    one, other = (trained(strategy, f"fp16(loss_scale={scale})", steps=8) for scale in (512, 1024))
    assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_a_constant_scale_that_overflows_ends_the_run() -> None:
    with pytest.raises(NotFinite, match="gradient of"):
        trained(pt.strategies.sync_sgd(), "fp16(loss_scale=1e9)", steps=4)


def test_what_diverges_ends_a_run_with_a_dynamic_scale_too() -> None:
    with pytest.raises(NotFinite, match="loss"):
        trained(pt.strategies.sync_sgd(), "fp16(loss_scale=dynamic)", of=job(lr=1e6, loss=Spiked(1e30)), steps=60)


def test_pieces_and_running_statistics() -> None:
    """Batches that grow, a batch norm with float32 statistics, an average of the masters."""
    normed = job(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
    options: dict[str, Any] = {"epochs": 3, "batch_growth": {1: 2}, "ema": 0.9}
    whole, low = (trained(pt.strategies.sync_sgd(), p, of=normed, workers=2, **options) for p in (None, "bf16"))
    assert low.loss == pytest.approx(whole.loss, rel=0.02)
