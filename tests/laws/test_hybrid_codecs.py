"""Codecs of divided layers: the encoding ranks, the bytes, and that identities change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.codecs import ROWS, Row, text
from laws.test_hybrid_laws import batch, images, loss, made, on_ranks, words
from polytempo import compression as c
from polytempo.core import Codec, NotFinite, Port
from polytempo.partition.hybrid.traffic import EXCHANGES, Exchange, rounds
from polytempo.partition.plan import volumes
from polytempo.partition.plan.choice import exchange_bytes
from polytempo.partition.wires import Wires

LAYERS = ["7", "9", "11"]
SIZES = [(2, 2), (3, 2, 2), (2, 0, 3)]
SERVING = [row for row in ROWS if row.fixed and row.make().facts.memory == "none"]


def passes(
    sizes: tuple[int, ...], exchange: Exchange = "joined", dtype: torch.dtype = torch.float32, **codecs: Any
) -> list[list[Tensor]]:
    """All ranks' output and gradients."""
    inputs = batch("images", sum(sizes), dtype)

    def work(port: Port) -> list[Tensor]:
        torch.manual_seed(port.rank)  # each rank draws for itself: a codec's numbers must be agreed on
        net = pt.hybrid(made(images, dtype), LAYERS, exchange=exchange, port=port, **codecs)
        mine = inputs.split(sizes)[port.rank]
        output = net(mine)
        (loss(output, mine) if len(mine) else output.sum()).backward()
        return [output.detach(), *net.full_gradients().values()]

    found: list[list[Tensor]] = on_ranks(len(sizes), work).results
    return found


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) for own, other in pairs for a, b in zip(own, other, strict=True))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_identity_is_no_codec_to_the_bit(sizes: tuple[int, ...], exchange: Exchange) -> None:
    plain = passes(sizes, exchange)
    assert same(passes(sizes, exchange, activations=c.exact(), gradients=c.exact()), plain)


@pytest.mark.parametrize("row", SERVING, ids=text)
def test_a_pass_repeats_itself_and_ranks_agree_on_gradients(row: Row) -> None:
    """`full_gradients` joins the parts; codecs may draw."""
    first, again = (passes((3, 2, 2), "slices", activations=row.make(), gradients=row.make()) for _ in range(2))
    assert same(first, again)
    names = [name for name, _ in made(images).named_parameters()]
    for found in first[1:]:
        for name, one, other in zip(names, first[0][1:], found[1:], strict=True):
            assert torch.equal(one, other) or name.partition(".")[0] not in LAYERS


@pytest.mark.parametrize("codec", [c.int8(16), c.dynamic8(), c.bf16(), c.qsgd(127, 64)], ids=str)
def test_eight_bits_are_near(codec: Codec) -> None:
    plain = passes((3, 2, 2), dtype=torch.float64)
    found = passes((3, 2, 2), dtype=torch.float64, activations=codec, gradients=codec)
    for own, other in zip(found, plain, strict=True):
        for number, (one, exact) in enumerate(zip(own, other, strict=True)):
            assert not torch.equal(one, exact), number
            assert float((one - exact).norm()) <= 0.1 * float(exact.norm()) + 1e-9, number


def test_an_evaluation_takes_no_random_number() -> None:
    """So a scored run draws the same numbers as one without scores. In training a pass takes one."""
    codec = c.qsgd(127, 64)

    def work(port: Port) -> list[Tensor]:
        net = pt.hybrid(made(images, torch.float32), LAYERS, activations=codec, gradients=codec, port=port)
        states = [torch.get_rng_state()]
        for mode in (False, True):
            net.train(mode)
            net(batch("images", 2, torch.float32))
            states.append(torch.get_rng_state())
        return states

    for before, scored, trained in on_ranks(2, work).results:
        assert torch.equal(before, scored)
        assert not torch.equal(scored, trained)


# ---------------------------------------------------------------------- the formula, written out


def through(codec: Codec, x: Tensor) -> Tensor:
    """The decoded wire of a tensor."""
    return codec.decode(codec.encode(x.reshape(-1))[0], x.reshape(-1)).view(x.shape) if x.numel() else x


def oracle(
    net: nn.Linear, inputs: list[Tensor], answers: list[Tensor], exchange: Exchange, q: Codec, r: Codec
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Each rank's output, the gradients of its inputs, and the gradient of the weight, of one layer, in one process."""
    sizes, ranks = [len(each) for each in inputs], range(len(inputs))
    total = sum(sizes)
    weights = net.weight.detach().tensor_split(len(inputs))
    parts = [len(each) for each in weights]
    outputs, of_inputs = [list[Tensor]() for _ in ranks], [list[Tensor]() for _ in ranks]
    of_weights = [torch.zeros_like(each) for each in weights]
    for spans in rounds(exchange, sizes):
        sent = [inputs[rank][begin:end] for rank, (begin, end) in enumerate(spans)]
        seen = [through(q, each) for each in sent]
        for j in ranks:
            made_of = [seen[j] @ weight.T for weight in weights]
            outputs[j].append(torch.cat([y if k == j else through(q, y) for k, y in enumerate(made_of)], 1))
        own = [(answers[j] * (sizes[j] / total))[begin:end] for j, (begin, end) in enumerate(spans)]
        returned = [
            [g if j == k else through(r, g) for k, g in enumerate(own[j].split(parts, 1))] for j in ranks
        ]  # of rank j's samples, rank k's features
        for k in ranks:
            of_weights[k] += torch.cat([returned[j][k] for j in ranks]).T @ torch.cat(seen)
        for j in ranks:
            partial = [returned[j][k] @ weights[k] for k in ranks]
            terms = [p if k == j else through(r, p) for k, p in enumerate(partial)]
            summed = terms[0].clone()
            for term in terms[1:]:
                summed += term
            of_inputs[j].append(summed * (total / sizes[j] if sizes[j] else 1.0))
    return [torch.cat(each) for each in outputs], [torch.cat(each) for each in of_inputs], torch.cat(of_weights)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_layer_is_the_formula(sizes: tuple[int, ...], exchange: Exchange) -> None:
    q, r = c.int8(block=16), c.dynamic8(block=16)
    whole = made(lambda: nn.Linear(40, 50, bias=False))
    assert isinstance(whole, nn.Linear)
    random = torch.Generator().manual_seed(5)
    inputs, answers = (
        [torch.randn(n, width, generator=random, dtype=torch.float64) for n in sizes] for width in (40, 50)
    )

    def work(port: Port) -> list[Tensor]:
        layer = pt.hybrid(
            nn.Sequential(made(lambda: nn.Linear(40, 50, bias=False))),
            *(["0"],),
            exchange=exchange,
            activations=q,
            gradients=r,
            port=port,
        )
        x = inputs[port.rank].clone().requires_grad_()
        output = layer(x)
        output.backward(answers[port.rank])
        assert x.grad is not None
        return [output.detach(), x.grad, layer.full_gradients()["0.weight"]]

    outputs, of_inputs, of_weight = oracle(whole, inputs, answers, exchange, q, r)
    exact = [x @ whole.weight.detach().T for x in inputs]
    for rank, (output, gradient, weight) in enumerate(on_ranks(len(sizes), work).results):
        for found, expected in ((output, outputs[rank]), (gradient, of_inputs[rank]), (weight, of_weight)):
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
        if sizes[rank]:
            assert not torch.allclose(output, exact[rank], rtol=1e-6)


def test_a_codec_of_one_way_leaves_the_other_as_it_is() -> None:
    plain = passes((2, 2))
    only_back = passes((2, 2), gradients=c.int8(16))
    assert all(torch.equal(found[0], expected[0]) for found, expected in zip(only_back, plain, strict=True))
    assert not same(only_back, plain)
    assert not torch.equal(passes((2, 2), activations=c.int8(16))[0][0], plain[0][0])


# ---------------------------------------------------------------------- bytes


CODECS: dict[str, Wires] = {
    "8 bits both ways": Wires(c.int8(block=16), c.int8(block=16)),
    "16 bits, and 1 bit back": Wires(c.bf16(), c.one_bit()),
    "one way": Wires(gradients=c.int8(block=16)),
    "drawn": Wires(c.qsgd(127, 64)),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 2), (1, 3, 0, 2)], ids=str)
def test_what_is_sent_is_what_the_plan_and_the_layers_say(
    sizes: tuple[int, ...], exchange: Exchange, name: str
) -> None:
    """The bytes are exact, except for each rank's number of samples, and the codecs' seed number."""
    wires, num_ranks = CODECS[name], len(sizes)

    def work(step: bool) -> Callable[[Port], dict[str, list[float]]]:
        def run(port: Port) -> dict[str, list[float]]:
            codecs: Any = {"activations": wires.activations, "gradients": wires.gradients}
            net = pt.hybrid(made(images), ["7", "11"], exchange=exchange, port=port, **codecs)
            if step:
                net(batch("images", sizes[port.rank], torch.float64)).sum().backward()
            return dict(net.group.sent)

        return run

    before, after = (on_ranks(num_ranks, work(step)) for step in (False, True))
    planned = {each.name: each for each in volumes(made(images), batch("images", 2, torch.float64))}
    parts = {name: [len(p) for p in torch.arange(n).tensor_split(num_ranks)] for name, n in (("7", 7), ("11", 5))}
    expected = {name: exchange_bytes(planned[name], sizes, parts[name], wires, exchange) for name in parts}
    told = num_ranks * (num_ranks - 1) * 8 * (1 + wires.draws)
    sent = [sum(outcome.trace.bytes_sent.values()) for outcome in (before, after)]
    assert sent[1] - sent[0] == sum(expected.values()) + told
    for counted in after.results:
        assert {layer: sum(ways) for layer, ways in counted.items()} == expected


def test_indices_travel_as_they_are() -> None:
    """An embedding's indices are not encoded by the activations' codec; its output is."""
    indices = batch("words", 4, torch.float32)
    [table, *_] = volumes(words(), indices)
    assert exchange_bytes(table, (2, 2), (3, 3), Wires(c.bf16())) == 4 * 3 * 8 + 4 * 3 * 3 * (2 + 4)

    def work(port: Port) -> Tensor:
        net = pt.hybrid(made(words, torch.float32), ["0"], activations=c.bf16(), port=port)
        return net(indices.split(2)[port.rank]).detach()  # type: ignore[no-any-return]

    whole = made(words, torch.float32)
    assert isinstance(whole, nn.Sequential)
    rows = whole[0](indices).detach()
    for rank, found in enumerate(on_ranks(2, work).results):
        features = [rows.split(2)[rank][..., :3], rows.split(2)[rank][..., 3:]]
        features[1 - rank] = features[1 - rank].bfloat16().float()
        assert torch.equal(found, whole[1:](torch.cat(features, -1)).detach())


# ---------------------------------------------------------------------- plans


def test_a_plan_brings_its_codecs() -> None:
    sample = batch("images", 2, torch.float32)
    model = made(images, torch.float32)
    plan = pt.training.plan_layers(model, sample, workers=2, batch_size=4, activations="int8(16)", gradients="bf16")
    assert plan.model_parallel

    def work(port: Port) -> str:
        return str(pt.hybrid(made(images, torch.float32), plan, gradients="int8", port=port).group.wires)

    said = "activations by int8(block=16), their gradients by int8(block=256)"
    assert on_ranks(2, work).results == [said] * 2


def test_what_a_plan_compares_is_what_travels() -> None:
    """A layer of 1,000 inputs and 1,200 outputs without bias, of 1,500 samples of four workers."""
    model = nn.Sequential(nn.Linear(1000, 1200, bias=False))
    sample = torch.ones(2, 1000, requires_grad=True)
    common: dict[str, Any] = {"workers": 4, "batch_size": 1500, "link": pt.cluster.Link(0.0, 1e6)}
    whole, half, eight = (
        pt.training.plan_layers(model, sample, **common, **codecs)
        for codecs in ({}, {"gradients": "bf16"}, {"activations": "int8(250)", "gradients": "int8(250)"})
    )
    assert (whole.model_parallel, half.model_parallel, eight.model_parallel) == ((), ("0",), ("0",))
    assert [each.layers[0].model_bytes for each in (whole, half, eight)] == [6e6, (6e6 + 3e6) / 2, 6e6 * 254 / 1000]
    [layer] = volumes(model, sample)
    for plan in (whole, half, eight):
        exact = exchange_bytes(layer, [375] * 4, [300] * 4, plan.wires)
        assert plan.layers[0].model_s == pytest.approx(exact / 4 / 1e6)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"activations": c.feedback(c.one_bit())}, ValueError, r"feedback\(one_bit\(\)\) remembers the tensor"),
        ({"gradients": "threshold(0.5)"}, ValueError, r"wires vary in length.*use a codec of fixed length"),
        ({"activations": "int9"}, ValueError, "there is no codec 'int9' .did you mean int8"),
        ({"gradients": c.int8}, TypeError, r"write int8\(\)"),
    ],
)  # fmt: skip
def test_codecs_that_cannot_serve_are_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    def work(port: Port) -> None:
        with pytest.raises(error, match=said):
            pt.hybrid(made(images), ["7"], port=port, **given)

    on_ranks(2, work)
    with pytest.raises(error, match=said):
        pt.training.plan_layers(made(images), batch("images", 2, torch.float64), workers=2, batch_size=4, **given)


def test_ranks_with_other_codecs_are_told() -> None:
    codecs: list[Any] = [c.int8(), c.bf16()]
    with pytest.raises(pt.errors.Mismatch, match="disagree about codecs"):
        on_ranks(2, lambda port: pt.hybrid(made(images), ["7"], activations=codecs[port.rank], port=port))


def test_what_cannot_be_encoded_names_the_layer() -> None:
    def work(port: Port) -> str:
        net = pt.hybrid(made(images), ["7"], activations="int8", port=port)
        with pytest.raises(NotFinite) as error:
            net(torch.full((2, 2, 6, 6), torch.nan, dtype=torch.float64))
        return str(error.value)

    for rank, said in enumerate(on_ranks(2, work).results):
        assert f"the activations of layer 7 on rank {rank}" in said
