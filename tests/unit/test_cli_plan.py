"""`polytempo plan layers`: what it prints, and every way to ask wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polytempo.cli.main import app

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


def asked(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """What the command prints to standard output and standard error."""
    with pytest.raises(SystemExit) as end:
        app(["plan", "layers", *arguments])
    out = capsys.readouterr()
    assert end.value.code == code, out.err
    return out.out, out.err


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
        ("--workers 0", "--workers 0: must be at least 1"),
        ("--global-batch-size 0", "--global-batch-size 0: must be at least 1"),
        ("--shards 0", "--shards 0: must be at least 1"),
        ("--latency-us -1", "--latency-us -1: must be at least 0"),
        ("--link 10", "--link 10: write a speed like 100mbit, 1gbit or 2.5gbit"),
        ("--reduction rings", "--reduction rings: must be one of ring, halving_doubling, tree, server"),
        ("--by time", "--by time: must be one of bytes, seconds"),
        ("--batch-size 4 --global-batch-size 8", "say the same in two ways; leave one out"),
    ],
)
def test_mistakes(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in asked(capsys, "digits", *arguments.split(), code=2)[1]
