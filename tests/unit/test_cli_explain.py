"""`polytempo explain`: the sent messages, as text, and refusals."""

from __future__ import annotations

import json

import pytest
import torch

from command_output import asking
from polytempo import strategies
from polytempo.aggregation import mean
from polytempo.cli.look.explain import perceptron, sections
from polytempo.cli.options.values import count
from polytempo.compression import int8, through
from polytempo.core import Strategy, split
from polytempo.spec.explanation import explain

asked = asking("explain")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The command's output."""
    return asked(capsys, *arguments)[0]


@pytest.mark.parametrize(
    ("strategy", "lines"),
    [
        (
            "sync_sgd",
            ["every step: values as they are, by native", "the busiest worker sends 67.3 kB; all send 538 kB"],
        ),
        ("local_sgd(period=100)", ["  every 100 steps: values as they are, by native\n", "sends 673 B a step"]),
        ("gossip(period=1000)", ["every 1000 steps: values as they are, by mix", "the busiest worker sends 76.9 kB"]),
        ("delayed_sgd", ["the busiest worker sends 67.3 kB", "remembers 38.4 kB from step to step"]),
        (
            "post_local_sgd",
            ["every step, up to step 100: values as they are", "every 8 steps, from step 108 on: values as they are"],
        ),
        ("post_local_sgd(0)", ["step\n  nothing is sent\n", "every 8 steps: "]),
        ("robust_sgd(krum)", ["by merged(krum(wrong=1))", "the busiest worker sends 269 kB"]),
        (
            "bf16_sgd(route=ring)",
            ["every step: bf16(), by ring", "the busiest worker sends 33.6 kB", "in 112 messages"],
        ),
        ("bf16_sgd(route=tree)", ["the busiest worker sends 57.7 kB", "6 after one another"]),
        (
            "local_sgd(100, route=star, codec=bf16)",
            ["every 100 steps: bf16(), by star", "the busiest worker sends 135 kB"],
        ),
        ("power_sgd(route=tree)", ["by low_rank(rank=2)", "the busiest worker sends 9.58 kB"]),
        ("local_sgd(8, codec=feedback(bf16))", ["every 8 steps: feedback(bf16()), by native", "their sum decodes"]),
        ("local_sgd(8, codec=int8, route=all_gather)", ["because the strategy asks for that route"]),
        ("diloco(4, codec=int8)", ["every 4 steps: int8(block=256), by reduce_scatter"]),
        ("top_k_sgd(0.01)", ["feedback(top_k(ratio=0.01)), by all_gather", "because wires of different ranks hold"]),
        ("top_k_sgd(0.01, route=reduce_scatter)", ["by reduce_scatter"]),
        (
            "fed_coded(codec=int8)",
            ["down, a client: 38,728 bytes; 10 clients: 387 kB", "up, a client: 10,", "by int8(block=256); 10 clients"],
        ),
        ("fed_coded(codec=top_k(0.1, entropy=True))", ["up, a client: at most "]),
        ("one_bit_sgd", ["by reduce_scatter", "because codes cannot be added", "uncompressed, by a ring, 67.3 kB"]),
        ("bf16_sgd(route=reduce_scatter)", ["because the strategy asks for that route"]),
        ("threshold_sgd", ["sends at most ", "are agreements of codecs: lengths of wires, or scales"]),
        ("terngrad", ["are agreements of codecs"]),
        ("hogwild", ["the parameters exist once on a host"]),
        (
            "downpour(shards=2, codec=top_k(0.1), pull_codec=bf16)",
            [
                "the parameters live in 2 shards",
                "every 5 steps: top_k(ratio=0.1), by push",
                "a pull is at most 19.5 kB",
            ],
        ),
        ("easgd", ["every 4 steps: values as they are, by its answer", "a pull is 38.4 kB\n"]),
        ("async_sgd", ["every step: values as they are, by pull"]),
        (
            "then(downpour(), 40, sync_sgd)",
            ["first 40 steps of downpour(", "every step: values as they are, by native"],
        ),
        ("flexrr", ["a batch has 80 slices; it pays from 240 samples on, or with a larger grain"]),
        ("flexrr(grain=0.05, first_offer=0.05)", ["a batch has 20 slices; it pays from 60 samples on"]),
    ],
)
def test_what_is_sent(capsys: pytest.CaptureFixture[str], strategy: str, lines: list[str]) -> None:
    text = said(capsys, strategy)
    for line in lines:
        assert line in text, text


@pytest.mark.parametrize("name", strategies.__all__)
def test_every_strategy_can_be_explained(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Alone, too: then nothing is sent but to a parameter server, and between groups."""
    strategy = getattr(strategies, name)()
    least = strategy.holders * strategy.groups
    assert "38.4 kB" in said(capsys, name, "--workers", str(3 * least))
    alone = said(capsys, name, "--workers", str(least))
    assert "nothing is sent" in alone or "a parameter server" in alone or strategy.groups > 1
    assert ("the busiest worker sends" in alone) == (strategy.groups > 1)


@pytest.mark.parametrize(
    ("strategy", "device", "lines"),
    [
        ("sync_sgd", "cuda", ["native, a device for each worker: by nccl, no copy through the host"]),
        (
            "sync_sgd",
            "cuda",
            ["native, several workers on a device: staged: 38.4 kB to pinned memory and as many back"],
        ),
        ("sync_sgd(route=ring)", "cuda", ["by nccl, messages of a round in one batch"]),
        ("power_sgd", "cuda:1", ["low_rank(rank=2), several workers on a device: staged: 3.19 kB"]),
        ("top_k_sgd", "cuda", ["1.31 kB to pinned memory and 10.5 kB back, 9 copies", "these are bytes of wires"]),
        ("sync_sgd", "mps", ["mps has no backend in torch: staged: 38.4 kB"]),
        ("async_sgd", "cuda", ["a push is copied to pinned memory: 38.4 kB, 1 copy; the shards are on the host"]),
        ("gpipe(stages=2)", "cuda", ["activations and their gradients go through the host"]),
        ("hogwild", "cuda", ["refused (PT1901): "]),
        (
            "pipedream(stages=2, inner=async_sgd())",
            "cuda",
            ["a push is copied to pinned memory", "activations and their gradients"],
        ),
    ],
)
def test_the_way_on_a_device(capsys: pytest.CaptureFixture[str], strategy: str, device: str, lines: list[str]) -> None:
    _, _, text = said(capsys, strategy, "--device", device).partition(f"\non {device.partition(':')[0]}\n")
    for line in lines:
        assert line in text, text
    assert "several workers" in text or not device.endswith(":1")


def test_no_way_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "sync_sgd", "--device", "cpu") == said(capsys, "sync_sgd")
    found = json.loads(said(capsys, "sync_sgd", "--device", "cuda:1", "--json"))["device"]
    assert (found["backend"], found["shared"], found["a_device_each"], found["refused"]) == (
        "nccl",
        True,
        [False],
        None,
    )


def test_branches_are_said_by_name() -> None:
    transform = split(lambda name, tensor: "thin" if name == "b" else "wide", {"wide": mean(), "thin": through(int8())})
    strategy = Strategy("of a user", gradients=transform)
    found = explain(strategy, 4, {"w": torch.empty(100, 100), "b": torch.empty(4096)})
    lines = next(sections(strategy, found)).lines
    assert lines[0] == "every step (wide): values as they are, by native"
    assert lines[2] == "every step (thin): int8(block=256), by reduce_scatter"


def test_as_json_for_so_many_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "bf16_sgd", "--parameters", "6e6", "--workers", "2", "--json"))
    assert (found["workers"], found["tensors"]) == (2, 6)
    assert found["parameters"] == pytest.approx(6e6, rel=1e-3)
    assert found["bytes"] == 4 * found["parameters"]
    (exchange,) = found["exchanges"]
    assert (exchange["of"], exchange["by"], exchange["codec"], exchange["exact"]) == (
        "gradients",
        "native",
        "bf16()",
        True,
    )
    assert exchange["steps"] == {"first": 1, "period": 1, "last": None, "but": 0, "rule": ""}
    assert exchange["gradient_bytes"] == found["mean"]["gradient_bytes"] == 2 * 2 * found["parameters"]
    assert found["memory_bytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["top_k"], "top_k is a codec, not a strategy; write top_k_sgd, or local_sgd(codec=top_k)"),
        (["fp16()"], "fp16 is a codec, not a strategy; write local_sgd(codec=fp16)"),
        (["feedback(top_k)"], "feedback is a codec, not a strategy; write local_sgd(codec=feedback(top_k))"),
        (["low_rank(2)"], "low_rank is the codec of power_sgd; write power_sgd(rank=2)"),
        ([""], "STRATEGY '': the value is empty"),
        (["topk_sgd"], "no strategy 'topk_sgd' (did you mean top_k_sgd?)"),
        (
            ["local_sgd(codec=bf17)"],
            "local_sgd(codec=bf17): there is no codec 'bf17' (did you mean bf16?); there are: ",
        ),
        (["local_sgd(codec=topk(0.1))"], "there is no codec 'topk' (did you mean top_k?)"),
        (["local_sgd(codec=top_k(raito=0.1))"], "top_k has no argument 'raito' (did you mean ratio?)"),
        (["local_sgd(codec=top_k(7))"], "ratio"),
        (["local_sgd(codec=3)"], "codec must be one of these names: bf16, "),
        (["local_sgd(codec=feedback(feedback(bf16)))"], "keeps its own residual"),
        (["local_sgd(codec=feedback(dgc))"], "keeps its own residual"),
        (["local_sgd(route=all_gather)"], "a route takes a port and a buffer, and all_gather does not; use one of"),
        (["local_sgd(codec=int8, route=ring)"], "use route=all_gather, or, better, leave out route: then the codec"),
        (["sync_sgd(route=all_gather)"], "there is no route 'all_gather'; there are: "),
        (["top_k_sgd(route=ring)"], "wires cannot be summed, so route=ring is impossible; use route=all_gather"),
        (["downpour(codec=random_k)"], "wires leave out which entries they hold"),
        (["sync_sgd", "--workers", "0"], "--workers 0: must be a "),
        (["sync_sgd", "--workers", "5000"], "--workers 5000: must be a "),
        (["sync_sgd", "--parameters", "many"], "--parameters many: must be a number of parameters such as 6e6"),
        (["sync_sgd", "--parameters", "10"], "--parameters 10: a perceptron of 784 inputs has at least 807"),
        (["sync_sgd", "--parameters", "1M", "--job", "digits"], "--job digits has parameters of its own"),
        (["sync_sgd", "--job", "nist"], "there is no job 'nist'"),
    ],
)
def test_wrong_questions(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    out, err = asked(capsys, *arguments, code=2)
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    ("text", "number"),
    [("6e6", 6_000_000), ("250k", 250_000), ("25M", 25_000_000), ("1_000", 1000), ("1.5m", 1_500_000)],
)
def test_numbers(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize("numel", [807, 10_000, 6_000_000])
def test_a_perceptron_of_about_so_many(numel: int) -> None:
    assert sum(p.numel() for p in perceptron(numel).parameters()) == pytest.approx(numel, rel=0.05)
