"""Secure sums of real clients: the bits of one process, lost clients, and wrong ones, which are named.

Servers and clients are threads of this process. The cryptography is a stand-in that needs no library.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import polytempo as pt
from laws.test_federated import CLIENTS, SEED, data, first, job, model, simulated
from laws.test_secure_sum import TOY
from polytempo import federated as fed
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.core.errors import PolytempoError
from polytempo.runs.clients import join as join_module
from polytempo.runs.clients import serve as serve_module
from polytempo.runs.clients.client_messages import (
    ClientHello,
    ClientMovement,
    ClientWelcome,
    FromClient,
    RoundOrder,
    RoundsOver,
    SumAsk,
    SumTell,
    ToClient,
    digest,
    layout,
    ordered,
)
from polytempo.runs.clients.opened_sums import OpenedSums
from polytempo.runs.clients.sum_part import SumPart
from polytempo.runs.clients.tickets import ClientTicket
from polytempo.training.job.evaluate import tensors_of
from polytempo.training.observe.whole_checkpoint import run_model
from polytempo.wire.channel import ChannelClient
from process.client_runs import LONG_S, Running, dies

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.process
__all__ = ["dies"]


@pytest.fixture(autouse=True)
def cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (join_module, serve_module):
        monkeypatch.setattr(module, "primitives", lambda: TOY)


@pytest.mark.parametrize(
    "strategy",
    [fed.secure(fed.fed_avg(3, 2, 4)), fed.secure(fed.fed_adam(5, 1, 4), 64, 40), fed.secure(fed.fed_nova(6))],
    ids=str,
)
def test_real_clients_end_with_the_bits_of_simulated_ones(strategy: Strategy, tmp_path: Path) -> None:
    run = Running(tmp_path, strategy, steps=3)
    joined = [run.join(client) for client in range(CLIENTS)]
    assert run.end().parameters_sha256 == simulated(strategy, 3)["hash"]
    assert sum(each.result(LONG_S).trained for each in joined) == 3 * (strategy.slices or 0)
    assert run.texts() == []


Change = Callable[[FromClient], list[FromClient] | None]
"""The messages in the place of one; None: the client vanishes."""


def wrong(ticket: Path, server: str, changes: list[Change], models: list[bytes] | None = None) -> None:
    """Be a client that moves by nothing, with changed messages in each round. `models` gets each order's model."""
    own = ClientTicket.read(ticket)
    channel: ChannelClient[ToClient, FromClient] = ChannelClient(
        f"tcp://{server}",
        own.keys,
        ToClient,  # type: ignore[arg-type] # a union of types
    )
    rounds, part, welcome = fed.secure(fed.fed_avg(CLIENTS)).rounds, None, None
    assert rounds is not None
    try:
        channel.send(ClientHello(SAMPLES, layout(tensors_of(model()))))
        while not isinstance(message := channel.take(LONG_S), RoundsOver):
            assert message is not None
            told: FromClient
            welcome = message if isinstance(message, ClientWelcome) else welcome
            if isinstance(message, RoundOrder):
                if models is not None:
                    models.append(message.model)
                moved = [torch.zeros_like(each) for each in model().parameters()]
                assert welcome is not None
                told_to = ordered(welcome, digest(message.model), message.rates)
                part = SumPart(own.number, SAMPLES, message.draw, str(message.round), moved, rounds, TOY, told_to)
                told = ClientMovement(message.round, digest(message.model), SAMPLES, 1.0, part.keys, draw=message.draw)
            elif isinstance(message, SumAsk) and part is not None:
                told = part.tells(message, OpenedSums())
            else:
                continue
            sent = changes[message.round](told)
            if sent is None:
                return
            for each in sent:
                channel.send(each)
    finally:
        channel.close(1.0)


def keys(change: Callable[[ClientMovement], list[FromClient] | None]) -> Change:
    return lambda message: change(message) if isinstance(message, ClientMovement) else [message]


def phase(number: int, change: Callable[[SumTell], list[FromClient] | None]) -> Change:
    return lambda message: change(message) if isinstance(message, SumTell) and message.phase == number else [message]


def zeros(told: SumTell) -> list[FromClient]:
    return [replace(told, content={other: bytes(len(each)) for other, each in told.content.items()})]


SAMPLES, OTHER = 7, SumPart(0, 1, 0, "", [], fed.secure().rounds, TOY).keys  # type: ignore[arg-type]
WRONG: dict[str, tuple[Change, list[str]]] = {
    "short keys": (keys(lambda m: [replace(m, movement=m.movement[1:])]), ["is refused: its message has no keys"]),
    "a movement": (keys(lambda m: [replace(m, movement=bytes(4 * 43))]), ["is refused: its message has no keys"]),
    "other keys": (keys(lambda m: [m, replace(m, movement=OTHER)]), ["is refused: it has sent other keys before"]),
    "a loss": (keys(lambda m: [replace(m, loss=float("nan"))]), ["is refused: its loss is nan"]),
    "an old sum": (
        phase(1, lambda told: [replace(told, draw=told.draw ^ 1), replace(told, why="no time")]),
        ["sent a part of another sum", "is refused: it leaves the sum: no time"],
    ),
    "an old round": (
        phase(1, lambda told: [replace(told, round=told.round + 1), replace(told, why="no time")]),
        ["sent a part of another sum", "is refused: it leaves the sum: no time"],
    ),
    "short shares": (phase(1, lambda told: [replace(told, content={})]), ["another size than the sum's"]),
    "wrong shares": (
        phase(1, zeros),
        [*5 * [" leaves the sum: the shares of clients [5] were changed"], "cannot read its shares"],
    ),
    "short words": (phase(2, lambda told: [replace(told, content={5: bytes(8)})]), ["another size than the sum's"]),
    "an error": (phase(2, lambda told: [replace(told, why="no time")]), ["is refused: it leaves the sum: no time"]),
}


def others(rounds: int) -> list[Tensor]:
    """The parameters of a run without the last client."""
    parts = fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED).parts[:-1]
    own = job(data=lambda path: pt.Data(fed.Clients(data(), parts)))
    trainer = pt.Trainer(own, fed.secure(fed.fed_avg(CLIENTS - 1, 1, 4)), seed=SEED, steps=rounds)
    trainer.fit()
    return [each.detach() for _, each in sorted(trainer.model.named_parameters())]


def ended(run: Running) -> list[Tensor]:
    run.end()
    return [each for _, each in sorted(run_model(run.folder / "run").tensors.items())]


def test_wrong_messages_change_nothing_and_are_refused_by_name(tmp_path: Path) -> None:
    strategy = fed.secure(fed.fed_avg(CLIENTS, 1, 4))
    run = Running(tmp_path, strategy, steps=len(WRONG), checkpoint_every=len(WRONG))
    joined = [run.join(client) for client in range(CLIENTS - 1)]
    run.begin(wrong, run.ticket(CLIENTS - 1), run.address, [change for change, _ in WRONG.values()])
    for one, other in zip(ended(run), others(len(WRONG)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=len(WRONG) * CLIENTS / 2**24)
    texts = run.texts()
    for number, (_, expected) in enumerate(WRONG.values()):
        found = [text for text in texts if text.startswith(f"round {number}: ")]
        assert len(found) == len(expected)
        assert all(why in text for text, why in zip(found, expected, strict=True))
    assert {each.result(LONG_S).trained for each in joined} == {len(WRONG)}


@pytest.mark.parametrize("lost_in", range(4))
def test_a_client_that_vanishes_in_a_phase_does_not_change_the_sum_of_the_rest(lost_in: int, tmp_path: Path) -> None:
    """A client lost in the last phase has its movement of nothing in the sum, with the weight of its samples."""
    rules = fed.RoundRules(there=CLIENTS, return_s=0.1, deadline_s=600.0)
    run = Running(tmp_path, fed.secure(fed.fed_avg(CLIENTS, 1, 4)), steps=1, rules=rules, checkpoint_every=1)
    for client in range(CLIENTS - 1):
        run.join(client)
    leaves = phase(lost_in, lambda told: None) if lost_in else keys(lambda movement: None)
    run.begin(wrong, run.ticket(CLIENTS - 1), run.address, [leaves])
    own = sum(map(len, fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED).parts[:-1]))
    weight = own / (own + SAMPLES) if lost_in == 3 else 1.0
    begun = [each for _, each in sorted(first().named_parameters())]
    for one, other, before in zip(ended(run), others(1), begun, strict=True):
        torch.testing.assert_close(one, before + weight * (other - before), rtol=0, atol=CLIENTS / 2**24)
    assert run.texts() == ["round 0: client-5 has vanished"]


@pytest.mark.parametrize("lost_in", range(4))
def test_a_round_without_a_sum_leaves_the_model_and_the_next_one_goes_on(lost_in: int, tmp_path: Path) -> None:
    """Four of six clients leave a phase of round 1, and the two others cannot make a sum. The server has momentum."""
    rules, models = fed.RoundRules(there=CLIENTS, draws=2), list[bytes]()
    run = Running(tmp_path, fed.secure(fed.fed_adam(CLIENTS, 1, 4)), steps=4, rules=rules)
    for client in range(2):
        run.join(client)
    leaves = phase(lost_in, lambda told: [replace(told, why="no time")])
    changes = [keys(lambda m: [m]) for _ in range(4)]
    changes[1] = leaves if lost_in else keys(lambda m: [replace(m, movement=b"")])
    for client in range(2, CLIENTS):
        run.begin(wrong, run.ticket(client), run.address, changes, models if client == 2 else None)
    run.end()
    losses = pt.training.history(run.folder / "run").of("train").column("loss")
    marks = [digest(each) for each in models]
    assert len(marks) == 4
    assert marks[1] == marks[2]
    assert len(set(marks)) == 3
    texts = run.texts()
    assert all(text.startswith("round 1: client-") for text in texts[:-1])
    assert len(texts) == CLIENTS - 2 + 1
    assert texts[-1].startswith("round 1 is given up: 2 clients ")
    assert run.texts("clients/round")[1] == "round 1 of 6 clients: given up"
    assert run.values("clients/answered") == [6.0, 0.0, 6.0, 6.0]
    assert len(losses) == 4
    assert losses[1] == losses[0]


@pytest.mark.parametrize("stay", [True, False])
def test_a_server_that_died_goes_on_with_the_same_clients_in_its_sum(
    stay: bool, dies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of round 2 was opened. One without a client would tell its movement, so others give no shares for it."""
    dies(2)
    strategy = fed.secure(fed.fed_avg(CLIENTS, 1, 4))
    begun = Running(tmp_path, strategy, steps=4, checkpoint_every=1)
    clients = [begun.join(client) for client in range(CLIENTS)]
    with pytest.raises(OSError, match="machine is gone"):
        begun.result.result(LONG_S)
    dies(-1)
    if not stay:
        fed.revoke(begun.keys, 1)
    rules = fed.RoundRules(there=CLIENTS if stay else CLIENTS - 1, draws=1)
    again = Running(tmp_path, strategy, steps=4, resume=True, listen=begun.address, rules=rules)
    if stay:
        assert again.end().parameters_sha256 == simulated(strategy, 4)["hash"]
        assert {each.result(LONG_S).rounds for each in clients} == {4}
        return
    with pytest.raises(Incompatible, match=r"PT2518.* 0 clients stayed in the last of 1 secure sums of round 2"):
        again.result.result(LONG_S)
    assert sum("shares for other clients of this round" in text for text in again.texts()) == CLIENTS - 1
    monkeypatch.setattr(ChannelClient, "parted_s", property(lambda own: math.inf))
    assert all(isinstance(each.exception(LONG_S), PolytempoError) for each in clients)


def test_a_client_that_is_killed_opens_no_other_sum_of_its_round(
    dies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 0 is a process with a folder of states, and is killed with its shares of round 2. Then the server dies.

    It goes on without client 1. The sum of round 2 with client 1 was opened, so no client helps to open another one,
    and client 0, which was started again, neither.
    """
    dies(2)
    strategy, rules = fed.secure(fed.fed_avg(CLIENTS, 1, 4)), fed.RoundRules(there=CLIENTS, return_s=0.1)
    begun = Running(tmp_path, strategy, steps=4, checkpoint_every=1, rules=rules)
    joined = [begun.join(number) for number in range(1, CLIENTS)]
    with closing_client(begun, tmp_path, 2) as first:
        with pytest.raises(OSError, match="machine is gone"):
            begun.result.result(2 * LONG_S)
        assert first.wait(LONG_S) == -signal.SIGKILL
    dies(-1)
    fed.revoke(begun.keys, 1)
    rules = fed.RoundRules(there=CLIENTS - 1, draws=1)
    again = Running(tmp_path, strategy, steps=4, resume=True, listen=begun.address, rules=rules)
    with (
        closing_client(begun, tmp_path, -1),
        pytest.raises(Incompatible, match=r"PT2518.* 0 clients stayed in the last of 1 secure sums of round 2"),
    ):
        again.result.result(2 * LONG_S)
    told = sorted(text for text in again.texts() if "shares for other clients of this round" in text)
    assert len(told) == CLIENTS - 1
    assert told[0].startswith("round 2: client-0 ")
    monkeypatch.setattr(ChannelClient, "parted_s", property(lambda own: math.inf))
    assert all(isinstance(each.exception(LONG_S), PolytempoError) for each in joined)


@contextmanager
def closing_client(run: Running, folder: Path, killed_in: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is client 0 of a server. It ends with the block."""
    given = run.address, str(run.ticket(0)), str(folder / "state"), str(killed_in)
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "process.sum_client", *given], cwd=TESTS, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
