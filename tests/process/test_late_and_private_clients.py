"""Real clients by `fed_buff` and `private`: the bits of one process, also where the server dies.

Servers and clients are threads of this process.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import polytempo as pt
from laws.test_federated import CLIENTS, SEED, job, simulated, wide
from laws.test_private_rounds import accountant
from polytempo import federated as fed
from polytempo.compression import int8, qsgd
from polytempo.core import Strategy
from polytempo.federated.arrivals import Arrivals, ClientArrival
from polytempo.federated.privacy import Releases
from polytempo.runs.clients.client_messages import ClientHello, FromClient, RoundOrder, ToClient, layout
from polytempo.runs.clients.round_server import RoundServer
from polytempo.runs.clients.tickets import ClientTicket
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.federated import noise_record
from polytempo.training.federated.noise_record import NoiseRecord
from polytempo.training.job.evaluate import tensors_of
from polytempo.wire.channel import ChannelClient
from process.client_runs import LONG_S, Running, arrivals, dies

pytestmark = pytest.mark.process
__all__ = ["accountant", "dies"]

SLOWER = job(model=wide, schedule=lambda optimizer, steps: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))


def of_one_process(
    strategy: Strategy, arrived: list[list[ClientArrival]], monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """The digest of a simulated run with the same arrivals."""
    monkeypatch.setattr(Arrivals, "buffer", lambda own, number: arrived[number])
    found: str | None = simulated(strategy, len(arrived), job=SLOWER)["hash"]
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The movement of the first client to answer comes in round 2."""
    take, hear = RoundServer._take, RoundServer._hear
    waiting, first = list[Any](), list[int]()

    def takes(server: RoundServer, client: int, present: Any, message: Any, opened: Any) -> None:
        if opened.number < 2 and client in (first or [client]):
            first[:], waiting[:] = [client], [(client, present, message)]
        else:
            take(server, client, present, message, opened)

    def hears(server: RoundServer, opened: Any, wait_s: float) -> None:
        if waiting and opened.number >= 2:
            client, present, message = waiting.pop()
            take(server, client, present, message, opened)
        else:
            hear(server, opened, wait_s)

    monkeypatch.setattr(RoundServer, "_take", takes)
    monkeypatch.setattr(RoundServer, "_hear", hears)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    "strategy",
    [
        fed.fed_buff(2, 3, 1, 4, server_lr=0.8, oldest=4),
        fed.fed_coded(fed.fed_buff(2, 2, 2, None, oldest=4), int8(), qsgd(levels=127)),
    ],
    ids=str,
)
def test_a_buffer_of_real_clients_is_that_of_one_process(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Running(tmp_path, strategy, of=SLOWER, steps=5)
    for client in range(CLIENTS):
        run.join(client)
    found, arrived = run.end(), arrivals(run)
    assert all(len({each.client for each in buffer}) == 2 for buffer in arrived)
    assert arrived[2][0].age == 2
    assert found.parameters_sha256 == of_one_process(strategy, arrived, monkeypatch)
    assert run.texts() == []


@pytest.mark.usefixtures("held")
def test_a_movement_that_is_too_old_is_counted_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = fed.fed_buff(2, 3, 1, 4, oldest=1)
    run = Running(tmp_path, strategy, of=SLOWER, steps=4)
    for client in range(CLIENTS):
        run.join(client)
    found, arrived = run.end(), arrivals(run)
    too_old = re.compile(r"round (\d): client-\d sent a movement that is too old \(from round (\d)\)")
    told = [tuple(map(int, match.groups())) for text in run.texts() if (match := too_old.fullmatch(text))]
    assert len(told) == len(run.texts())
    assert (2, 0) in told
    assert all(now - begun > 1 for now, begun in told)
    assert found.parameters_sha256 == of_one_process(strategy, arrived, monkeypatch)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    counted = [row["values"]["clients/too_old"] for row in rows if "clients/too_old" in row.get("values", {})]
    assert counted == [float(sum(now == number for now, _ in told)) for number in range(4)]


@pytest.mark.usefixtures("held")
def test_a_server_of_buffers_goes_on_with_the_clients_in_training(
    dies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies in round 2, with a movement that began in round 0: the client sends it to the next server."""
    strategy = fed.fed_buff(2, 3, 1, 4, oldest=3)
    dies(2)
    first = Running(tmp_path, strategy, of=SLOWER, steps=5, checkpoint_every=1)
    for client in range(CLIENTS):
        first.join(client)
    with pytest.raises(OSError, match="machine is gone"):
        first.result.result(LONG_S)
    dies(-1)
    again = Running(tmp_path, strategy, of=SLOWER, steps=5, resume=True, listen=first.address)
    found, arrived = again.end(), arrivals(again)
    assert len(arrived) == 5
    assert max(each.age for buffer in arrived[2:] for each in buffer) >= 2
    assert found.parameters_sha256 == of_one_process(strategy, arrived, monkeypatch)


def leaves(ticket: Path, server: str) -> None:
    """Be a client that goes away with its first order."""
    own = ClientTicket.read(ticket)
    channel: ChannelClient[ToClient, FromClient] = ChannelClient(
        f"tcp://{server}",
        own.keys,
        ToClient,  # type: ignore[arg-type] # a union of types
    )
    channel.send(ClientHello(7, layout(tensors_of(wide()))))
    while not isinstance(channel.take(LONG_S), RoundOrder):
        pass
    channel.close()


def test_a_vanished_client_holds_no_buffer_up(tmp_path: Path) -> None:
    """All clients are in training at a time, so the vanished one's place is needed."""
    rules = fed.RoundRules(there=3, return_s=0.1, deadline_s=600.0)
    run = Running(tmp_path, fed.fed_buff(2, 1, 1, 4), clients=3, of=SLOWER, steps=5, rules=rules)
    gone = run.begin(leaves, run.ticket(2), run.address)
    for client in range(2):
        run.join(client)
    run.end()
    gone.result(LONG_S)
    assert [text.partition(": ")[2] for text in run.texts()] == ["client-2 has vanished"]


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize(
    "text",
    [
        "private(fed_avg(cohort=3, batch_size=4), clip=0.05, noise=0.7)",
        "private(fed_adam(cohort=2), clip=0.1, noise=1.0)",
        "fed_coded(private(fed_prox(cohort=4, mu=0.5), clip=0.2, noise=0.3), int8, qsgd(levels=127))",
    ],
)
def test_private_rounds_of_real_clients_have_the_bits_of_simulated_ones(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secret of draws and noise is the run's seed here, which it never is elsewhere."""
    monkeypatch.setattr(noise_record, "drawn_secret", lambda: SEED)
    strategy = parse_strategy(text)
    assert strategy.rounds is not None
    privacy = strategy.rounds.privacy
    assert privacy is not None
    run = Running(tmp_path, strategy, of=SLOWER, steps=5)
    for client in range(CLIENTS):
        run.join(client)
    found = run.end()
    assert found.parameters_sha256 == simulated(strategy, 5, job=SLOWER)["hash"]
    assert found.metrics == pytest.approx(
        {"epsilon": 5 + privacy.cohort / 6 / 1000 + privacy.noise / 1e6, "delta": privacy.delta}
    )
    assert run.texts() == []
    assert (tmp_path / "run/noise.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("accountant")
def test_a_private_round_without_answers_moves_by_noise_and_has_the_loss_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws of the secret, which is the run's seed here, have no client in round 1."""
    monkeypatch.setattr(noise_record, "drawn_secret", lambda: SEED)
    strategy = parse_strategy("private(fed_avg(cohort=1), clip=0.05, noise=0.7)")
    run = Running(tmp_path, strategy, of=SLOWER, steps=2)
    for client in range(CLIENTS):
        run.join(client)
    found = run.end()
    assert run.values("clients/answered") == [1.0, 0.0]
    losses = pt.training.history(tmp_path / "run").of("train").column("loss")
    assert losses[1] == losses[0] > 0
    one, both = (simulated(strategy, rounds, job=SLOWER)["hash"] for rounds in (1, 2))
    assert found.parameters_sha256 == both != one
    assert found.metrics["epsilon"] == pytest.approx(2 + 1 / 6 / 1000 + 0.7 / 1e6)


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize(
    "text",
    [
        "dp_sgd(fed_avg(cohort=3, epochs=2, batch_size=4), noise=0.7)",
        "dp_sgd(scaffold(cohort=4, batch_size=4), clip=0.5)",
    ],
)
def test_private_samples_of_real_clients_have_the_bits_and_epsilon_of_simulated_ones(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secret of each client's noise is the run's seed here, which it never is elsewhere."""
    monkeypatch.setattr(noise_record, "drawn_secret", lambda: SEED)
    run = Running(tmp_path, parse_strategy(text), steps=4)
    for client in range(CLIENTS):
        run.join(client)
    found = run.end()
    same = pt.simulate(job(), text, workers=1, clients="by_size(6, sigma=0.7)", seed=SEED, steps=4)
    assert found.parameters_sha256 == same.parameters_sha256
    assert found.metrics == same.metrics
    assert found.metrics["epsilon"] > 1
    assert run.texts() == []


@pytest.mark.usefixtures("accountant")
def test_noise_of_samples_is_new_in_each_turn_and_counted_for_lost_rounds(
    dies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies with its round 3 and makes rounds 2 and 3 again: 7 turns of two passes each, of all clients.

    The first server has a secret, too, in its record.
    """
    drawn = itertools.count()
    monkeypatch.setattr(noise_record, "drawn_secret", drawn.__next__)
    strategy = parse_strategy("dp_sgd(fed_avg(cohort=6, epochs=2, batch_size=4), noise=0.7)")
    dies(3)
    first = Running(tmp_path, strategy, steps=5, checkpoint_every=2)
    joined = [first.join(client) for client in range(CLIENTS)]
    with pytest.raises(OSError, match="machine is gone"):
        first.result.result(LONG_S)
    dies(-1)
    found = Running(tmp_path, strategy, steps=5, resume=True, listen=first.address).end()
    assert found.metrics["epsilon"] == pytest.approx(7 * 2 + 0.7 / 1e6)
    assert sum(each.result(LONG_S).trained for each in joined) == 7 * CLIENTS == next(drawn) - 1


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize("stay", [True, False])
def test_a_private_round_that_a_server_lost(
    stay: bool, dies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies with its round 3, and round 2 is made again: with other answers by other noise.

    Clients have seen both models, so ε counts both.
    """
    monkeypatch.setattr(noise_record, "drawn_secret", lambda: SEED)
    strategy = parse_strategy("private(fed_avg(cohort=5), clip=0.05, noise=0.7)")
    dies(3)
    first = Running(tmp_path, strategy, of=SLOWER, steps=5, checkpoint_every=2)
    joined = [first.join(client) for client in range(CLIENTS)]
    with pytest.raises(OSError, match="machine is gone"):
        first.result.result(LONG_S)
    dies(-1)
    if not stay:
        fed.revoke(first.keys, arrivals(first)[2][0].client)
    rules = fed.RoundRules(there=CLIENTS if stay else CLIENTS - 1)
    found = Running(tmp_path, strategy, of=SLOWER, steps=5, resume=True, listen=first.address, rules=rules).end()
    same = found.parameters_sha256 == simulated(strategy, 5, job=SLOWER)["hash"]
    assert same is stay
    record = NoiseRecord(tmp_path / "run", CLIENTS, resume=True)
    assert record.releases(5) == Releases(CLIENTS, 5, () if stay else ((2, 1),))
    if not stay:  # the client without a ticket waits for a server
        monkeypatch.setattr(ChannelClient, "parted_s", property(lambda own: math.inf))
    assert sum(each.exception(LONG_S) is not None for each in joined) == (not stay)
