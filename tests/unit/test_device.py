"""The device module on a host without an accelerator. What it does on one is in `tests/device`."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from polytempo import device
from polytempo.worlds.process import process_world

if torch.accelerator.is_available():
    pytest.skip("this host has an accelerator", allow_module_level=True)


def test_a_host_alone_has_no_accelerator() -> None:
    assert device.accelerator_kind() is None
    assert device.num_devices() == 0
    assert device.visible_devices() == []
    assert device.current_device() is None
    assert not device.accelerator_in_use()


@pytest.mark.parametrize(("kind", "backend"), [("cpu", None), ("mps", None), ("no such kind", None), (None, None)])
def test_kinds_without_a_backend_of_their_own(kind: str | None, backend: str | None) -> None:
    """gloo takes a device's bytes through the host, so it is none."""
    assert device.backend_of(kind) == backend


def test_the_hosts_backend_stays_alone() -> None:
    assert device.with_backend("polytempo") == "polytempo"


def test_where_a_tensor_lies() -> None:
    here, nowhere = torch.empty(1), torch.empty(1, device="meta")
    assert device.is_host(here)
    assert not device.is_host(nowhere)
    assert not device.on_accelerator(here)
    assert not device.on_accelerator(nowhere)


def test_seeds_and_states_of_the_host() -> None:
    device.seed_generators(7, unused_too=True)
    states, first = device.random_states(), torch.rand(3)
    assert torch.equal(device.own_random_state(), torch.get_rng_state())
    with device.kept_random_states():
        after = torch.rand(3)
    assert torch.equal(torch.rand(3), after)
    device.set_random_states(states)
    assert torch.equal(torch.rand(3), first)
    device.seed_generators(7)
    assert torch.equal(torch.rand(3), first)


def test_autocast_in_another_thread() -> None:
    layer, found = nn.Linear(2, 2), []

    def compute(modes: device.Autocast) -> None:
        with modes.set():
            found.append((layer(torch.ones(1, 2)).dtype, device.autocast_enabled()))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        modes = device.Autocast()
    for each in (modes, device.Autocast()):
        thread = threading.Thread(target=compute, args=(each,))
        thread.start()
        thread.join()
    assert found == [(torch.bfloat16, {"cpu": True}), (torch.float32, {"cpu": False})]


def test_the_host_counts_no_memory() -> None:
    assert device.device_memory(device.HOST) == (0, 0)
    device.forget_peak(device.HOST)


@pytest.mark.parametrize(
    ("devices", "hosts", "own"),
    [
        ([["d:0"], ["d:1"]], "aa", True),
        ([["d:0"], ["d:0"]], "aa", False),
        ([["d:0"], ["d:0"]], "ab", True),
        ([["d:0", "d:1"], ["d:0", "d:1"]], "aa", True),
        ([["d:0", "d:1"]] * 3, "aaa", False),
        ([["d:0"], []], "aa", False),
        ([["d:0"], []], "ab", False),
        ([[], []], "aa", False),
        ([["d:0"], ["d:1"], ["d:0"], ["d:0"]], "aabb", False),
    ],
)
def test_one_device_for_each_rank(devices: list[list[str]], hosts: str, own: bool) -> None:
    assert device.one_device_for_each(list(hosts), devices) is own


# ---------------------------------------------------------------------- waits of a device's rank


class Stream:
    """A stream that has passed its marks by `now_s`."""

    now_s = 0.0

    def mark(self, at_s: float) -> Mark:
        return Mark(self, at_s)


class Mark:
    def __init__(self, stream: Stream, at_s: float) -> None:
        self.stream, self.at_s = stream, at_s

    def query(self) -> bool:
        return self.at_s <= self.stream.now_s

    def elapsed_time(self, end: Mark) -> float:
        assert self.query()
        assert end.query()
        return 1000 * (end.at_s - self.at_s)


def test_a_rank_on_a_device_waits_as_long_as_its_stream_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead, as with NCCL, so that host times would show no wait; then it waits for its own device."""
    stream = Stream()
    marks = iter([2.0, 5.0, 9.0, 9.0, 12.0, 12.5])
    monkeypatch.setattr(process_world, "time_mark", lambda: stream.mark(next(marks)))
    world = process_world.ProcessWorld(rank=0, hosts=(0,))
    waited = []
    for passed_s in (4.0, 9.0, 20.0):
        wait = world.begin_wait()
        stream.now_s = passed_s
        world.waited(wait)
        waited.append(world.waited_s)
    assert waited == [0.0, 3.0, 3.5]


def test_a_rank_on_the_host_waits_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    world = process_world.ProcessWorld(rank=0, hosts=(0,))
    times = iter([1.0, 3.5])
    monkeypatch.setattr(world, "now_s", lambda: next(times))
    world.waited(world.begin_wait())
    assert world.waited_s == 2.5
