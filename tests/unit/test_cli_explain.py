"""`polytempo explain`: what is sent, as text; and every way to ask wrongly."""

from __future__ import annotations

import json

import pytest
import torch

from polytempo import strategies
from polytempo.aggregation import mean, nesterov
from polytempo.cli.explain import count, explained, perceptron
from polytempo.cli.main import app
from polytempo.collectives import ring
from polytempo.compression import bf16, int8, through
from polytempo.core import Bundle, Port, Strategy, Transform, chain, identity, split
from polytempo.core.transform import Part
from polytempo.synchronization import after, delayed, every


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
        (
            "local_sgd(period=100)",
            ["  every 100 steps:\n  38.4 kB of values, uncompressed\n", "sends 67.3 kB each time"],
        ),
        ("gossip(period=1000)", ["  every 1000 steps:\n", "the busiest worker sends 76.9 kB each time"]),
        ("delayed_sgd", ["uncompressed, every step", "the busiest worker sends 67.3 kB each time"]),
        (
            "post_local_sgd",
            [
                "  in the first 100 steps:\n  38.4 kB of values, uncompressed\n",
                "  after step 100:\n  every 8 steps:\n  38.4 kB of values, uncompressed\n",
            ],
        ),
        ("post_local_sgd(0)", ["step\n  nothing is sent\n", "  after step 0:\n"]),
        (
            "robust_sgd(krum)",
            ["38.4 kB of values, uncompressed, every step", "the busiest worker sends 269 kB each time"],
        ),
        (
            "bf16_sgd(route=ring)",
            ["all-reduce of 19.2 kB of wires by ring", "the busiest worker sends 33.6 kB each time"],
        ),
        ("bf16_sgd(route=tree)", ["the busiest worker sends 57.7 kB each time"]),
        ("local_sgd(100, route=star, codec=bf16)", ["every 100 steps:\n  bf16()", "the busiest worker sends 135 kB"]),
        ("power_sgd(route=tree)", ["of Q, 1.54 kB, by tree", "the busiest worker sends 9.58 kB each time"]),
        ("local_sgd(8, codec=feedback(bf16))", ["every 8 steps:", "feedback(bf16()): all-reduce of 19.2 kB of wires"]),
        ("local_sgd(8, codec=int8, route=all_gather)", ["because route=all_gather was asked for"]),
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


def test_krum_among_too_few_names_the_workers_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["explain", "robust_sgd(krum)", "--workers", "3"])
    assert "krum(wrong=1) needs at least 5 ranks, got 3" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["sync_sgd(route=ring)", "delayed_sgd(route=ring)", "bf16_sgd(route=ring)"])
def test_messages_among_too_many_are_not_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """And collectives of the world are, among any number."""
    monkeypatch.setattr("polytempo.cli.explain._MOST_SENDERS", 4)
    refused = "messages from worker to worker are counted for up to 4 workers; try fewer --workers"
    assert refused in said(capsys, strategy, "--workers", "5")
    assert "the busiest worker sends " in said(capsys, strategy, "--workers", "4")
    assert "the busiest worker sends " in said(capsys, "sync_sgd", "--workers", "5")


def test_what_nobody_explains_is_watched() -> None:
    """On every third step; and by a rule that few workers cannot follow."""

    async def third(port: Port, bundle: Bundle, step: int) -> tuple[Bundle, int]:
        if step % 3 == 0:
            await port.all_gather(bundle.flat)
        return bundle, step + 1

    async def among_many(port: Port, bundle: Bundle, state: None) -> tuple[Bundle, None]:
        if port.size < 6:
            raise ValueError(f"needs 6 ranks, got {port.size}")
        return bundle.with_flat(await port.all_reduce(bundle.flat)), None

    parameters = Bundle({"w": torch.empty(1000, device="meta")})
    every_third = Transform(lambda parameters: 1, third)
    for transform, lines in (
        (every_third, ["4 kB of values, uncompressed, every 3 steps", "the busiest worker sends 24 kB each time"]),
        (
            Transform(lambda parameters: None, among_many),
            ["4 kB of values, uncompressed, every step", "the busiest worker sends 6.86 kB each time"],
        ),
    ):
        assert next(explained(Strategy("of a user", gradients=transform), parameters, 7)).lines == lines


MEAN = ["40 kB of values, uncompressed", "the busiest worker sends 60 kB each time"]
CODES = [
    "int8(block=256): reduce-scatter of 10.2 kB of codes, sum, all-gather of the sum's codes",
    "because codes cannot be added, but the owner of a stripe can decode, add and encode again",
    "each rank sends 15.3 kB; uncompressed, by a ring, 60 kB, 3.93 times as much",
]


async def _second(port: Port, bundle: Bundle, step: int) -> tuple[Bundle, int]:
    if step % 2 == 0:
        await port.all_gather(bundle.flat)
    return bundle, step + 1


async def _nonzero(port: Port, bundle: Bundle, state: None) -> tuple[Bundle, None]:
    await port.all_gather(bundle.flat[bundle.flat.nonzero()])
    return bundle, state


SECOND = Transform(lambda parameters: 1, _second)
NONZERO = Transform(lambda parameters: None, _nonzero)


@pytest.mark.parametrize(
    ("transform", "lines"),
    [
        (chain(every(100, mean()), through(int8())), ["every 100 steps:", *MEAN, "every step:", *CODES]),
        (chain(every(100, mean()), mean()), ["every 100 steps:", *MEAN, "every step:", *MEAN]),
        (chain(every(100, mean()), SECOND), ["every 100 steps:", *MEAN, "every 2 steps:", MEAN[0], "120 kB"]),
        (chain(mean(), through(int8())), [f"{MEAN[0]}, every step", MEAN[1], *CODES]),
        (every(8, chain(through(int8()), nesterov(), mean())), ["every 8 steps:", *CODES, *MEAN]),
        (
            chain(after(5, every(8, mean())), identity(), after(5, mean())),
            ["after step 5:", "every 8 steps:", *MEAN, "after step 5:", *MEAN],
        ),
        (
            chain(every(8, mean()), NONZERO),
            ["every 8 steps:", *MEAN, "besides:", "what it sends depends on the values"],
        ),
        (delayed(2, every(8, mean())), ["every 8 steps:", *MEAN]),
        (every(8, SECOND), ["every 8 steps:", f"{MEAN[0]}, of these every 2 steps", "120 kB"]),
        (split(lambda name, tensor: "all", {"all": mean()}), ["all (1 tensors):", *MEAN]),
        (every(8, nesterov()), ["nothing is sent in the first 64 steps"]),
        (
            chain(every(8, through(int8())), through(bf16(), route=ring)),
            ["every 8 steps:", *CODES, "every step:", "bf16(): ", "because ", "each message", "the busiest worker "],
        ),
    ],
)
def test_each_part_is_said_under_its_own_headings(transform: Transform, lines: list[str]) -> None:
    """With its own bytes, whoever counts them; parts that send nothing are left out."""
    parameters = Bundle({"w": torch.empty(100, 100, device="meta")})
    found = next(explained(Strategy("of a user", gradients=transform), parameters, 4)).lines
    assert len(found) == len(lines)
    assert all(line in text for line, text in zip(lines, found, strict=True)), found


@pytest.mark.parametrize("words", ["my own rule, which sends a bit of everything now and then", "as follows:"])
def test_words_do_not_decide_what_is_counted(words: str) -> None:
    parameters = Bundle({"w": torch.empty(100, 100, device="meta")})
    for says_bytes, lines in ((False, [words, MEAN[1]]), (True, [words])):
        transform = mean()._replace(explain=lambda p, n, known=says_bytes: [Part([words], known)])
        assert next(explained(Strategy("of a user", gradients=transform), parameters, 4)).lines == lines


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
        ([""], "STRATEGY '': the value is empty; write a strategy, such as 'top_k_sgd(0.01)'"),
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
        (["local_sgd(route=all_gather)"], "a route takes a port and a buffer, and all_gather does not; use one of"),
        (["local_sgd(codec=int8, route=ring)"], "use route=all_gather, or, better, leave out route: then the codec"),
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
