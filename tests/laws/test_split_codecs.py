"""Codecs of split layers: the encoding ranks, that all ranks hold the same bits, and that identities change nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as partial_of
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.codecs import ROWS, Row, text
from polytempo import compression as c
from polytempo.core import Codec, NotFinite, Port
from polytempo.core.suspension import drive
from polytempo.partition.tensor import ModelGroup, Rules, column
from polytempo.partition.tensor.exchange import copied, gathered, reduced, summed
from polytempo.partition.wires import Wires
from split_models import RULES, SEQUENCE_RULES, VOCABULARY, Pass, Transformer, made, on_ranks, split_pass

INDICES = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
SERVING = [row for row in ROWS if row.fixed and row.make().facts.memory == "none"]


def passes(num_ranks: int, dtype: torch.dtype, *, sequence: bool, dropout: float = 0.2, **codecs: Any) -> list[Pass]:
    """All ranks' results of a transformer with dropout."""
    rules = SEQUENCE_RULES if sequence else RULES

    def work(port: Port) -> Pass:
        return split_pass(
            lambda: Transformer(dropout, blocks=1), rules, INDICES, dtype, sequence=sequence, port=port, **codecs
        )

    return on_ranks(num_ranks, work)


def assert_same(found: Pass, expected: Pass) -> None:
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.loss, expected.loss)
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_an_identity_is_no_codec_to_the_bit(num_ranks: int, sequence: bool) -> None:
    plain = passes(num_ranks, torch.float32, sequence=sequence)
    for found, expected in zip(
        passes(num_ranks, torch.float32, sequence=sequence, activations=c.exact(), gradients=c.exact()),
        plain,
        strict=True,
    ):
        assert_same(found, expected)


def test_of_16_bit_activations_a_codec_of_16_bits_is_an_identity() -> None:
    def work(port: Port, **codecs: Any) -> Pass:
        rules: Rules = {"0": "column", "2": "row", "3": column(gather=True)}
        model = lambda: nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 6), nn.Linear(6, 4))  # noqa: E731
        return split_pass(
            model, rules, torch.linspace(-2, 2, 15).view(3, 5).bfloat16(), torch.bfloat16, port=port, **codecs
        )

    expected = on_ranks(3, work)
    for codec in ("bf16", c.bf16()):
        ranks = on_ranks(3, partial_of(work, activations=codec, gradients=codec))
        for found, plain in zip(ranks, expected, strict=True):
            assert_same(found, plain)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("row", SERVING, ids=text)
def test_all_ranks_hold_the_same_bits(row: Row, sequence: bool) -> None:
    """The bits of the output, and of the gradients of parameters that all of them hold, such as norms."""
    ranks = passes(3, torch.float32, sequence=sequence, activations=row.make(), gradients=row.make())
    for found in ranks[1:]:
        assert_same(found, ranks[0])
    again = passes(3, torch.float32, sequence=sequence, activations=row.make(), gradients=row.make())
    assert_same(again[0], ranks[0])


@pytest.mark.parametrize("codec", [c.int8(), c.dynamic8(), c.bf16(), c.qsgd(127, 64)], ids=str)
def test_eight_bits_are_near(codec: Codec) -> None:
    plain, found = (
        passes(2, torch.float64, sequence=False, dropout=0.0, **codecs)[0]
        for codecs in ({}, {"activations": codec, "gradients": codec})
    )
    assert not torch.equal(found.output, plain.output)
    assert float((found.output - plain.output).norm() / plain.output.norm()) < 0.05
    for name, gradient in plain.gradients.items():
        assert float((found.gradients[name] - gradient).norm()) <= 0.1 * float(gradient.norm()) + 1e-9, name


# ---------------------------------------------------------------------- the formula, written out

RANKS = 3


def exchanged(work: Callable[[ModelGroup], Any], **codecs: Codec) -> list[Any]:
    return on_ranks(RANKS, lambda port: work(ModelGroup(port, drive, wires=Wires(**codecs))))


def partial(rank: int) -> Tensor:
    return torch.randn(7, 30, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def decoded(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x.reshape(-1))[0], x.reshape(-1)).view(x.shape)


def owned(codec: Codec, pieces: list[list[Tensor]], owner: int) -> Tensor:
    """Σ_r Q(p_r[owner]), the own piece as it is, in the order of ranks."""
    terms = [p[owner] if rank == owner else decoded(codec, p[owner]) for rank, p in enumerate(pieces)]
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def test_a_sum_is_encoded_by_its_senders_and_by_the_owners_of_its_pieces() -> None:
    codec = c.int8(block=16)
    pieces = [list(partial(rank).view(-1).tensor_split(RANKS)) for rank in range(RANKS)]
    expected = torch.cat([decoded(codec, owned(codec, pieces, j)) for j in range(RANKS)]).view(7, 30)
    for found in exchanged(lambda group: summed(group, partial(group.rank)), activations=codec):
        assert torch.equal(found, expected)
    exact = sum(partial(rank) for rank in range(RANKS))
    assert not torch.equal(expected, exact)


def test_a_reduction_is_encoded_once_and_a_gather_by_all() -> None:
    codec, sizes = c.int8(block=16), (3, 2, 2)
    pieces = [[each.contiguous() for each in partial(rank).split(sizes)] for rank in range(RANKS)]
    for rank, found in enumerate(exchanged(lambda g: reduced(g, partial(g.rank), sizes, 0), activations=codec)):
        assert torch.equal(found, owned(codec, pieces, rank))
    whole = torch.cat([decoded(codec, partial(0)[begin:end]) for begin, end in ((0, 3), (3, 5), (5, 7))])
    for found in exchanged(lambda g: gathered(g, partial(0).split(sizes)[g.rank], sizes, 0), activations=codec):
        assert torch.equal(found, whole)


def test_a_gradient_passes_the_codec_of_activations_straight_through() -> None:
    codec = c.int8(block=16)
    weights = torch.linspace(-1, 1, 210, dtype=torch.float64).view(7, 30)

    def work(group: ModelGroup) -> list[Tensor]:
        answers = []
        for exchange in (summed, copied):
            x = partial(group.rank).requires_grad_()
            (exchange(group, x) * weights * (1 + group.rank)).sum().backward()
            assert x.grad is not None
            answers.append(x.grad)
        return answers

    for rank, (of_sum, of_copy) in enumerate(exchanged(work, activations=codec)):
        assert torch.equal(of_sum, weights * (1 + rank)), "not encoded: its gradient is each rank's own"
        assert torch.allclose(of_copy, weights * 6, rtol=1e-12), "no codec of gradients was given"
    gradients = [list((weights * (1 + rank)).view(-1).tensor_split(RANKS)) for rank in range(RANKS)]
    expected = torch.cat([decoded(codec, owned(codec, gradients, j)) for j in range(RANKS)]).view(7, 30)
    for _, of_copy in exchanged(work, gradients=codec):
        assert torch.equal(of_copy, expected)


def test_what_would_grow_and_what_is_empty_travel_well() -> None:
    one = torch.ones(1, dtype=torch.float64)
    for found in exchanged(lambda group: summed(group, one), activations=c.qsgd()):
        assert torch.equal(found, 3 * one), "a wire of qsgd is longer than a number"
    two = torch.tensor([3.0, -1.0], dtype=torch.float64)
    for found in exchanged(lambda group: summed(group, two), activations=c.int8()):
        assert torch.allclose(found, 3 * two, rtol=0.02), "of three ranks one owns nothing"


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"activations": c.feedback(c.one_bit())}, ValueError, r"feedback\(one_bit\(\)\) remembers the tensor"),
        ({"gradients": "threshold(0.5)"}, ValueError, r"wires vary in length.*use a codec of fixed length"),
        ({"activations": "int9"}, ValueError, "there is no codec 'int9' .did you mean int8"),
        ({"activations": c.int8}, TypeError, r"write int8\(\)"),
    ],
)  # fmt: skip
def test_codecs_that_cannot_serve_are_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    def work(port: Port) -> None:
        with pytest.raises(error, match=said):
            pt.split(made(Transformer), RULES, port=port, **given)

    on_ranks(2, work)


@pytest.mark.parametrize("codec", [c.qsgd(), c.random_k(0.5)], ids=str)
def test_ranks_that_would_draw_differently_are_told(codec: Codec) -> None:
    def work(port: Port) -> None:
        net = pt.split(made(lambda: nn.Sequential(nn.Linear(4, 6))), {"0": "row"}, activations=codec, port=port)
        torch.manual_seed(port.rank)
        with pytest.raises(ValueError, match="different random states, so their dropouts and codecs would draw"):
            net(torch.ones(8, 4, dtype=torch.float64))

    on_ranks(2, work)


def test_an_evaluation_takes_no_random_number() -> None:
    def work(port: Port) -> list[Tensor]:
        net = pt.split(made(lambda: nn.Sequential(nn.Linear(4, 6))), {"0": "row"}, activations=c.qsgd(), port=port)
        states = [torch.get_rng_state()]
        for mode in (False, True):
            net.train(mode)
            net(torch.ones(8, 4, dtype=torch.float64))
            states.append(torch.get_rng_state())
        return states

    for before, scored, trained in on_ranks(2, work):
        assert torch.equal(before, scored)
        assert not torch.equal(scored, trained)


def test_what_cannot_be_encoded_names_the_layer() -> None:
    def work(port: Port) -> str:
        net = made(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
        nn.init.constant_(net[1].weight, torch.nan)  # type: ignore[arg-type,index]
        split = pt.split(net, {"0": "column", "1": "row"}, activations="int8", port=port)
        with pytest.raises(NotFinite) as error:
            split(torch.ones(8, 4, dtype=torch.float64))
        return str(error.value)

    for rank, said in enumerate(on_ranks(2, work)):
        assert f"the activations of layer 1 on rank {rank}" in said
