"""Rows of real clients: each federated strategy, with codes up and down, with a merge, and with secure sums.

A row has the bits of one process and the bytes that `explain` says, or is refused by a code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from laws.test_federated import CLIENTS, SEED, job, simulated
from laws.test_federated_pairs import OPTIMIZERS
from laws.test_secure_sum import TOY
from polytempo import federated as fed
from polytempo.aggregation import trimmed_mean
from polytempo.compression import int8, qsgd, top_k
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.federated import strategies
from polytempo.federated.arrivals import Arrivals
from polytempo.runs.clients import join, serve
from polytempo.spec.explanation import explain
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.federated import noise_record
from process.client_runs import ANY, Running, arrivals

pytestmark = pytest.mark.process

ARGUMENTS = {"fed_buff": "cohort=3, concurrency=2", "scaffold": "cohort=3, server_lr=0.5"}
AROUND = {"fed_coded", "fed_robust", "secure"}
"""Strategies around a strategy: columns of the table."""
ROWS = [f"{name}({ARGUMENTS.get(name, 'cohort=3')})" for name in strategies.__all__ if name not in AROUND]
ROWS.append("dp_sgd(fed_avg(cohort=3), clip=0.5, noise=0.0)")
ROWS.append("private(fed_avg_m(cohort=3), clip=0.05, noise=0.0)")
CODES = {"plain": (None, None), "up": (qsgd(levels=127), None), "both": (top_k(0.1), int8())}
WEIGHED = ("fed_nova", "q_fed_avg", "scaffold", "fed_buff", "private")
"""Strategies that no merge counts alike."""
UNSUMMED = ("q_fed_avg", "scaffold", "fed_buff", "private")
"""Strategies without secure sums of real clients."""
TABLE = [("", codes, row) for row in ROWS for codes in CODES]
TABLE += [("fed_robust", codes, row) for row in ROWS for codes in CODES if not row.startswith(WEIGHED)]
TABLE += [("secure", "plain", row) for row in ROWS if not row.startswith(UNSUMMED)]
TABLE.append(("secure", "plain", "fed_coded(fed_avg(cohort=3), None, int8())"))
ALL = [(*row, "sgd") for row in TABLE]
ALL += [
    ("", "up", "fed_yogi(cohort=3)", "momentum"),
    ("fed_robust", "both", "fed_rep(cohort=3)", "adam"),
    ("", "plain", "fed_buff(cohort=3, concurrency=2)", "one_cycle_betas"),
    ("secure", "plain", "fed_prox(cohort=3)", "one_cycle_momentum"),
    ("", "both", "fed_bn(cohort=3)", "scheduled_adagrad"),
]
"""Rows with local optimizers of `laws.test_federated_pairs`."""


def wide() -> nn.Module:
    """A model with tensors that codes are for, and smaller ones."""
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def normed() -> nn.Module:
    """The same with tensors that `fed_bn` keeps, some of them of whole numbers."""
    return nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 3)).double()


def made(around: str, codes: str, row: str) -> Strategy:
    strategy = parse_strategy(row)
    if around == "fed_robust":
        strategy = fed.fed_robust(strategy, trimmed_mean(1))
    up, down = CODES[codes]
    strategy = strategy if codes == "plain" else fed.fed_coded(strategy, up, down)
    return fed.secure(strategy) if around == "secure" else strategy


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith(WEIGHED)])
def test_a_merge_of_weighed_clients_is_refused(row: str) -> None:
    with pytest.raises(Incompatible, match="PT2511"):
        made("fed_robust", "plain", row)


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith(UNSUMMED)])
def test_secure_sums_of_these_are_refused(row: str, tmp_path: Path) -> None:
    fed.make_tickets(tmp_path / "keys", 1, ANY)
    with pytest.raises(Incompatible, match=r"PT2516|PT2520"):
        fed.serve(job(), made("secure", "plain", row), tmp_path / "keys", listen=ANY)


@pytest.mark.parametrize(("around", "codes", "row", "optimizer"), ALL)
def test_a_row_has_the_bits_of_one_process_and_the_bytes_of_explain(
    around: str, codes: str, row: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_record, "drawn_secret", lambda: SEED)
    for module in (join, serve):
        monkeypatch.setattr(module, "primitives", lambda: TOY)
    strategy, model = made(around, codes, row), normed if row.startswith("fed_bn") else wide
    of = job(model=model, **OPTIMIZERS[optimizer])
    run = Running(tmp_path, strategy, of=of, steps=2, rules=fed.RoundRules(there=CLIENTS, fewest=3))
    for client in range(CLIENTS):
        run.join(client)
    found, arrived = run.end().parameters_sha256, arrivals(run)
    assert run.texts() == []
    if "fed_buff" in row:
        monkeypatch.setattr(Arrivals, "buffer", lambda own, number: arrived[number])
    assert found == simulated(strategy, 2, job=of)["hash"]
    sent, received = (run.values(f"clients/{way}_bytes") for way in ("sent", "received"))
    said = explain(strategy, 1, model()).round
    assert said is not None
    assert said.exact
    assert received == [said.up_bytes * len(each) for each in arrived]
    if "fed_buff" not in row:  # a client in training at the end has had its model, too
        assert sent == [said.down_bytes * len(each) for each in arrived]
