"""`polytempo calibrate --device` on a device: its kernels and copies, by two processes that share it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from device.crew import together
from polytempo.cluster import Cluster, Link, Speeds
from polytempo.cluster.cluster_file import from_toml
from polytempo.cluster.measured import to_toml
from polytempo.device import backend_of, num_devices
from polytempo.engines.local_engine import launch
from polytempo.runs.calibration import device_samples, kernel_samples, link_samples
from polytempo.runs.calibration.calibrate import _speeds
from polytempo.runs.calibration.measurement import _between_devices, samples_of
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

COPIES = {"to host", "from host", "to host pageable", "from host pageable"}
KERNELS = {"product", "convolution", "elementwise", "view", "scale", "copy", "check", "update SGD momentum"}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models and tensors: the times of these tests say nothing."""
    monkeypatch.setattr(kernel_samples, "_PERCEPTRONS", (((8, 8, 10), 4), ((16, 8, 10), 8)))
    monkeypatch.setattr(kernel_samples, "_CONVOLUTIONS", (((1, 2, 4), 8, 2),))
    monkeypatch.setattr(kernel_samples, "_SHAPES", ((8, 8),))
    monkeypatch.setattr(kernel_samples, "_REPEATS", 2)
    monkeypatch.setattr(device_samples, "_SIZES", (64, 4096))


def test_sums_between_devices_are_measured_where_each_process_has_one(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_samples, "_COLLECTIVE_SIZES", (8, 64, 4096))
    monkeypatch.setattr(link_samples, "_MESSAGES", 3)
    backend = backend_of(device)

    def work(world: ProcessWorld, card: torch.device) -> list[Any]:
        facts = {"backend": backend or "", "devices": num_devices()}
        return [_between_devices(world, facts | more) for more in ({}, {"devices": 1}, {"backend": ""})]

    if backend is None or num_devices() < 2:
        pytest.skip("no group between two devices")
    for own, shared, without in together(device, 2, work):
        assert [kind for kind, _ in own] == ["all_reduce", "all_gather", "all_to_all"]
        assert all(seconds > 0 for _, taken in own for _, seconds in taken)
        assert shared == without == []


@pytest.mark.usefixtures("few")
def test_a_device_is_measured_by_processes_that_share_it(device: str) -> None:
    def measured(rank_info: Any) -> Any:
        return device_samples.device_answer(f"{device}:0", rank_info.rank)

    told = launch(measured, 2, threads=1)
    assert {(each["kind"], each["devices"]) for each in told} == {(device, 1)}
    samples = [sample for each in told for sample in samples_of(each["samples"])]
    assert all(sample.seconds >= 0 for sample in samples)
    found = device_samples.assembled_device(told, 2, _speeds(samples))
    names = {name for name, _ in found.speeds.kernels}
    assert names >= KERNELS | COPIES
    assert any(name.startswith("encode ") for name in names)
    assert any(name.startswith("low_rank ") for name in names)
    host = Speeds((("elementwise", found.speeds.of("copy")),))
    cluster = from_toml(to_toml(Cluster(network=Link(0.0, 1e9), speeds=host, device=found)))
    assert cluster.device == found
    assert cluster.on_device().computes_on == device


def test_the_cpu_has_no_answer(device: str) -> None:
    assert device_samples.device_answer("cpu", 0) is None
