"""Clients that dial in: the bits of simulated ones.

Servers and clients are threads of this process, and processes of their own where nothing else shows it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import polytempo as pt
import warm
from laws.test_federated import CLIENTS, SEED, data, job, model, normed, simulated, wide
from polytempo import federated as fed
from polytempo.aggregation import median
from polytempo.compression import qsgd, top_k
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.spec.result import parameters_sha256
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart
from polytempo.training.federated.client_states import ClientStates
from process.client_runs import ANY, LONG_S, Running, arrivals, dies

pytestmark = pytest.mark.process
__all__ = ["dies"]
TESTS = Path(__file__).parents[1]


def large() -> nn.Module:
    """A model with codes of more bytes than itself and the room beside a message's tensors."""
    return nn.Sequential(nn.Linear(4, 90_000), nn.Tanh(), nn.Linear(90_000, 3)).double()


OTHER_MODELS = {"fed_coded(inner=fed_avg(": large, "fed_coded": wide, "fed_bn": normed}
"""Models by the beginning of a strategy's name."""


@pytest.mark.parametrize(
    "strategy",
    [
        fed.fed_avg(3, 2, 4),
        fed.fed_robust(fed.fed_avg_m(5, 1, 4), median),
        fed.fed_coded(fed.q_fed_avg(3, 2.0, 1, 4), top_k(0.1)),
        fed.fed_coded(fed.fed_avg(2, 1, None), top_k(1.0), top_k(1.0)),
        fed.fed_coded(fed.scaffold(3, 2, 4), qsgd(levels=7)),
        fed.fed_bn(3, 1, None),
    ],
    ids=str,
)
def test_real_clients_end_with_the_bits_of_simulated_ones(strategy: Strategy, tmp_path: Path) -> None:
    made = next((make for name, make in OTHER_MODELS.items() if str(strategy).startswith(name)), model)
    of = job(model=made)
    run = Running(tmp_path, strategy, of=of, steps=3)
    joined = [run.join(client, state=tmp_path / "state") for client in range(CLIENTS)]
    assert run.end().parameters_sha256 == simulated(strategy, 3, job=of)["hash"]
    found = [each.result(LONG_S) for each in joined]
    assert [each.number for each in found] == list(range(CLIENTS))
    assert {each.rounds for each in found} == {3}
    assert sum(each.trained for each in found) == 3 * (strategy.slices or 0)
    assert run.texts() == []


def test_clients_in_processes(tmp_path: Path) -> None:
    """A client is killed in its first round: the run goes on, as where it leaves with an error."""
    strategy, rules = fed.fed_avg(6, 1, 4), fed.RoundRules(there=CLIENTS, return_s=0.1)
    run = Running(tmp_path / "processes", strategy, steps=3, rules=rules)
    clients = run.begin(warm.run, ["-m", "process.client_processes", run.address, str(run.keys), "2"], TESTS)
    result = run.end()
    assert clients.result(LONG_S).returncode == 1, clients.result().stderr
    assert run.texts() == ["round 0: client-2 has vanished"]
    assert "client-2" not in " ".join(run.texts("clients/round"))

    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("no loss")

    again = Running(tmp_path / "threads", strategy, steps=3, rules=rules)
    for client in range(CLIENTS):
        again.join(client, of=job(loss=fails) if client == 2 else None)
    assert again.end().parameters_sha256 == result.parameters_sha256
    assert again.texts() == ["round 0: client-2 is refused: it has an error, JobFailed"]


def test_options_that_deal_data_are_refused(tmp_path: Path) -> None:
    fed.make_tickets(tmp_path / "keys", 1, ANY)
    with pytest.raises(ValueError, match=r"sampling='weighted\(\)': clients on machines of their own"):
        fed.serve(job(), fed.fed_avg(1), tmp_path / "keys", listen=ANY, sampling="weighted()")


@pytest.mark.parametrize("strategy", [fed.fed_avg_m(3, 1, 4), fed.scaffold(3, 1, 4)], ids=str)
def test_a_server_that_died_goes_on_and_its_clients_come_back(strategy: Strategy, dies: Any, tmp_path: Path) -> None:
    """The server dies in round 2, with its answers; the next server begins that round again from the checkpoint.

    Clients begin it with the control variates that they had before it.
    """
    dies(2)
    first = Running(tmp_path, strategy, steps=4, checkpoint_every=1)
    clients = [first.join(client) for client in range(CLIENTS)]
    with pytest.raises(OSError, match="machine is gone"):
        first.result.result(LONG_S)
    dies(-1)
    again = Running(tmp_path, strategy, steps=4, resume=True, listen=first.address)
    assert again.end().parameters_sha256 == simulated(strategy, 4)["hash"]
    assert {each.result(LONG_S).rounds for each in clients} == {4}
    drawn = [{each.client for each in buffer} for buffer in arrivals(again)]
    so_far = [len(set().union(*drawn[: number + 1])) for number in range(4)]
    assert again.values("clients/took_part") == so_far
    assert so_far[0] < so_far[-1]


def test_a_server_of_another_run_gets_no_movement_of_the_run_before(dies: Any, tmp_path: Path) -> None:
    """Round 0 of both has one model, and the second run another learning rate."""
    dies(0)
    strategy = fed.fed_avg(CLIENTS, 1, 4)
    first = Running(tmp_path / "first", strategy, steps=1)
    clients = [first.join(client) for client in range(CLIENTS)]
    with pytest.raises(OSError, match="machine is gone"):
        first.result.result(LONG_S)
    dies(-1)
    shutil.copytree(first.keys, tmp_path / "second/keys")
    second = Running(tmp_path / "second", strategy, steps=1, listen=first.address, lr=0.01)
    assert second.end().parameters_sha256 == simulated(strategy, 1, lr=0.01)["hash"]
    assert {each.result(LONG_S).trained for each in clients} == {2}


@pytest.mark.parametrize(
    "strategy",
    [
        fed.fed_buff(2, 2, lost=0.5),
        fed.secure(fed.fed_buff(3, 2)),
        fed.secure(fed.private(fed.fed_avg(3), noise=0.0)),
        pt.strategies.sync_sgd(),
    ],
    ids=str,
)
def test_rounds_that_need_more_than_movements_are_refused(strategy: Strategy, tmp_path: Path) -> None:
    fed.make_tickets(tmp_path / "keys", 1, ANY)
    with pytest.raises(ValueError, match="PT2516"):
        fed.serve(job(), strategy, tmp_path / "keys", listen=ANY)


def test_keys_are_their_owners_alone(tmp_path: Path) -> None:
    [path] = fed.make_tickets(tmp_path / "keys", 1, ANY)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="PT2517"):
        fed.join(job(), path, data())
    with pytest.raises(ValueError, match="PT2517"):
        fed.serve(job(), fed.fed_avg(1), tmp_path)
    with pytest.raises(ValueError, match="PT2518"):
        fed.serve(job(), fed.fed_avg(1), tmp_path / "keys", listen=ANY, rules=fed.RoundRules(wait_s=0.1))
    fed.revoke(tmp_path / "keys", 0)
    with pytest.raises(ValueError, match="PT2518: 0 clients have a ticket"):
        fed.serve(job(), fed.fed_avg(1), tmp_path / "keys", listen=ANY)
    with pytest.raises(FileExistsError, match="has tickets already"):
        fed.make_tickets(tmp_path / "keys", 3, ANY)
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["client-0.ticket", "roster.json"]


@pytest.mark.parametrize(
    "strategy", [fed.fed_avg(2, 1, 4), fed.scaffold(2, 1, 4), fed.private(fed.fed_avg(2), noise=0.0)], ids=str
)
def test_a_run_goes_on_with_its_own_tickets(strategy: Strategy, tmp_path: Path) -> None:
    """States and draws are of clients by number."""
    run = Running(tmp_path, strategy, clients=2, steps=1)
    for client in range(2):
        run.join(client)
    result = run.end()
    assert parameters_sha256(result.model().parameters()) == result.parameters_sha256
    shutil.rmtree(run.keys)
    fed.make_tickets(run.keys, 3, ANY, most_samples=100)
    with pytest.raises(Incompatible, match=r"PT2534.*2 .*3"):
        fed.serve(job(), strategy, run.keys, listen=ANY, seed=SEED, steps=2, out=tmp_path / "run", resume=True)


def test_a_checkpoint_without_a_record_of_clients_begins_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs by `fed_avg` had none at first."""
    strategy = fed.fed_avg(3, 1, 4)
    with monkeypatch.context() as before:
        before.setattr(ClientStates, "saved", lambda own, whole: CheckpointPart({}, {}))
        first = Running(tmp_path, strategy, steps=2)
        for client in range(CLIENTS):
            first.join(client)
        first.end()
    again = Running(tmp_path, strategy, steps=3, resume=True)
    for client in range(CLIENTS):
        again.join(client)
    assert again.end().parameters_sha256 == simulated(strategy, 3)["hash"]
    assert again.values("clients/took_part")[-1] == 3
