"""`polytempo explain`: what is sent, as text; and every way to ask wrongly."""

from __future__ import annotations

import json

import pytest

from polytempo import strategies
from polytempo.cli.explain import count, perceptron
from polytempo.cli.main import app


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints."""
    with pytest.raises(SystemExit) as end:
        app(["explain", *arguments])
    out = capsys.readouterr()
    assert end.value.code == 0, out.err
    return out.out


@pytest.mark.parametrize(
    ("strategy", "lines"),
    [
        ("sync_sgd", ["38.4 kB of values, uncompressed, every step", "the busiest worker sends 67.3 kB each time"]),
        ("local_sgd(period=8)", ["38.4 kB of values, uncompressed, every 8 steps"]),
        ("delayed_sgd", ["uncompressed, every step", "the busiest worker sends 67.3 kB each time"]),
        ("post_local_sgd(6, 4)", ["in 6 of the first 64 steps", "in 14 of the first 64 steps"]),
        ("local_sgd(8, codec=feedback(bf16))", ["every 8 steps:", "feedback(bf16()): all-reduce of 19.2 kB of wires"]),
        ("diloco(4, codec=int8)", ["every 4 steps:", "int8(block=256): reduce-scatter of "]),
        ("top_k_sgd(0.01)", ["feedback(top_k(ratio=0.01)): all-gather, ", "because ", "each rank sends "]),
        ("top_k_sgd(0.01, route=reduce_scatter)", ["reduce-scatter of "]),
        ("one_bit_sgd", ["reduce-scatter of ", "because codes cannot be added"]),
        ("bf16_sgd(route=reduce_scatter)", ["because route=reduce_scatter was asked for"]),
        ("bf16_sgd(route=all_gather)", ["because route=all_gather was asked for"]),
        ("one_bit_sgd(route=reduce_scatter)", ["because codes cannot be added"]),
        ("hogwild", ["the parameters exist once on a host"]),
        (
            "downpour(shards=2, codec=top_k(0.1), pull_codec=bf16)",
            ["the parameters live in 2 shards", "by top_k(ratio=0.1)", "a pull is 19.5 kB by bf16()", "every 5 steps"],
        ),
        ("easgd", ["a pull is 38.4 kB, uncompressed, before the first step only"]),
    ],
)
def test_what_is_sent(capsys: pytest.CaptureFixture[str], strategy: str, lines: list[str]) -> None:
    text = said(capsys, strategy)
    for line in lines:
        assert line in text


@pytest.mark.parametrize("name", strategies.__all__)
def test_every_strategy_can_be_explained(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Alone, too: then nothing is sent but to a parameter server."""
    assert "38.4 kB" in said(capsys, name, "--workers", "3")
    alone = said(capsys, name, "--workers", "1")
    assert "nothing is sent" in alone or "a parameter server" in alone
    assert "each rank sends" not in alone


def test_as_json_for_so_many_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "bf16_sgd", "--parameters", "6e6", "--workers", "2", "--json"))
    assert (found["workers"], found["tensors"]) == (2, 6)
    assert found["parameters"] == pytest.approx(6e6, rel=1e-3)
    assert found["bytes"] == 4 * found["parameters"]
    assert list(found["sends"]) == ["gradients, before the optimizer's step", "parameters, after the optimizer's step"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["top_k"], "top_k is a codec, not a strategy; write top_k_sgd, or local_sgd(codec=top_k)"),
        (["fp16()"], "fp16 is a codec, not a strategy; write local_sgd(codec=fp16)"),
        (["feedback(top_k)"], "feedback is a codec, not a strategy; write local_sgd(codec=feedback(top_k))"),
        (["low_rank(2)"], "low_rank is what power_sgd does to gradients; write power_sgd(rank=2)"),
        (["topk_sgd"], "no strategy 'topk_sgd' (did you mean top_k_sgd?)"),
        (
            ["local_sgd(codec=bf17)"],
            "local_sgd(codec=bf17): there is no codec 'bf17' (did you mean bf16?); there are: ",
        ),
        (["local_sgd(codec=topk(0.1))"], "there is no codec 'topk' (did you mean top_k?)"),
        (["local_sgd(codec=top_k(raito=0.1))"], "top_k has no argument 'raito' (did you mean ratio?)"),
        (["local_sgd(codec=top_k(7))"], "ratio"),
        (["local_sgd(codec=3)"], "codec must be one of these names: bf16, "),
        (["local_sgd(codec=feedback(feedback(bf16)))"], "keeps what it has not sent already"),
        (["local_sgd(codec=feedback(dgc))"], "keeps what it has not sent already"),
        (["sync_sgd(route=all_gather)"], "there is no route 'all_gather'; there are: "),
        (["top_k_sgd(route=ring)"], "wires cannot be summed, so route=ring is impossible; use route=all_gather"),
        (["downpour(codec=random_k)"], "wires leave out which entries they hold"),
        (["sync_sgd", "--workers", "0"], "--workers 0: must be from 1 to 4096"),
        (["sync_sgd", "--workers", "5000"], "--workers 5000: must be from 1 to 4096"),
        (["sync_sgd", "--parameters", "many"], "--parameters many: a number of parameters such as 6e6"),
        (["sync_sgd", "--parameters", "10"], "--parameters 10: a perceptron of 784 inputs has at least 807"),
        (["sync_sgd", "--parameters", "1M", "--job", "digits"], "--job digits has parameters of its own"),
        (["sync_sgd", "--job", "nist"], "there is no job 'nist'"),
    ],
)
def test_wrong_questions(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as end:
        app(["explain", *arguments])
    out = capsys.readouterr()
    assert end.value.code == 2
    assert message in out.err
    assert out.out == ""


@pytest.mark.parametrize(
    ("text", "number"),
    [("6e6", 6_000_000), ("250k", 250_000), ("25M", 25_000_000), ("1_000", 1000), ("1.5m", 1_500_000)],
)
def test_numbers(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize("numel", [807, 10_000, 6_000_000])
def test_a_perceptron_of_about_so_many(numel: int) -> None:
    assert sum(p.numel() for p in perceptron(numel).parameters()) == pytest.approx(numel, rel=0.05)
