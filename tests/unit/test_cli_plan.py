"""`polytempo plan layers`: its output, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_output import asking

ALEXNET = """
import torch
from torch import nn
import polytempo as pt
from paper_models import alexnet

def model():
    with torch.device("meta"):
        return alexnet()

def data(path):
    return pt.Data([(torch.empty(3, 224, 224, device="meta"), torch.tensor(0))] * 40)

job = pt.Job(model=model, data=data, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD, name="alexnet")
"""


asked = asking("plan", "layers")


@pytest.fixture
def alexnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "net.py").write_text(ALEXNET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "net.py:job"


def test_the_table_of_alexnet(alexnet: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = asked(capsys, alexnet, "--workers", "32", "--global-batch-size", "1024", "--shards", "8")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["layer", "kind", "|W|", "|D|", "|D|/|W|", "Gflop", "flop/byte", "way"]
    assert [line[-1] for line in lines[1:9]] == ["data"] * 5 + ["model"] * 2 + ["data"]
    assert lines[6] == ["9", "linear", "151", "MB", "37.7", "MB", "0.25", "232", "48", "model"]
    assert lines[9][:6] == ["all", "249", "MB", "1.68", "GB", "6.75"]
    assert "32 workers, 1,024 samples a step, 10 Gbit/s, 50 us" in out
    assert lines[12] == ["by", "a", "worker", "tree", "server", "ring", "halving/doubling"]
    assert [line[:3] for line in lines[13:16]] == [
        ["data", "249", "MB"],
        ["model", "1.68", "GB"],
        ["hybrid", "85.9", "MB"],
    ]
    assert "server: 8 shards" in out


def test_figures_as_json(alexnet: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [alexnet, "--workers", "4", "--global-batch-size", "1024", "--link", "1gbit", "--latency-us", "0"]
    told = json.loads(asked(capsys, *arguments, "--by", "seconds", "--json")[0])
    assert (told["workers"], told["batch_size"], told["bytes_per_s"], told["latency_s"]) == (4, 1024, 125e6, 0.0)
    assert [each["way"] for each in told["layers"]][-3:] == ["model", "model", "data"]
    assert told["bytes"]["data"] == sum(each["data_bytes"] for each in told["layers"])
    sent = sum(4 * (each["weights"] + each["biases"]) for each in told["layers"])
    assert told["seconds"]["ring"]["data"] == pytest.approx(2 * 3 / 4 * sent / 125e6)
    assert told["seconds"]["tree"]["data"] == pytest.approx(4 * sent / 125e6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workers 0", "--workers 0: must be a "),
        ("--global-batch-size 0", "--global-batch-size 0: must be a "),
        ("--shards 0", "--shards 0: must be a "),
        ("--latency-us -1", "--latency-us -1: must be a "),
        ("--link 10", "--link 10: write a speed like 100mbit, 1gbit or 2.5gbit"),
        ("--reduction rings", "--reduction rings: must be one of '"),
        ("--by time", "--by time: must be one of '"),
        ("--batch-size 4 --global-batch-size 8", "say the same in two ways; leave one out"),
        ("--activations int9", "--activations int9: there is no codec 'int9' (did you mean int8"),
        ("--gradients threshold(0.5)", "wires vary in length"),
        ("--gradients low_rank", "--gradients low_rank: PowerSGD is a way to sum gradients of weights, and no codec"),
    ],
)
def test_mistakes(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in asked(capsys, "digits", *arguments.split(), code=2)[1]


def test_codecs_make_model_parallelism_pay(alexnet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """fc8 has 16.4 MB of weights and 16.8 MB of inputs, in 8 bits 4.26; the strategy that is printed has the codecs."""
    arguments = [alexnet, "--workers", "32", "--global-batch-size", "1024"]
    out, _ = asked(capsys, *arguments, "--activations", "int8", "--gradients", "int8")
    lines = [line.split() for line in out.splitlines()]
    assert lines[8] == ["15", "linear", "16.4", "MB", "4.26", "MB", "0.26", "25.2", "48", "model"]
    assert "model: activations by int8(block=256), their gradients by int8(block=256)" in out
    assert out.splitlines()[-1] == "--strategy \"hybrid('9, 12, 15', activations=int8, gradients=int8)\""
    told = json.loads(asked(capsys, *arguments, "--activations", "int8", "--json")[0])
    assert (told["activations"], told["gradients"]) == ("int8", None)
    assert told["layers"][-1]["model_bytes"] == (4 + 1 + 4 / 256) / 2 * 1024 * 4096


split = asking("plan", "split")


def test_ways_that_send_the_fewest_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """The digits' layers are a pair: 2 · 32 · 10 numbers forward; the model's own input needs no gradient."""
    out, err = split(capsys, "digits", "--link", "1gbit", "--latency-us", "0", "--gflops", "100")
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["0", "linear", "32.8", "kB", "column", "0", "B", "0", "B", "0", "ms", "0.00786", "ms"]
    assert lines[2][:8] == ["2", "linear", "5.12", "kB", "row", "2.56", "kB", "0"]
    assert out.splitlines()[-1] == "--strategy \"split('0: column, 2: row', parts=2)\""
    assert "note: on this link the split makes a step slower: exchanges take 0.0102 ms, and each worker" in err
    assert "most of it is layer 2, 0.0102 ms against 0.00123 ms. It still divides the memory by 2" in err
    told = json.loads(split(capsys, "digits", "--link", "100gbit", "--latency-us", "0", "--json")[0])
    assert told["rules"] == {"0": "column", "2": "row"}
    assert [each["forward_bytes"] for each in told["layers"]] == [0, 2 * 32 * 10 * 4]
    assert told["layers"][1]["seconds"] == pytest.approx(32 * 10 * 4 / 12.5e9)
    assert told["layers"][0]["saved_s"] == pytest.approx(0.5 * 6 * 64 * 128 * 32 / 10e9)
    assert split(capsys, "digits", "--link", "100gbit", "--latency-us", "0")[1] == ""


def test_codecs_of_a_split(capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers make a wire of 160 numbers each: 160 bytes and a scale of 4; a sum has two rounds of them."""
    out, _ = split(capsys, "digits", "--activations", "int8", "--link", "1gbit")
    assert [line.split()[4:8] for line in out.splitlines()[1:3]] == [
        ["column", "0", "B", "0"],
        ["row", "656", "B", "0"],
    ]
    assert "activations by int8(block=256)" in out
    assert out.splitlines()[-1] == "--strategy \"split('0: column, 2: row', parts=2, activations=int8)\""
    told = json.loads(split(capsys, "digits", "--activations", "int8", "--json")[0])
    assert told["layers"][1]["forward_bytes"] == 656


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parts 1", "--parts 1: must be a "),
        ("--gflops 0", "--gflops 0: must be a "),
        ("--batch-size 0", "--batch-size 0: must be a "),
        ("--link fast", "--link fast: write a speed like"),
        ("--gradients bf17", "--gradients bf17: there is no codec 'bf17' (did you mean bf16"),
        ("--activations feedback(int8)", "remembers the tensor before"),
    ],
)
def test_mistakes_of_a_split(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in split(capsys, "digits", *arguments.split(), code=2)[1]
