"""Prices on a measured device, by literal tables: kernels, copies through the host, memory, and the cluster's file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.cluster import Cluster, CollectiveLink, DeviceSpeeds, JobPace, KernelSpeed, Link, Speeds
from polytempo.cluster.cluster_file import from_toml
from polytempo.cluster.measured import to_toml
from polytempo.core.calls.refusals import Incompatible
from polytempo.planner.search import Trials
from polytempo.spec.explanation import explain as explained
from polytempo.training.model.host_copies import copies_of_step

COPY = KernelSpeed(call_s=1e-3, byte_s=1e-6)
FREE = KernelSpeed()
TO, FROM = ("to host", "from host")
DEVICE = DeviceSpeeds(
    kind="cuda",
    name="A card",
    speeds=Speeds((("elementwise", FREE), (FROM, COPY), ("product", KernelSpeed(call_s=5e-3)), (TO, COPY))),
    memory_bytes=8_000,
    devices=1,
    workers=2,
)
CLUSTER = Cluster(
    network=Link(0.0, 1e15),
    memory=Link(0.0, 1e15),
    workers_per_host=2,
    cores=2,
    speeds=Speeds((("elementwise", FREE), ("product", KernelSpeed(call_s=70e-3)))),
    device=DEVICE,
    name="measured",
)
NUM_BYTES = 4 * (3 * 5 + 5)


def job() -> pt.Job:
    """A layer of 20 parameters: one product forward, and one backward."""
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :1].expand(-1, 5).contiguous())
    return pt.Job(
        model=lambda: nn.Linear(3, 5),
        data=lambda path: pt.Data(data, data),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=4,
    )


def step_s(cluster: Cluster, strategy: str = "sync_sgd()", workers: int = 2, device: str = "auto") -> float:
    result = pt.simulate(job(), strategy, workers, cluster, steps=8, device=device, threads=1)
    return result.seconds / result.steps


def with_device(**changes: object) -> Cluster:
    return replace(CLUSTER, device=replace(DEVICE, **changes))


SUM_S = 3e-3
BETWEEN = {"collectives": (("memory all_reduce", CollectiveLink(1e15, (0.0,), (SUM_S,))),), "backend": "nccl"}
PACED = replace(DEVICE.speeds, jobs=(JobPace("job", 20, 1.5, 2),))


def test_a_file_of_a_cluster_keeps_its_device() -> None:
    for cluster in (CLUSTER, with_device(speeds=PACED, **BETWEEN)):
        assert from_toml(to_toml(cluster)) == cluster
    assert "[[device_kernels]]" in to_toml(CLUSTER)


@pytest.mark.parametrize(("devices", "rounds"), [(2, 2), (1, 0)])
def test_sums_between_devices_take_the_rates_of_their_own_group(devices: int, rounds: int) -> None:
    """Two rounds of an all-reduce of two; on a shared device tensors go through the host, by its rates."""
    own = step_s(with_device(devices=devices, **BETWEEN)) - step_s(with_device(devices=devices, backend="nccl"))
    assert own == pytest.approx(rounds * SUM_S, abs=1e-9)


def test_a_job_has_a_pace_of_its_own_on_the_device() -> None:
    paced = replace(PACED, jobs=(JobPace(job().name, 20, 1.5, 2),))
    assert step_s(with_device(speeds=paced), workers=1) == pytest.approx(1.5 * 2 * 5e-3)
    assert step_s(with_device(speeds=paced), workers=1, device="cpu") == pytest.approx(2 * 70e-3)


@pytest.mark.parametrize("part", ["device", "device_kernels"])
def test_half_a_device_in_a_file_is_refused(part: str) -> None:
    alone = CLUSTER if part == "device" else replace(CLUSTER, device=None)
    text = to_toml(alone).replace("[[device_kernels]]", "[[others]]").replace("[end]", "")
    more = '[[device_kernels]]\nname = "elementwise"\ncall_s = 0.0\nbyte_s = 0.0\nflop_s = 0.0\nerror = 0.0\n'
    with pytest.raises(ValueError, match="belong together"):
        from_toml(text + ("" if part == "device" else more) + "[end]\n")


def test_workers_take_the_kernels_of_the_device_and_servers_the_hosts() -> None:
    found = CLUSTER.on_device()
    assert found.speeds is not None
    assert found.server_speeds is CLUSTER.speeds
    assert found.speeds.of("product").call_s == 5e-3
    assert (found.computes_on, found.cores, found.name) == ("cuda", None, "measured, A card")
    assert found.on_device() is found
    assert replace(CLUSTER, device=None).on_device() == replace(CLUSTER, device=None)


def test_a_step_takes_the_products_of_the_device() -> None:
    """Two products, each 5 ms there and 70 ms on the host."""
    assert step_s(CLUSTER, workers=1) == pytest.approx(2 * 5e-3)
    assert step_s(CLUSTER, workers=1, device="cpu") == pytest.approx(2 * 70e-3)


def test_tensors_of_workers_that_share_a_device_are_copied_through_the_host() -> None:
    """There and back: 1 ms a copy, and 1 µs a byte."""
    each = 1e-3 + NUM_BYTES * 1e-6
    alone = step_s(with_device(devices=2, backend="nccl"))
    assert alone == pytest.approx(2 * 5e-3)
    assert step_s(CLUSTER) - alone == pytest.approx(2 * each)
    assert step_s(with_device(devices=2)) - alone == pytest.approx(2 * each), "no group between devices"


def test_copies_of_an_exchange_in_one_of_four_steps_are_a_quarter() -> None:
    each = 1e-3 + NUM_BYTES * 1e-6
    alone, shared = (step_s(on, "local_sgd(period=4)") for on in (with_device(devices=2, backend="nccl"), CLUSTER))
    assert shared - alone == pytest.approx(2 * each / 4)


def test_copies_of_a_server_are_one_each_way() -> None:
    found = explained(pt.parse_strategy("async_sgd()"), 2, nn.Linear(3, 5))
    uses = copies_of_step([planned.exchange for planned in found.exchanges], 2, staged=False)
    assert [(use.kernel, use.calls, use.num_bytes) for use in uses] == [(TO, 1, NUM_BYTES), (FROM, 1, NUM_BYTES)]


def test_prices_change_no_bit_of_a_training() -> None:
    found = {pt.simulate(job(), "sync_sgd()", 2, each, steps=8).parameters_sha256 for each in (CLUSTER, "ethernet")}
    assert len(found) == 1


def test_a_device_of_another_kind_than_the_measured_one_is_refused() -> None:
    with pytest.raises(Incompatible, match="PT1908: device=xpu: measured was measured on A card"):
        step_s(CLUSTER, device="xpu")


def test_strategies_of_the_cpu_alone_are_priced_on_the_host() -> None:
    assert step_s(CLUSTER, "hogwild()", workers=1) == pytest.approx(2 * 70e-3, rel=0.2)


def test_workers_share_the_memory_of_a_device() -> None:
    assert [DEVICE.memory_of_each(workers) for workers in (1, 2, 4)] == [8_000, 4_000, 2_000]
    assert replace(DEVICE, devices=2).memory_of_each(2) == 8_000
    assert replace(DEVICE, memory_bytes=0).memory_of_each(2) is None


def test_a_trial_without_memory_has_not_reached_its_target() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for 3 GiB")

    found = Trials(replace(job(), loss=loss), None, CLUSTER, {"loss": 0.1}, 0).run("sync_sgd()", 2, 4, 0, 64)
    assert not found.reached
    assert "no memory for 3 GiB" in found.failed
