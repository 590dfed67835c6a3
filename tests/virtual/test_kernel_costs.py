"""A virtual world's charges by measured kernels, links shared by two directions, and slow spells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polytempo import strategies
from polytempo.cluster import Cluster, KernelSpeed, Link, Speeds, one_host
from polytempo.core import Port
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.jobs import find
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job_calls import data_of, model_of
from polytempo.training.step.job_profile import profiled
from polytempo.worlds import VirtualWorld

BASE = {"elementwise": KernelSpeed()}
"""Nothing costs anything except for a test's own entries."""
FREE = Link(0.0, 1e30)
PARAMETERS = 64 * 128 + 128 + 128 * 10 + 10


def seconds_a_step(kernels: dict[str, KernelSpeed], strategy: object, *, meta: bool = False, batch: int = 8) -> float:
    cluster = Cluster(FREE, FREE, speeds=Speeds(tuple((BASE | kernels).items())))
    result = simulate(find("digits"), strategy, 2, cluster, batch_size=batch, steps=2, meta=meta)  # type: ignore[arg-type]
    return result.seconds / 2


def test_a_step_charges_what_its_kernels_take() -> None:
    """64-128-10, SGD with momentum, four parameters; a batch of 8."""
    meta = True
    native, local = strategies.sync_sgd(), strategies.local_sgd(period=2)
    byte_s, call_s = KernelSpeed(byte_s=1e-6), KernelSpeed(call_s=1e-3)
    assert seconds_a_step({"update SGD momentum": byte_s}, native, meta=meta) == pytest.approx(4e-6 * PARAMETERS)
    assert seconds_a_step({"scale": call_s}, native, meta=meta) == pytest.approx(4e-3)
    assert seconds_a_step({"check": byte_s}, native, meta=meta) == pytest.approx(4e-6 * PARAMETERS)
    assert seconds_a_step({"step": call_s}, local, meta=meta) == pytest.approx(1e-3)
    assert seconds_a_step({"copy": call_s}, local, meta=meta) == pytest.approx(4e-3 / 2), "in one of two steps"
    meta = False
    flops = 2 * 8 * (64 * 128 + 128 * 10) * 2 + 2 * 8 * 128 * 10  # no gradient of the inputs
    assert seconds_a_step({"product": KernelSpeed(flop_s=1e-9)}, native, meta=meta) == pytest.approx(1e-9 * flops)


def test_a_codec_is_charged_by_what_it_encodes() -> None:
    one_bit = strategies.one_bit_sgd(exact_below=2000)
    kernel = KernelSpeed(byte_s=1e-6)
    encoded = 2 * 4 * 64 * 75  # the larger stripe has 75 of 128 rows: one rank encodes it, then the other one the sum
    assert seconds_a_step({"encode feedback(one_bit())": kernel}, one_bit) == pytest.approx(1e-6 * encoded)
    gathered = strategies.top_k_sgd(0.1)
    assert seconds_a_step({"decode feedback(top_k(ratio=0.1))": kernel}, gathered) == pytest.approx(
        1e-6 * 2 * 4 * (64 * 128 + 1280)
    )
    assert seconds_a_step({"low_rank answer": KernelSpeed(call_s=1.0)}, strategies.power_sgd(2)) == pytest.approx(2.0)


def test_a_server_takes_its_own_time() -> None:
    """Two workers push in each step, one after the other through one shard."""
    serving = Speeds((("elementwise", KernelSpeed()), ("serve", KernelSpeed(call_s=0.5))))
    free = Speeds((("elementwise", KernelSpeed()),))
    cluster = Cluster(Link(1e-6, 1e12), speeds=free, server_speeds=serving)
    result = simulate(find("digits"), strategies.async_sgd(), 2, cluster, batch_size=8, steps=10)
    assert result.seconds == pytest.approx(10 * 2 * 0.5, rel=0.1)


def test_a_worker_of_a_server_packs_and_copies() -> None:
    """Four parameters and two messages in each step, beside the search for NaN."""
    served = strategies.async_sgd()
    assert seconds_a_step({"check": KernelSpeed(call_s=1e-3)}, served) == pytest.approx(4e-3, rel=0.01)
    assert seconds_a_step({"scale": KernelSpeed(call_s=1e-3)}, served) == pytest.approx(4e-3, rel=0.01)
    assert seconds_a_step({"copy": KernelSpeed(call_s=1e-3)}, served) == pytest.approx(6e-3, rel=0.01)
    seldom = strategies.downpour(2, 1, optimizer="sgd")
    assert seconds_a_step({"copy": KernelSpeed(call_s=1e-3)}, seldom) == pytest.approx(5.5e-3, rel=0.01)


def test_steps_and_exchanges_of_a_server_cost_something_besides() -> None:
    """Each step; each push and each pull, which are half an exchange, and their bytes."""
    in_each, in_two = strategies.async_sgd(), strategies.downpour(2, 2, optimizer="sgd")
    call_s, byte_s = KernelSpeed(call_s=1e-3), KernelSpeed(byte_s=1e-6)
    for strategy, share in ((in_each, 1.0), (in_two, 0.5)):
        assert seconds_a_step({"server step": call_s}, strategy) == pytest.approx(1e-3, rel=0.01)
        assert seconds_a_step({"server exchange": call_s}, strategy) == pytest.approx(share * 1e-3, rel=0.01)
        expected_s = share * 4e-6 * PARAMETERS
        assert seconds_a_step({"server exchange": byte_s}, strategy) == pytest.approx(expected_s, rel=0.01)


def test_a_neighbours_model_is_weighted() -> None:
    scale = KernelSpeed(byte_s=1e-6)
    assert seconds_a_step({"scale": scale}, strategies.gossip()) == pytest.approx(2 * 4e-6 * PARAMETERS), (
        "as it is packed"
    )


def test_a_profile_names_the_operators_of_both_passes() -> None:
    job = find("digits")
    model = model_of(job)
    found = profiled(job, model, data_of(job, None), 0, 16)
    assert found.samples == 16
    forward = {each.operator: each.use for each in found.forward}
    assert forward["aten.addmm"][:2] == ("product", 2)
    assert forward["aten.addmm"].flops == 2 * 16 * (64 * 128 + 128 * 10)
    assert {each.operator: each.use.calls for each in found.backward}["aten.mm"] == 3
    assert found.saved_bytes >= 4 * 16 * 128, "the first layer's result"
    [product] = [use for use in found.uses("forward", 32) if use.kernel == "product"]
    assert (product.calls, product.flops) == (2, 2 * forward["aten.addmm"].flops)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("duplex", "expected_s"), [(1.0, 1.0), (0.8, 1.25), (0.5, 2.0)])
def test_directions_that_share_a_link(duplex: float, expected_s: float) -> None:
    async def both(port: Port) -> None:
        other = 1 - port.rank
        await port.send_receive(torch.empty(250), other, like=torch.empty(250), source=other)

    async def one(port: Port) -> None:
        await (port.send(torch.empty(250), 1) if port.rank == 0 else port.recv(torch.empty(250), 0))

    cluster = Cluster(Link(0.0, 1000.0, duplex))
    assert VirtualWorld(cluster, 2).run(both).seconds == pytest.approx(expected_s)
    assert VirtualWorld(cluster, 2).run(one).seconds == pytest.approx(1.0), "alone it has the whole link"


def test_a_computation_without_kernels_costs_its_operations() -> None:
    async def program(port: Port) -> None:
        await port.compute(lambda: None, 5e9)
        await port.compute(lambda: None, 5e9, uses=(KernelUse("elementwise", 2),))

    speeds = Speeds((("elementwise", KernelSpeed(call_s=3.0)),))
    assert VirtualWorld(one_host(gflops=1), 1).run(program).seconds == pytest.approx(10.0)
    assert VirtualWorld(replace(one_host(gflops=1), speeds=speeds), 1).run(program).seconds == pytest.approx(11.0)
