"""Divided layers with whole ones: gradients and training are one process's with all samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.cluster import one_host
from polytempo.core import Port
from polytempo.core.suspension import suspendable
from polytempo.one_host.hogwild import Updates
from polytempo.partition.hybrid.traffic import EXCHANGES, Exchange, rounds
from polytempo.partition.plan import volumes
from polytempo.partition.plan.choice import exchange_bytes
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost
from polytempo.training.virtual.virtual_step import priced_step
from polytempo.worlds import Outcome, VirtualWorld

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
s, c = pt.strategies, pt.collectives


def images() -> nn.Module:
    """Convolutions, one of them divisible, and fully connected layers of 7, 10 and 5 outputs."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3, stride=2, bias=False), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 10, bias=False), nn.Tanh(), nn.Linear(10, 5)),
    )


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def made(model: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return model().to(dtype)


def batch(kind: str, count: int, dtype: torch.dtype, step: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(step)
    if kind == "words":
        return torch.randint(0, 11, (count, 3), generator=random)
    return torch.randn(count, 2, 6, 6, generator=random, dtype=torch.float64).to(dtype)


def loss(output: Tensor, inputs: Tensor) -> Tensor:
    """The mean over samples of a loss with different gradients for each output and sample."""
    weights = torch.linspace(-1.0, 2.0, output[0].numel(), dtype=output.dtype).view(output[0].shape)
    marks = 1.0 + inputs.flatten(1).sum(1).to(output.dtype).abs()
    return ((output * weights).flatten(1).square().sum(1) * marks).mean()


def on_ranks(num_ranks: int, work: Callable[[Port], Any]) -> Outcome[Any]:
    async def program(port: Port) -> Any:
        return await suspendable(lambda: work(port))

    outcome = VirtualWorld(one_host(num_ranks), num_ranks).run(program)
    assert outcome.unreceived == 0
    return outcome


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        scale = float(torch.cat([tensor.flatten().abs(), torch.ones(1)]).max())
        assert bool(((found[name] - tensor).abs() <= tolerance * scale).all()), name


CASES: list[tuple[str, Callable[[], nn.Module], list[str]]] = [
    ("images", images, ["7", "9", "11"]),
    ("images", images, ["4", "11"]),
    ("words", words, ["0", "1"]),
]
SIZES = [(2, 2), (4, 1), (3, 2, 2), (2, 0, 3), (1, 1, 1, 1), (3, 2, 1, 2)]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("kind", "model", "layers"), CASES, ids=["linear", "convolution", "embedding"])
def test_gradients_are_those_of_one_process(
    kind: str, model: Callable[[], nn.Module], layers: list[str], sizes: tuple[int, ...], exchange: Exchange
) -> None:
    """Gradients of the mean over all samples; layers that all ranks have leave that mean to the strategy."""
    dtype = torch.float32 if sizes == (3, 2, 2) else torch.float64
    whole = made(model, dtype)
    inputs = batch(kind, sum(sizes), dtype)
    loss(whole(inputs), inputs).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    scored = whole(inputs).detach()

    def work(port: Port) -> Any:
        net = pt.hybrid(made(model, dtype), layers, exchange=exchange, port=port)
        mine = inputs.split(sizes)[port.rank]
        output = net(mine)
        (loss(output, mine) if len(mine) else output.sum()).backward()
        with torch.no_grad():
            again = net(mine)
        assert torch.equal(again, output)
        return again, net.full_gradients(), net.full_parameters()

    outcome = on_ranks(len(sizes), work)
    divided = {name for name in expected if name.partition(".")[0] in layers}
    means: dict[str, Any] = dict(expected)
    for name in expected.keys() - divided:
        parts = zip(sizes, outcome.results, strict=True)
        means[name] = sum(size / sum(sizes) * found[1][name] for size, found in parts)
    assert_close(means, expected, TOLERANCE[dtype])  # type: ignore[arg-type]
    for rank, (output, gradients, parameters) in enumerate(outcome.results):
        assert_close({n: gradients[n] for n in divided}, {n: expected[n] for n in divided}, TOLERANCE[dtype])  # type: ignore[misc]
        assert_close({"output": output}, {"output": scored.split(sizes)[rank]}, TOLERANCE[dtype])
        assert all(torch.equal(parameters[n], p.detach()) for n, p in whole.named_parameters())


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 2), (1, 3, 0, 2)], ids=str)
def test_what_is_sent_is_what_the_plan_says(sizes: tuple[int, ...], exchange: Exchange) -> None:
    """The bytes are exact, except for the 8 bytes a rank and pass with its number of samples."""

    layers = ["7", "11"]

    def sent(step: bool) -> int:
        def work(port: Port) -> None:
            net = pt.hybrid(made(images), layers, exchange=exchange, port=port)
            if step:
                net(batch("images", sizes[port.rank], torch.float64)).sum().backward()

        return sum(on_ranks(len(sizes), work).trace.bytes_sent.values())

    planned = {each.name: each for each in volumes(made(images), batch("images", 2, torch.float64))}
    num_ranks = len(sizes)
    parts = {name: [len(p) for p in torch.arange(n).tensor_split(num_ranks)] for name, n in (("7", 7), ("11", 5))}
    expected = sum(exchange_bytes(planned[name], sizes, parts[name]) for name in layers)
    assert sent(True) - sent(False) == expected + num_ranks * (num_ranks - 1) * 8


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_hybrid_trains_as_one_process(num_ranks: int, optimizer: str) -> None:
    makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    inputs = [batch("images", 12, torch.float64, step) for step in range(3)]
    whole = made(images)
    one = makes[optimizer](whole.parameters())
    for each in inputs:
        one.zero_grad()
        loss(whole(each), each).backward()
        one.step()
    job = pt.Job(
        model=images, data=lambda folder: pt.Data([]), loss=loss, optimizer=lambda p, lr: makes[optimizer](p), name="h"
    )

    async def program(port: Port) -> Any:
        net = await suspendable(lambda: pt.hybrid(made(images), ["7", "9", "11"], port=port))
        replica = Replica(net, makes[optimizer](net.parameters()), s.sync_sgd(c.ring), port.size)
        step = priced_step(replica, RunSpec.of(job, replica.strategy, 1, RunOptions()), StepCost(100.0), Updates(None))
        for number, each in enumerate(inputs):
            await port.mark(number)
            mine = each.chunk(num_ranks)[port.rank]
            await step(port, (mine, mine), len(mine), None)
        await replica.settle()
        return await suspendable(net.full_parameters)

    outcome = VirtualWorld(one_host(num_ranks), num_ranks).run(program)
    for found in outcome.results:
        assert_close(found, {n: p.detach() for n, p in whole.named_parameters()}, 1e-9)


def test_rounds_have_every_sample_once() -> None:
    assert rounds("joined", [3, 2]) == [[(0, 3), (0, 2)]]
    assert rounds("turns", [3, 2]) == [[(0, 3), (0, 0)], [(0, 0), (0, 2)]]
    assert rounds("slices", [3, 2]) == [[(0, 1), (0, 1)], [(1, 3), (1, 2)]]


def test_a_copy_is_of_the_same_ranks_and_loads_a_whole_model() -> None:
    other = {name: p.detach() + 1.0 for name, p in made(images).named_parameters()}

    def work(port: Port) -> Any:
        net = copy.deepcopy(pt.hybrid(made(images), ["7"], port=port))
        net.load_full_parameters(other)
        return net.full_parameters()

    for found in on_ranks(3, work).results:
        assert all(torch.equal(found[name], tensor) for name, tensor in other.items())


# ------------------------------------------------------------------ mistakes


def refused(num_ranks: int, work: Callable[[Port], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        on_ranks(num_ranks, work)


def test_what_cannot_be_divided_is_refused() -> None:
    unknown = r"the model has no layer 'clasifier'"
    refused(2, lambda port: pt.hybrid(made(images), ["clasifier"], port=port), ValueError, unknown)
    norm = "layer 1 cannot be divided over 2 ranks: BatchNorm2d is none of Linear"
    refused(2, lambda port: pt.hybrid(made(images), ["1"], port=port), ValueError, norm)
    grouped = lambda: nn.Sequential(nn.Conv2d(4, 4, 1, groups=2))  # noqa: E731
    few = r"layer 11 cannot be divided over 6 ranks: 5 features cannot be split over 6 ranks"
    refused(6, lambda port: pt.hybrid(made(images), ["11"], port=port), ValueError, few)
    refused(
        2,
        lambda port: pt.hybrid(made(grouped), ["0"], port=port),
        ValueError,
        "it has groups=2 and padding_mode",
    )
    for nothing in ([], None, ["7", 9], [""]):
        refused(2, lambda p, given=nothing: pt.hybrid(made(images), given, port=p), ValueError, "no layer is named")
    refused(2, lambda p: pt.hybrid(made(images), "auto", port=p), ValueError, r"'auto' names no layer; give a plan")
    alone = lambda: nn.Linear(3, 4)  # noqa: E731
    refused(2, lambda p: pt.hybrid(made(alone), ["*"], port=p), ValueError, r"it is a single Linear; give nn\.Seq")
    bad: Any = "rows"
    refused(2, lambda p: pt.hybrid(made(images), ["7"], exchange=bad, port=p), ValueError, "must be one of joined")
    plan = pt.training.plan_layers(made(images), batch("images", 2, torch.float64), workers=3, batch_size=12)
    refused(
        2,
        lambda p: pt.hybrid(made(images), plan, port=p),
        ValueError,
        "the plan is for 3 workers, and there are 2",
    )
    refused(
        2,
        lambda p: pt.hybrid(made(images), [str(7 + 2 * p.rank)], port=p),
        pt.errors.Mismatch,
        "disagree about layers",
    )
    two = lambda p: pt.hybrid(made(images), ["7"], port=p.meshed(data=1, model=2))  # noqa: E731
    refused(2, two, ValueError, "has ranks that hold parts of one model")

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1))  # type: ignore[no-any-return]

    folded = lambda p: pt.hybrid(made(Folded), ["layer"], port=p)(torch.ones(2, 3, 3, dtype=torch.float64))  # noqa: E731
    refused(2, folded, ValueError, r"this rank has 2, and got a tensor of shape \(6, 3\)")

    def tied() -> nn.Module:
        net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        net[1].weight = net[0].weight
        return net

    refused(
        2,
        lambda p: pt.hybrid(made(tied), ["0"], port=p),
        ValueError,
        "0.weight and 1.weight are one parameter",
    )
