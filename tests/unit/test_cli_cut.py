"""`polytempo cut`: its output, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_output import asking
from polytempo.cli.predict.cut import predictions, state_per_parameter
from polytempo.jobs import find
from polytempo.partition.schedules.timetable import LinkSeconds

WIDE = """
import torch
from torch import nn
import polytempo as pt

def data(path):
    return pt.Data([(torch.ones(8), torch.tensor(0))] * 40)

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 800), nn.Linear(800, 800), nn.Linear(800, 2))

def made(loss):
    return pt.Job(model=model, data=data, loss=loss, optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr), name="wide")

job = made(nn.functional.cross_entropy)
whole = made(pt.of_batch(lambda model, batch: model(batch[0]).sum()))
"""


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "wide.py").write_text(WIDE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "wide.py"


asked = asking("cut")


def test_a_table_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = asked(capsys, "digits", "--by", "2")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["stage", "layers", "parameters", "time", "share", "memory", "in", "out", "back"]
    assert (lines[1][:4], lines[1][-4:]) == (["0", "0,", "1", "8,320"], ["-", "16.4", "kB", "-"])
    assert (lines[2][:3], lines[2][-5:]) == (["1", "2", "1,290"], ["16.4", "kB", "-", "16.4", "kB"])
    assert "the same by hand: --by 2\n" in out


def test_figures_as_json(wide: str, capsys: pytest.CaptureFixture[str]) -> None:
    """AdamW keeps two numbers a parameter; a micro-batch of 5 samples of 800 numbers is 16,000 bytes."""
    out, err = asked(capsys, f"{wide}:job", "--by", "1,2,3", "--batch-size", "5", "--json")
    found = json.loads(out)
    assert found["begins"] == ["1", "2", "3"]
    assert [stage["parameters"] for stage in found["stages"]] == [72, 7200, 640800, 1602]
    assert [(stage["bytes_in"], stage["bytes_out"]) for stage in found["stages"]] == [
        (0, 160), (160, 16000), (16000, 16000), (16000, 0)
    ]  # fmt: skip
    assert [stage["memory_bytes"] - 16 * stage["parameters"] for stage in found["stages"]] == [160, 160, 16000, 16000]
    assert [value["targets"] for value in found["values"]] == [[1], [2], [3]]
    assert all(stage["seconds"] > 0 for stage in found["stages"])
    assert "stage 2 (2) takes" in err
    assert "and a pipeline is as slow as its slowest stage: 4 stages are at most" in err


def test_codecs_make_the_messages_shorter_and_a_link_makes_them_take_time(
    wide: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of 32 samples of 8, 800 and 800 numbers: a byte and 4/256 of one there, 2 bytes back; or 4."""
    codecs = "--activations", "int8", "--gradients", "bf16"
    command = f"{wide}:job", "--by", "1,2,3", "--batch-size", "32"
    out, _ = asked(capsys, *command, *codecs, "--gbit-per-s", "0.001", "--json")
    found = json.loads(out)
    assert [(each["bytes_in"], each["bytes_out"], each["bytes_back"]) for each in found["stages"]] == [
        (0, 260, 0), (260, 26000, 512), (26000, 26000, 51200), (26000, 0, 51200)
    ]  # fmt: skip
    steps = {each["schedule"]: each["step_s"] for each in found["schedules"]}
    line_s = 51200 * 8 / 1e6
    assert steps["pipelined_backprop"] == pytest.approx(line_s, rel=0.2)  # as the slowest link has it
    assert steps["synthetic_gradients"] == pytest.approx(line_s, rel=0.2)
    assert steps["one_f_one_b"] > 1.2 * line_s  # at the end of a batch the link is empty
    out, _ = asked(capsys, *command, *codecs)
    assert (
        "activations by int8(block=256), their gradients by bf16(): stages send 155 kB a batch, 412 kB without" in out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wide.py:job", "--stages", "5"], "error: stages=5, and the model can be cut into at most 4 parts"),
        (["wide.py:job", "--stages", "0"], "error: --stages 0: must be a "),
        (["wide.py:job", "--gbit-per-s", "0"], "error: --gbit-per-s 0: must be a "),
        (
            ["wide.py:job", "--activations", "int9"],
            "error: --activations int9: there is no codec 'int9' (did you mean int8?)",
        ),
        (["wide.py:job", "--gradients", "threshold(0.5)"], "error: threshold(tau=0.5) wires vary in length"),
        (["wide.py:job", "--batch-size", "0"], "error: --batch-size 0: must be a "),
        (["wide.py:job", "--by", "trafic"], "error: --by trafic: did you mean traffic? There are: operations, time"),
        (["wide.py:job", "--by", "1,,2"], "error: --by 1,,2: a name is empty"),
        (["wide.py:job", "--by", "17"], "error: no layer or operation of the model is called 17; did you mean 1?"),
        (["wide.py:job", "--by", "1", "--stages", "3"], "error: stages=3, and 1 names begin stages behind the first"),
        (["wide.py:whole"], "error: job wide: its loss is called with the model and the whole batch"),
    ],
)
def test_a_wrong_question_has_one_answer(
    wide: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out, err = asked(capsys, *arguments, code=2)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(message)


def test_a_link_in_seconds_is_a_link_between_any_two_stages() -> None:
    """And micro-batches' messages take their part of it."""
    links: list[LinkSeconds] = [0.4, lambda source, target: 0.4, 0.0]
    constant, called, without = ([each.step_s for each in predictions([1.0, 2.0, 1.0], 4, link)] for link in links)
    assert constant == pytest.approx(called)
    assert constant != pytest.approx(without)


def test_the_state_of_an_optimizer_is_counted() -> None:
    kept = {name: state_per_parameter(find(name)) for name in ("chars", "digits")}
    assert kept == {"chars": 2, "digits": 1}, "AdamW has two moments, SGD its momentum"
