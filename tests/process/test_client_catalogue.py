"""Rows of real clients: each federated strategy, with codes up and down, and with a merge.

A row has the bits of one process and the bytes that `explain` says, or is refused by a code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from laws.test_federated import CLIENTS, SEED, job, simulated
from polytempo import federated as fed
from polytempo.aggregation import trimmed_mean
from polytempo.compression import int8, qsgd, top_k
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.federated import strategies
from polytempo.federated.arrivals import Arrivals
from polytempo.spec.explanation import explain
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.federated import noise_record
from process.client_runs import Running, arrivals

pytestmark = pytest.mark.process

ARGUMENTS = {"fed_buff": "cohort=3, concurrency=2", "scaffold": "cohort=3, server_lr=0.5"}
AROUND = {"fed_coded", "fed_robust", "secure"}
"""Strategies around a strategy: columns of the table. Real clients have no `secure`."""
ROWS = [f"{name}({ARGUMENTS.get(name, 'cohort=3')})" for name in strategies.__all__ if name not in AROUND]
ROWS.append("private(fed_avg_m(cohort=3), clip=0.05, noise=0.0)")
CODES = {"plain": (None, None), "up": (qsgd(levels=127), None), "both": (top_k(0.1), int8())}
WEIGHED = ("fed_nova", "q_fed_avg", "scaffold", "fed_buff", "private")
"""Strategies that no merge counts alike."""


def wide() -> nn.Module:
    """A model with tensors that codes are for, and smaller ones."""
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def normed() -> nn.Module:
    """The same with tensors that `fed_bn` keeps, some of them of whole numbers."""
    return nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 3)).double()


def made(row: str, codes: str, merge: bool) -> Strategy:
    strategy = parse_strategy(row)
    if merge:
        strategy = fed.fed_robust(strategy, trimmed_mean(1))
    up, down = CODES[codes]
    return strategy if codes == "plain" else fed.fed_coded(strategy, up, down)


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith(WEIGHED)])
def test_a_merge_of_weighed_clients_is_refused(row: str) -> None:
    with pytest.raises(Incompatible, match="PT2511"):
        made(row, "plain", True)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(
    ("row", "merge"),
    [(row, merge) for row in ROWS for merge in (False, True) if not (merge and row.startswith(WEIGHED))],
)
def test_a_row_has_the_bits_of_one_process_and_the_bytes_of_explain(
    row: str, merge: bool, codes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_record, "drawn_secret", lambda: SEED)
    strategy, model = made(row, codes, merge), normed if row.startswith("fed_bn") else wide
    of = job(model=model)
    run = Running(tmp_path, strategy, of=of, steps=2, rules=fed.RoundRules(there=CLIENTS, fewest=3))
    for client in range(CLIENTS):
        run.join(client)
    found, arrived = run.end().parameters_sha256, arrivals(run)
    assert run.texts() == []
    if "fed_buff" in row:
        monkeypatch.setattr(Arrivals, "buffer", lambda own, number: arrived[number])
    assert found == simulated(strategy, 2, job=of)["hash"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    sent, received = (
        [row["values"][f"clients/{way}_bytes"] for row in rows if f"clients/{way}_bytes" in row.get("values", {})]
        for way in ("sent", "received")
    )
    said = explain(strategy, 1, model()).round
    assert said is not None
    assert said.exact
    assert received == [said.up_bytes * len(each) for each in arrived]
    if "fed_buff" not in row:  # a client in training at the end has had its model, too
        assert sent == [said.down_bytes * len(each) for each in arrived]
