"""Impossible compression is refused when it is built, with the value and a remedy that works."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from polytempo import collectives
from polytempo import compression as c
from polytempo import strategies as s
from polytempo.aggregation import low_rank, mean, merged, vote
from polytempo.cluster import ethernet
from polytempo.compression.codecs.int8 import Int8
from polytempo.compression.codecs.top_k import TopK
from polytempo.core import Bundle, Codec, Port
from polytempo.interop.ddp_hook import comm_hook
from polytempo.worlds.virtual.virtual_world import VirtualWorld

WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (c.int8, (2.5,), {}, "block must be a whole number, got 2.5"),
    (c.dynamic8, ("large",), {}, "block must be a whole number, got 'large'"),
    (c.pca, (2.5,), {}, "rank must be a whole number, got 2.5"),
    (c.qsgd, (), {"levels": 3.5}, "levels must be a whole number, got 3.5"),
    (c.qsgd, (), {"bucket": 128.0}, "bucket must be a whole number, got 128.0"),
    (c.qsgd, (), {"seed": "x"}, "seed must be a whole number, got 'x'"),
    (c.natural, ("x",), {}, "seed must be a whole number, got 'x'"),
    (c.random_k, (0.1,), {"seed": 0.5}, "seed must be a whole number, got 0.5"),
    (c.terngrad, (), {"seed": None}, "seed must be a whole number, got None"),
    (c.dgc, (), {"warmup_steps": 1.5}, "warmup_steps must be a whole number, got 1.5"),
    (s.power_sgd, (), {"rank": 1.5}, "rank=…): expected a whole number, not 1.5"),
    (low_rank, (1.5,), {}, "rank must be a whole number, got 1.5"),
    (c.through, (c.int8(),), {"exact_below": "all"}, "exact_below must be a whole number, got 'all'"),
    (c.top_k, ("a",), {}, "ratio must be a number, got 'a'"),
    (c.random_k, ("a",), {}, "ratio must be a number, got 'a'"),
    (c.threshold, (), {"tau": None}, "tau must be a number, got None"),
    (c.threshold, (), {"density": "few"}, "density must be a number, got 'few'"),
    (c.prune, ("a",), {}, "below must be a number, got 'a'"),
    (c.dgc, (), {"clip": "a"}, "clip must be a number, got 'a'"),
    (c.terngrad, ("a",), {}, "clip must be a number, got 'a'"),
    (c.feedback, (c.int8(),), {"decay": 0}, "decay is the part of the residual that stays, over 0"),
    (c.feedback, (c.int8(),), {"decay": 1.5}, "that stays, over 0 and at most 1; got 1.5"),
    (c.feedback, (c.int8(),), {"part": 0}, "part is the part of the residual that is encoded again, over 0"),
    (c.feedback, (c.int8(),), {"part": 1.5}, "that is encoded again, over 0 and at most 1; got 1.5"),
]


@pytest.mark.parametrize(("build", "given", "named", "message"), WRONG)
def test_numbers_that_cannot_be(
    build: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(*given, **named)


def test_numpy_has_whole_numbers_too() -> None:
    assert c.int8(numpy.int64(64)).encoding == Int8(64)
    assert c.top_k(numpy.float32(0.5)).encoding == TopK(0.5, False)


@pytest.mark.parametrize("route", [c.all_gather, c.reduce_scatter, collectives.hierarchical, "ring"])
@pytest.mark.parametrize(
    "build",
    [low_rank, s.power_sgd, mean, s.sync_sgd, s.local_sgd, s.diloco],
    ids=lambda build: str(build.__name__),
)
def test_what_is_no_route_for_a_sum(build: Callable[..., Any], route: Any) -> None:
    """Not a way for wires, where there is no codec, nor a factory of routes."""
    name = getattr(route, "__name__", repr(route))
    with pytest.raises(TypeError, match=rf"a route takes a port and a buffer, and {name} does not.*leave out route"):
        build(route=route)
    assert build(route=collectives.hierarchical())


@pytest.mark.parametrize(
    ("merge", "named"),
    [("vote", "'vote'"), (mean(), "a transform"), (0.5, "0.5")],
    ids=["a name", "a transform", "a number"],
)
def test_what_is_no_merge(merge: Any, named: str) -> None:
    for build in (merged, lambda given: c.through(c.int8(), merge=given)):
        with pytest.raises(TypeError, match=rf"such as pt\.aggregation\.vote or median, got {named}; leave out merge"):
            build(merge)


@pytest.mark.parametrize("codec", [c.bf16(), c.int8()], ids=lambda codec: str(codec.facts.name))
def test_a_factory_of_routes_is_no_route_for_wires_either(codec: Codec) -> None:
    with pytest.raises(TypeError, match="and hierarchical does not"):
        c.through(codec, route=collectives.hierarchical)  # type: ignore[arg-type]


def test_a_hook_takes_a_model_or_none() -> None:
    with pytest.raises(TypeError, match=r"model is the module that DDP wraps, or left out, got 'net'"):
        comm_hook(c.int8(), "net")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the remedy


@pytest.mark.parametrize("build", [s.local_sgd, s.diloco, s.int8_sgd], ids=lambda build: str(build.__name__))
def test_the_remedies_of_a_wrong_route_are_true(build: Callable[..., Any]) -> None:
    """All that the error names can be done, in Python as on the command line."""
    codec = {} if build is s.int8_sgd else {"codec": c.feedback(c.int8())}
    with pytest.raises(ValueError, match="route=ring is impossible; use route=all_gather, or, better, leave out"):
        build(route=collectives.ring, **codec)
    assert build(route=c.all_gather, **codec)
    assert build(**codec)


# ---------------------------------------------------------------------- merges


def test_what_a_rank_says_under_a_merge_and_its_residual_are_what_it_was_given() -> None:
    """`through`'s law for an answer that is not a sum: each rank's own wires."""
    said = torch.zeros(2, 40)

    def heard(buffers: Sequence[Tensor]) -> Tensor:
        said.add_(torch.stack(list(buffers)))  # once for both ranks, which have equal wires
        return vote(buffers)

    heard.coordinate_wise = False  # type: ignore[attr-defined]
    transform = c.through(c.feedback(c.top_k(0.1)), heard, exact_below=0)
    given = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    residuals = torch.zeros(2, 40)

    async def program(port: Port) -> None:
        state = transform.init(Bundle({"w": given[port.rank]}))
        for _ in range(5):
            _, state = await transform.apply(port, Bundle({"w": given[port.rank].clone()}), state)
        residuals[port.rank] = state.codecs["w"].memory.residual

    VirtualWorld(ethernet(), 2).run(program)
    torch.testing.assert_close(said + residuals, 5 * given)
