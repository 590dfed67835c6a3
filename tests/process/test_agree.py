"""Ranks with different plans get an error before the first step: all of them, with both values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.engines.processes.worker import Result
from polytempo.training.model.agree import agree, gather_json
from polytempo.worlds import ProcessWorld
from process.crew import small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies


def attached(**more: Any) -> None:
    net = more.pop("net", None) or small()
    optimizer = more.pop("optimizer", SGD)(net.parameters(), lr=0.1)
    pt.attach(net, optimizer, more.pop("strategy", s.local_sgd(period=8)), **more)


def of_version(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pt, "__version__", name)
        attached()


def of_torch(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", name)
        attached()


def frozen() -> nn.Module:
    net = small()
    net[0].bias.requires_grad_(False)
    return net


def registered(*names: str) -> nn.Module:
    """Equal layers under the same names, in this order."""
    net = nn.Module()
    for name in names:
        net.add_module(name, nn.Linear(2, 2, bias=False))
    return net


def buffered(*names: str, size: int = 2) -> nn.Module:
    net = nn.Linear(2, 2)
    for name in names:
        net.register_buffer(name, torch.zeros(size))
    return net


def in_groups(*places: list[int], **of_the_last: float) -> Callable[..., Optimizer]:
    """Makes an optimizer with the parameters at these places in its groups."""

    def make(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
        held = list(parameters)
        groups: list[dict[str, Any]] = [{"params": [held[i] for i in group]} for group in places]
        groups[-1].update(of_the_last)
        return SGD(groups, lr=lr)

    return make


def with_options(**options: Any) -> Callable[..., Optimizer]:
    return lambda parameters, lr: SGD(parameters, **{"lr": lr, **options})


def trained(**more: Any) -> None:
    data = TensorDataset(torch.zeros(8, 4), torch.zeros(8, 3))
    job = pt.Job(
        model=lambda: small(torch.float32),
        data=lambda folder: pt.Data(data),
        loss=squared,
        optimizer=lambda parameters, lr: SGD(parameters, lr=lr),
        name=more.pop("name", "a job"),
    )
    pt.Trainer(job, s.sync_sgd(), **more)


Act = Callable[[], object]

CASES: dict[str, tuple[Act, Act, str, tuple[str, str]]] = {
    "strategy": (
        lambda: attached(strategy=s.local_sgd(period=8)),
        lambda: attached(strategy=s.local_sgd(period=4)),
        "strategy",
        ("local_sgd(period=8, route=native)", "local_sgd(period=4, route=native)"),
    ),
    "route": (
        lambda: attached(strategy=s.sync_sgd(pt.collectives.ring)),
        lambda: attached(strategy=s.sync_sgd(pt.collectives.tree)),
        "strategy",
        ("sync_sgd(route=ring)", "sync_sgd(route=tree)"),
    ),
    "seed": (lambda: attached(seed=1), lambda: attached(seed=2), "seed", ("1", "2")),
    "seed on one": (lambda: attached(seed=1), attached, "seed", ("1", "None")),
    "shape": (
        lambda: attached(net=nn.Linear(4, 3, bias=False)),
        lambda: attached(net=nn.Linear(4, 2, bias=False)),
        "model.weight",
        ("[[3, 4],", "[[2, 4],"),
    ),
    "dtype": (
        lambda: attached(net=nn.Linear(4, 3, bias=False)),
        lambda: attached(net=nn.Linear(4, 3, bias=False).double()),
        "model.weight",
        ("torch.float32", "torch.float64"),
    ),
    "frozen": (attached, lambda: attached(net=frozen()), "model.0.bias", ("true]", "false]")),
    "one layer more": (
        lambda: attached(net=nn.Linear(4, 3, bias=False)),
        lambda: attached(net=nn.Linear(4, 3)),
        "model.bias",
        ("nothing", "[[3],"),
    ),
    "polytempo": (lambda: of_version("0.1.0"), lambda: of_version("0.2.0"), "polytempo", ("0.1.0", "0.2.0")),
    "torch": (lambda: of_torch("2.13.0"), lambda: of_torch("2.12.1"), "torch", ("2.13.0", "2.12.1")),
    "optimizer": (attached, lambda: attached(optimizer=Adam), "optimizer", ("SGD", "Adam")),
    "optimizer's parameters": (
        attached,
        lambda: attached(optimizer=lambda parameters, lr: SGD(list(parameters)[:3], lr=lr)),
        "optimizer groups[0][3]",
        ("'2.bias'", "'nothing'"),
    ),
    "layers in another order": (
        lambda: attached(net=registered("first", "second")),
        lambda: attached(net=registered("second", "first")),
        "model's order of parameters[0]",
        ("'first.weight'", "'second.weight'"),
    ),
    "buffers in another order": (
        lambda: attached(net=buffered("a", "b")),
        lambda: attached(net=buffered("b", "a")),
        "model's order of buffers[0]",
        ("'a'", "'b'"),
    ),
    "a buffer of another shape": (
        lambda: attached(net=buffered("a")),
        lambda: attached(net=buffered("a", size=3)),
        "model's buffers.a",
        ("[[2],", "[[3],"),
    ),
    "a shape with as many elements": (
        lambda: attached(net=nn.Linear(2, 3, bias=False)),
        lambda: attached(net=nn.Linear(3, 2, bias=False)),
        "model.weight",
        ("[[3, 2],", "[[2, 3],"),
    ),
    "parameters in another order in the optimizer": (
        attached,
        lambda: attached(optimizer=lambda parameters, lr: SGD(list(parameters)[::-1], lr=lr)),
        "optimizer groups[0][0]",
        ("'0.weight'", "'2.bias'"),
    ),
    "groups of as many parameters": (
        lambda: attached(optimizer=in_groups([0, 1], [2, 3])),
        lambda: attached(optimizer=in_groups([0, 2], [1, 3])),
        "optimizer groups[0][1]",
        ("'0.bias'", "'2.weight'"),
    ),
    "one group more": (
        attached,
        lambda: attached(optimizer=in_groups([0, 1], [2, 3])),
        "optimizer groups[0][2]",
        ("'2.weight'", "'nothing'"),
    ),
    "lr": (attached, lambda: attached(optimizer=with_options(lr=0.2)), "optimizer options[0].lr", ("0.1", "0.2")),
    "momentum": (
        attached,
        lambda: attached(optimizer=with_options(momentum=0.9)),
        "optimizer options[0].momentum",
        ("0", "0.9"),
    ),
    "nesterov": (
        lambda: attached(optimizer=with_options(momentum=0.9)),
        lambda: attached(optimizer=with_options(momentum=0.9, nesterov=True)),
        "optimizer options[0].nesterov",
        ("False", "True"),
    ),
    "weight decay of the second group": (
        lambda: attached(optimizer=in_groups([0, 1], [2, 3])),
        lambda: attached(optimizer=in_groups([0, 1], [2, 3], weight_decay=0.01)),
        "optimizer options[1].weight_decay",
        ("0", "0.01"),
    ),
    "betas": (
        lambda: attached(optimizer=Adam),
        lambda: attached(optimizer=lambda parameters, lr: Adam(parameters, lr=lr, betas=(0.8, 0.999))),
        "optimizer options[0].betas",
        ("[0.9, 0.999]", "[0.8, 0.999]"),
    ),
    "buffers": (attached, lambda: attached(buffers="leave"), "buffers", ("average", "leave")),
    "bucket_bytes": (
        lambda: attached(bucket_bytes=100),
        lambda: attached(bucket_bytes=200),
        "bucket_bytes",
        ("100", "200"),
    ),
    "a trainer's job": (trained, lambda: trained(name="b"), "job", ("a job", "b")),
    "a trainer's lr": (lambda: trained(lr=0.1), lambda: trained(lr=0.2), "lr", ("0.1", "0.2")),
    "a trainer's batch": (lambda: trained(batch_size=2), lambda: trained(batch_size=4), "batch_size", ("2", "4")),
    "a trainer's seed": (lambda: trained(seed=3), lambda: trained(seed=4), "seed", ("3", "4")),
    "a trainer's end": (lambda: trained(steps=3), lambda: trained(steps=4), "steps", ("3", "4")),
}
"""Rank 0's call, rank 1's call, the name of the difference, and the text of the two values."""


@cache
def refusals() -> list[dict[str, str]]:
    """The errors of each of two ranks, case after case: a refusal leaves them able to try again."""

    def work(world: ProcessWorld) -> Result:
        found = {}
        for name, acts in CASES.items():
            with pytest.raises(pt.core.Mismatch) as refusal:
                acts[world.rank]()  # type: ignore[operator]
            found[name] = str(refusal.value)
        return found

    return together(2, work)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_refuse_and_name_both_values(name: str) -> None:
    _, _, fact, (mine, theirs) = CASES[name]
    first, second = (said[name] for said in refusals())
    assert first == second
    assert first.startswith(f"ranks disagree about {fact}: rank 0 has ")
    before, after = first.split(", rank 1 has ")
    assert mine in before
    assert theirs in after


def test_the_first_rank_that_differs_is_named() -> None:
    def work(world: ProcessWorld) -> Result:
        with pytest.raises(pt.core.Mismatch) as refusal:
            world.drive(agree(world.port, {"shape": {"a": [1, 2], "b": [world.rank // 2]}}))
        return str(refusal.value)

    assert together(3, work) == ["ranks disagree about shape.b: rank 0 has [0], rank 2 has [1]"] * 3


def test_what_ranks_say_may_be_of_any_length() -> None:
    def work(world: ProcessWorld) -> Result:
        said = world.drive(gather_json(world.port, "é" * (1000 * world.rank)))
        return [len(text) for text in said]

    assert together(3, work) == [[0, 1000, 2000]] * 3


def test_those_who_agree_hear_nothing() -> None:
    def work(world: ProcessWorld) -> Result:
        attached(seed=1, strategy=s.robust_sgd(pt.aggregation.trimmed_mean(cut=1)))
        return None

    assert together(3, work) == [None] * 3
