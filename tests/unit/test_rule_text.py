"""Rules of layers as text: a strategy's name makes the strategy again, and mistakes are named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import polytempo as pt
from polytempo.core.port import world_port
from polytempo.partition.hybrid.divided_names import DividedNames
from polytempo.partition.tensor import column, places, row
from polytempo.partition.tensor.rules import rule_text, rules_of
from polytempo.partition.tensor.way import SplitLayers
from polytempo.spec.text.catalogue import parse_strategy

s = pt.strategies

RULES = {"*.up": "column", "qkv": column(heads=8, packed=3), "out": row(heads=8), "last": column(gather=True)}
PICTURES = {"conv*": places(rows=2), "pool": places(rows=2, columns=3), "norm": "places"}


def test_a_strategy_s_name_makes_it_again() -> None:
    strategy = s.split(RULES, parts=3, inner=s.local_sgd(period=4))
    again = parse_strategy(str(strategy))
    assert isinstance(again.parted, SplitLayers)
    assert (again.name, again.parted, again.holders) == (strategy.name, strategy.parted, 3)
    assert dict(again.parted.rules) == rules_of(RULES)  # type: ignore[arg-type]
    hybrid = parse_strategy("hybrid('a.*, b', exchange='turns', inner=top_k_sgd)")
    assert isinstance(hybrid.parted, DividedNames)
    assert (hybrid.parted.names, hybrid.holders) == (("a.*", "b"), 1)
    assert parse_strategy(str(hybrid)).parted == hybrid.parted


def test_places_in_rules() -> None:
    text = "conv*: places(rows=2), pool: places(rows=2, columns=3), norm: places"
    assert rule_text(rules_of(PICTURES)) == text
    assert rules_of(text) == rules_of(PICTURES)
    with pytest.raises(ValueError, match=r"places rows and columns; got heads=2"):
        rules_of("conv: places(heads=2)")


def test_codecs_of_what_layers_exchange_stand_in_the_name() -> None:
    strategy = parse_strategy("split('up: column, down: row', parts=2, activations=int8, gradients=dynamic8)")
    assert isinstance(strategy.parted, SplitLayers)
    assert str(strategy.parted.wires) == "activations by int8(block=256), their gradients by dynamic8(block=4096)"
    assert "activations=int8(block=256)" in str(strategy)
    assert parse_strategy(str(strategy)).parted == strategy.parted
    assert "activations" not in str(s.split(RULES))
    hybrid = parse_strategy("hybrid('fc.*', gradients=bf16, inner=int8_sgd)")
    assert isinstance(hybrid.parted, DividedNames)
    assert str(hybrid.parted.wires) == "their gradients by bf16()"
    assert parse_strategy(str(hybrid)).parted == hybrid.parted
    assert "gradients" not in str(s.hybrid("fc.*"))


def test_text_is_read_with_spaces_and_without() -> None:
    text = "*.up: column, qkv: column(heads=8, packed=3), out: row(heads=8), last: column(gather=True)"
    assert rule_text(rules_of(RULES)) == text
    assert rules_of(text) == rules_of(
        " *.up :column,qkv:column( heads=8,packed = 3 ) ,out:row(heads=8),last:column(gather=true)"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: s.split("up column"), "'up column' cannot be read; rules are written '*.up: column"),
        (lambda: s.split("up: colunm"), "there is no way 'colunm' to split a layer (did you mean 'column'?)"),
        (lambda: s.split("up: column(head=8)"), "'head=8' is not an option of a way; there are heads=8"),
        (lambda: s.split("up: row(gather=True)"), "row has the option heads alone"),
        (lambda: s.split("up: heads(heads=2)"), "the way 'heads' has no options"),
        (lambda: s.split("up: row, up: column"), "the rules have 'up' twice"),
        (lambda: s.split(""), "no rule says which layers are split"),
        (lambda: s.split(3), "split(rules=…): expected a Mapping or a text, not 3"),  # type: ignore[arg-type]
        (lambda: s.split("up: column(heads=0)"), "column(heads=0): must be a whole number, at least 1"),
        (lambda: column(packed=0), "column(packed=0): must be a whole number, at least 1"),
        (lambda: row(heads="2"), "row(heads='2'): must be a whole number, at least 1"),  # type: ignore[arg-type]
        (lambda: pt.split(torch.nn.Linear(2, 2), ["0"], port=ALONE), "rules are a dictionary such as"),  # type: ignore[arg-type]
        (lambda: s.hybrid(3), "hybrid(layers=…): expected a text or a Sequence, not 3"),  # type: ignore[arg-type]
        (lambda: s.hybrid(["a", 1]), "no layer is named, got ['a', 1]"),  # type: ignore[list-item]
        (lambda: s.split({"a b": "row"}), "pattern 'a b' of a rule has a space"),
        (lambda: s.split("up: row", parts=0), "parts=0: a layer has parts on 1 worker or more"),
        (lambda: s.split(sequence=True), "sequence=True needs rules"),
        (lambda: s.split("up: row", inner=s.downpour()), "PT1701"),
        (lambda: s.split("up: row", inner=s.gpipe()), "PT1704"),
        (lambda: s.split("up: row", inner=s.split("up: row")), "PT1705"),
        (lambda: s.gpipe(inner=s.hybrid("up")), "PT1714"),
        (lambda: s.hybrid(""), "no layer is named; give names such as 'classifier.*'"),
        (lambda: s.hybrid("up", exchange="turn"), "expected 'joined' or 'turns' or 'slices', not 'turn'"),  # type: ignore[arg-type]
        (lambda: s.hybrid("up", link="1gbit"), "link='1gbit' is for layers that are planned"),
        (lambda: s.hybrid("up", activations=pt.compression.threshold(0.5)), "wires vary in length"),
        (lambda: s.hybrid("up", inner=s.local_sgd()), "all workers make each step of a divided layer together"),
        (lambda: pt.run(JOB, s.split("0: row", parts=2), 3), "has each model's layers on 2 workers, so workers=3"),
        (lambda: pt.run(JOB, s.split("up: row"), 2), "the model has no layer 'up'; it has 0, 1, 2"),
        (lambda: pt.run(JOB, s.split("0: heads"), 2), "0 is a Linear, which cannot be split by heads"),
        (lambda: pt.run(JOB, s.hybrid("1"), 2), "layer 1 cannot be divided over 2 ranks: ReLU is none of Linear"),
        (lambda: pt.run(JOB, s.split("0: column(heads=3)"), 2), "128 features cannot be 3 equal heads"),
        (lambda: pt.simulate(JOB, s.gpipe(2, inner=s.split("0: row")), 4, meta=True), "PT1314"),
        (lambda: pt.run(JOB, s.hybrid("0"), 2, noise_scale=2), "PT1502"),
        (lambda: pt.run(JOB, s.split(), 2, min_workers=2), "PT1204"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


JOB, ALONE = pt.jobs.find("digits"), world_port(0, [0])
