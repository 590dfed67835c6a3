"""Laws of encoded movements in the log of an object store: the bits of a parameter server's pushes, and residuals."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from helpers import CLUSTER
from laws.codecs import ROWS
from polytempo.cli.look.bucket_round import bucket_round
from polytempo.compression import feedback, one_bit, top_k
from polytempo.core import Bundle, Codec, Op, Port
from polytempo.core.driver import interpreted
from polytempo.core.op import Pull, Push, Start
from polytempo.core.op import Work as Begun
from polytempo.jobs.digits import job
from polytempo.server.encoding import residuals
from polytempo.server.worker.encoded_pushes import coding_of, encoded
from polytempo.server.worker.transforms import push_movement
from polytempo.spec.result import parameters_sha256
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.start import replica_of
from polytempo.worlds import VirtualWorld
from polytempo.worlds.object_store.store_world import StoreWorld
from store_workers import Crew

PUSHED = [row for row in ROWS if not (row.sparse and row.summable)]
LINK = pt.cluster.bucket(mbit_per_s=100, latency_ms=20)


def texts() -> list[str]:
    """Each codec that a worker may push by, and with its residual."""
    return [row.text for row in PUSHED] + [f"feedback({row.text})" for row in PUSHED if row.feedable]


@pytest.mark.parametrize("codec", [None, *texts()])
def test_a_log_of_one_worker_is_a_parameter_server_to_the_bit(codec: str | None) -> None:
    how = "" if codec is None else f", codec={codec}"
    strategy = f"async_diloco(period=4, outer_lr=0.6, outer_momentum=0.3{how})"
    in_log, served = (pt.simulate(job, strategy, 1, cluster, steps=12) for cluster in (LINK, None))
    assert in_log.parameters_sha256 == served.parameters_sha256


def attached(strategy: str, workers: int, steps: int, world: StoreWorld) -> tuple[str, dict[str, Any]]:
    """The steps of the job by a loop of one's own; the hash of its parameters, and the strategy's state."""
    net, optimizer = replica_of(RunSpec.of(job, pt.parse_strategy(strategy), workers, RunOptions(steps=steps)))
    handle = pt.attach(net, optimizer, strategy, world=world)
    for x, y in islice(pt.shard(pt.data.digits().train, batch_size=32, world=world), steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    world.leave()
    return parameters_sha256(net.parameters()), handle.state_dict()


@pytest.mark.parametrize(
    "codec", ["feedback(one_bit)", "feedback(top_k(0.05))", "int8", "qsgd", "threshold(density=0.1)"]
)
@pytest.mark.parametrize("delay", [0, 1])
def test_a_simulated_log_has_the_bits_and_bytes_of_a_real_one(codec: str, delay: int) -> None:
    """A quorum of all adds in the order of workers. The mean of 4 equal models, which the hash is of, is exact."""
    strategy = f"decoupled_diloco(period=4, quorum=4, outer_momentum=0.5, delay={delay}, codec={codec})"
    crew = Crew(4)
    for worker in range(4):
        crew.add(worker, lambda world: attached(strategy, 4, 8, world))
    real = crew.run()
    shorter, found = (pt.simulate(job, strategy, workers=4, steps=steps, cluster=LINK) for steps in (4, 8))
    if not delay:  # with one, a worker's last step is its own
        assert {sha for sha, _ in real} == {found.parameters_sha256}
    priced = bucket_round(pt.parse_strategy(strategy), job.model(), 4, None)["bucket"]
    a_push = found.bytes_sent_per_rank - shorter.bytes_sent_per_rank
    assert a_push <= priced["sent_bytes"]
    assert a_push == priced["sent_bytes"] or "threshold" in codec
    plain = bucket_round(pt.parse_strategy("decoupled_diloco(period=4)"), job.model(), 4, None)["bucket"]
    assert priced["sent_bytes"] < plain["sent_bytes"] / 2
    assert priced["received_bytes"] == 3 * priced["sent_bytes"]


def test_a_worker_saves_its_residual_and_goes_on_from_it() -> None:
    strategy, crew = "async_diloco(period=4, codec=feedback(one_bit))", Crew(1)
    crew.add(0, lambda world: attached(strategy, 1, 8, world))
    [(_, state)] = crew.run()
    kept = {name: tensor for name, tensor in state["tensors"].items() if name.endswith("/0")}  # residuals
    assert any(tensor.abs().sum() > 0 for tensor in kept.values())

    def later(world: StoreWorld) -> dict[str, Any]:
        net, optimizer = replica_of(RunSpec.of(job, pt.parse_strategy(strategy), 1, RunOptions(steps=8)))
        handle = pt.attach(net, optimizer, strategy, world=world)
        handle.load_state_dict(state)
        return handle.state_dict()

    again = Crew(1)
    again.add(0, later)
    [found] = again.run()
    assert {name: tensor.tolist() for name, tensor in found["tensors"].items() if name in kept} == {
        name: tensor.tolist() for name, tensor in kept.items()
    }


@pytest.mark.parametrize("codec", [None, "feedback(one_bit)"])
@pytest.mark.parametrize("pushes", [1, 2])
def test_a_worker_that_loads_its_state_goes_on_from_the_log(codec: str | None, pushes: int) -> None:
    """The state is of a first push. Later another worker has pushed twice, and with pushes=2 this worker once.
    A movement of 0 moves parameters by the residual alone, if it was not sent already."""
    strategy = f"async_diloco(period=4{'' if codec is None else f', codec={codec}'})"
    saved: list[dict[str, Any]] = []

    def first(world: StoreWorld) -> None:
        saved.append(attached(strategy, 2, 4, world)[1])
        if pushes == 2:
            attached(strategy, 2, 4, crew.world(0))

    def later(world: StoreWorld) -> tuple[Tensor, Tensor]:
        net, _ = replica_of(RunSpec.of(job, pt.parse_strategy(strategy), 2, RunOptions(steps=8)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, strategy, world=world)
        begun = torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()])
        handle.load_state_dict(saved[0])
        for _ in range(4):
            for p in net.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        return begun, torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    crew = Crew(2)
    crew.add(0, first)
    crew.add(1, lambda world: attached(strategy, 2, 8, world), at_s=100.0)
    crew.add(0, later, at_s=200.0)
    *_, (begun, after) = crew.run()
    moved = float((after - begun).abs().max())
    sent = codec is not None and pushes == 1
    assert (moved > 0) == sent
    assert moved < 0.01


# ------------------------------------------------------------------ residuals

PARAMETERS = Bundle({"w": torch.zeros(40, 50), "b": torch.zeros(40)})


def pushed(codec: Codec, counts: list[bool], *, begun: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Movements, messages as a shard reads them, and residuals after each, where only some pushes count."""
    layout, movements, messages, left = coding_of(PARAMETERS, codec), list[Tensor](), list[Tensor](), list[Tensor]()

    def moved(push: Push) -> bool:
        flat = torch.zeros_like(PARAMETERS.flat)
        layout.into_(push.gradient, flat)
        messages.append(flat)
        return counts[len(messages) - 1]

    async def performed(op: Op[Any]) -> Any:
        match op:
            case Push():
                return moved(op)
            case Start(Push() as push):
                return Begun(moved(push))
            case Start():
                return Begun(None)
            case Begun(bool()):
                return None
        return PARAMETERS.flat.clone()  # the answer to a pull

    async def program(port: Port) -> None:
        transform = encoded(push_movement(2, 1 if begun else 0), codec, lambda worker: 1 + len(messages))
        state = transform.init(PARAMETERS)
        random = torch.Generator().manual_seed(0)
        for step in range(2 * len(counts)):
            x = Bundle({name: torch.randn(t.shape, generator=random) for name, t in PARAMETERS.tensors.items()})
            if step % 2:
                movements.append(state.inner.anchor.flat - x.flat)
            _, state = await interpreted(transform.apply(port, x, state), performed, (Push, Pull, Start, Begun))
            if step % 2:
                rest = {name: torch.zeros(t.shape) for name, t in PARAMETERS.tensors.items()}
                for name, codec_state in state.codec.items():
                    for residual in residuals(codec_state):
                        rest[name] += residual
                left.append(torch.cat([each.flatten() for each in rest.values()]))

    VirtualWorld(CLUSTER, 1).run(program)
    return movements, messages, left


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("codec", [feedback(one_bit()), feedback(top_k(0.1))], ids=str)
def test_what_a_message_leaves_out_goes_with_the_next_one_that_counts(codec: Codec, begun: bool) -> None:
    """The second push comes too late: it is lost as a whole, and the residual of before stays."""
    movements, messages, left = pushed(codec, [True, False, True, True], begun=begun)
    assert torch.equal(left[0], left[1])
    assert left[0].abs().sum() > 0
    counted = [0, 2, 3]
    total = sum((messages[i] for i in counted), torch.zeros_like(left[0]))
    torch.testing.assert_close(
        total + left[3], sum((movements[i] for i in counted), torch.zeros_like(left[0])), rtol=0, atol=1e-4
    )


def test_a_movement_that_is_not_finite_is_named() -> None:
    def work(world: StoreWorld) -> None:
        net = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        pt.attach(net, optimizer, "async_diloco(period=1, codec=int8)", world=world)
        for x, _ in pt.shard(TensorDataset(torch.ones(4, 64), torch.ones(4)), batch_size=2, world=world):
            (net(x).sum() * 1e30 * 1e30).backward()
            optimizer.step()

    crew = Crew(1)
    crew.add(0, work)
    [error] = crew.run()
    assert isinstance(error, pt.errors.NotFinite), error
    assert "weight" in str(error)


def test_encoded_pulls_are_refused_where_none_travel() -> None:
    with pytest.raises(pt.errors.Incompatible, match="PT2914"):
        pt.simulate(job, "async_diloco(period=4, codec=int8, pull_codec=bf16)", 2, LINK, steps=4)
