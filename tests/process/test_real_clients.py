"""Clients that dial in: the bits of simulated ones, and wrong ones refused by name while the round goes on.

Servers and clients are threads of this process, and processes of their own where nothing else shows it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
import warm
from laws.test_federated import CLIENTS, SEED, data, job, model, normed, simulated, wide
from polytempo import federated as fed
from polytempo.aggregation import median
from polytempo.compression import int8, qsgd, top_k
from polytempo.core import Strategy
from polytempo.core.errors import PolytempoError
from polytempo.runs.clients.client_messages import (
    ClientHello,
    ClientMovement,
    ClientWelcome,
    FromClient,
    RoundOrder,
    RoundsOver,
    ToClient,
    digest,
    layout,
    packed,
    unpacked,
)
from polytempo.runs.clients.round_server import RoundServer
from polytempo.runs.clients.tickets import ClientTicket
from polytempo.training.job.evaluate import tensors_of
from polytempo.wire.channel import ChannelClient, ChannelServer
from process.client_processes import part
from process.test_wire_zeromq import Tap

pytestmark = pytest.mark.process
ANY = "127.0.0.1:0"
TESTS = Path(__file__).parents[1]
LONG_S = 60.0


class Running:
    """A server's run in a thread, and clients in threads."""

    def __init__(
        self, folder: Path, strategy: Strategy, clients: int = CLIENTS, of: pt.Job | None = None, **more: Any
    ) -> None:
        self.job = of or job()
        self.folder, self._pool = folder, ThreadPoolExecutor(clients + 2)
        self.keys = folder / "keys"
        if not self.keys.exists():
            fed.make_tickets(self.keys, clients, ANY, most_samples=100)
        address: Future[str] = Future()
        given: dict[str, Any] = {"seed": SEED, "listen": ANY, "rules": fed.RoundRules(there=clients)} | more
        told: dict[str, Any] = {"on_listening": address.set_result, "out": folder / "run"}
        self.result = self._pool.submit(fed.serve, self.job, strategy, self.keys, **told, **given)
        wait([self.result, address], LONG_S, FIRST_COMPLETED)
        self.address = address.result(0).removeprefix("tcp://")

    def ticket(self, client: int) -> Path:
        return self.keys / f"client-{client}.ticket"

    def join(self, client: int, given: Any = None, of: pt.Job | None = None, **more: Any) -> Future[Any]:
        own = part(client) if given is None else given
        return self._pool.submit(fed.join, of or self.job, self.ticket(client), own, server=self.address, **more)

    def begin(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        return self._pool.submit(work, *given)

    def end(self) -> pt.Result:
        found: pt.Result = self.result.result(LONG_S)
        self._pool.shutdown()
        return found

    def texts(self, name: str = "clients") -> list[str]:
        rows = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
        return [row["text"] for row in rows if row["kind"] == "text" and row["name"] == name]


def large() -> nn.Module:
    """A model with codes of more bytes than itself and the room beside a message's tensors."""
    return nn.Sequential(nn.Linear(4, 90_000), nn.Tanh(), nn.Linear(90_000, 3)).double()


OTHER_MODELS = {"fed_coded(inner=fed_avg(": large, "fed_coded": wide, "fed_bn": normed}
"""Models by the beginning of a strategy's name."""


@pytest.mark.parametrize(
    "strategy",
    [
        fed.fed_avg(3, 2, 4),
        fed.fed_prox(3, 0.5, 2, 4),
        fed.fed_nova(3, 2, 4),
        fed.fed_adam(3, 1, 4),
        fed.fed_robust(fed.fed_avg_m(5, 1, 4), median),
        fed.fed_coded(fed.fed_adam(3, 1, 4), int8(), qsgd(levels=127)),
        fed.fed_coded(fed.q_fed_avg(3, 2.0, 1, 4), top_k(0.1)),
        fed.fed_coded(fed.fed_avg(2, 1, None), top_k(1.0), top_k(1.0)),
        fed.scaffold(3, 2, 4),
        fed.fed_coded(fed.scaffold(3, 2, 4), qsgd(levels=7)),
        fed.fed_rep(3, 1, 4),
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


def alone(client: int, rounds: int, strategy: Strategy | None = None, **more: Any) -> str:
    """The digest of a run with one client's data alone."""
    clients = fed.Clients(data(), [fed.clients(data(), fed.by_size(CLIENTS, sigma=0.7), SEED).parts[client]])
    own = job(data=lambda path: pt.Data(clients), **more)
    trainer = pt.Trainer(own, strategy or fed.fed_avg(1, 1, 4), seed=SEED, steps=rounds)
    digest = trainer.fit().parameters_sha256
    assert digest is not None
    return digest


def changed(tensors: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> bytes:
    return packed(tensors | {"0.weight": change(tensors["0.weight"])})


def header(dtype: str, shape: list[int], num_bytes: int) -> bytes:
    """A file of one tensor with such a header."""
    told = json.dumps({"0.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
    return len(told).to_bytes(8, "little") + told + bytes(num_bytes)


Lie = Callable[[RoundOrder, dict[str, Tensor]], ClientMovement]
LIES: dict[str, tuple[Lie, str]] = {
    "NaN": (lambda r, m: truth(r, changed(m, lambda t: t * torch.nan)), "0.weight has NaN or infinity"),
    "infinity": (lambda r, m: truth(r, changed(m, lambda t: t / 0)), "0.weight has NaN or infinity"),
    "large": (lambda r, m: truth(r, changed(m, lambda t: t + 1e200)), "0.weight has numbers above"),
    "shape": (lambda r, m: truth(r, changed(m, lambda t: t.T)), "of shape (4, 5)"),
    "dtype": (lambda r, m: truth(r, changed(m, lambda t: t.float())), "is torch.float32"),
    "name": (lambda r, m: truth(r, packed(m | {"other": torch.ones(1)})), "tensor 'other'"),
    "none": (lambda r, m: truth(r, packed({})), "it has no tensor"),
    "junk": (lambda r, m: truth(r, b"junk"), "not named tensors"),
    "a dtype of 4 bits": (lambda r, m: truth(r, header("F4", [2], 1)), "not named tensors (KeyError)"),
    "a huge shape": (lambda r, m: truth(r, header("F32", [0, 2**64 - 1], 0)), "not named tensors (TypeError)"),
    "strides": (lambda r, m: truth(r, header("F32", [0, 2**62, 4], 0)), "not named tensors (RuntimeError)"),
    "samples": (lambda r, m: truth(r, packed(m), samples=99), "it says that it has 99 samples"),
    "loss": (lambda r, m: truth(r, packed(m), loss=torch.nan), "its loss is nan"),
    "tested": (lambda r, m: truth(r, packed(m), right=2.0), "2.0 of 0.0 are right"),
}


def truth(order: RoundOrder, movement: bytes, **more: Any) -> ClientMovement:
    given: dict[str, Any] = {"samples": 7, "loss": 1.0} | more
    return ClientMovement(order.round, digest(order.model), movement=movement, **given)


def lie(ticket: Path, server: str, lies: list[Lie], net: Callable[[], nn.Module] = model) -> None:
    """Be a client that answers each round by one of `lies`."""
    own = ClientTicket.read(ticket)
    channel: ChannelClient[ToClient, FromClient] = ChannelClient(
        f"tcp://{server}",
        own.keys,
        ToClient,  # type: ignore[arg-type] # a union of types
    )
    try:
        channel.send(ClientHello(7, layout(tensors_of(net()))))
        assert isinstance(channel.take(LONG_S), ClientWelcome)
        while lies:
            order = channel.take(LONG_S)
            if isinstance(order, RoundsOver):
                return
            if isinstance(order, RoundOrder):
                channel.send(lies.pop(0)(order, unpacked(order.model)))
    finally:
        channel.close(1.0)


def test_wrong_answers_change_no_bit_and_are_refused_by_name(tmp_path: Path) -> None:
    run = Running(tmp_path, fed.fed_avg(2, 1, 4), clients=2, steps=len(LIES))
    run.join(0)
    liar = run.begin(lie, run.ticket(1), run.address, [each for each, _ in LIES.values()])
    assert run.end().parameters_sha256 == alone(0, len(LIES))
    liar.result(LONG_S)
    for number, (text, (_, why)) in enumerate(zip(run.texts(), LIES.values(), strict=True)):
        assert text.startswith(f"round {number}: client-1 is refused: ")
        assert why in text


INT8 = pt.compression.int8()
CODED_LIES: dict[str, tuple[Lie, str]] = {
    "no code": (lambda r, m: truth(r, packed(m), first_loss=1.0), "0.weight is not a code of int8(block=256)"),
    "a short code": (lambda r, m: truth(r, coded(m, 400), first_loss=1.0), "not a code of int8(block=256)"),
    "a negative loss": (lambda r, m: truth(r, coded(m), first_loss=-1.0), "its loss was -1 before"),
    "no loss": (lambda r, m: truth(r, coded(m)), "its loss was 0 before"),
    "a large loss": (lambda r, m: truth(r, coded(m), first_loss=1e300), "its loss was 1e+300 before"),
    "infinity": (lambda r, m: truth(r, coded(m), first_loss=torch.inf), "its loss is 1.0"),
}


def coded(model: dict[str, Tensor], most: int | None = None) -> bytes:
    """A movement with the code of its large tensor, or with the beginning of one."""
    return packed(model | {"0.weight": INT8.encode(torch.ones(300, 4, dtype=torch.float64))[0][:most]})


@pytest.mark.parametrize("q", [0.5, 4.0])
def test_wrong_codes_and_losses_are_refused_by_name(q: float, tmp_path: Path) -> None:
    """A client that says to have a large loss would rule the mean of `q_fed_avg`."""
    inner = [fed.q_fed_avg(cohort, q, 1, 4) for cohort in (1, 2)]
    one, two = (fed.fed_coded(each, INT8) for each in inner)
    lies = {name: each for name, each in CODED_LIES.items() if q > 1 or name != "a large loss"}
    run = Running(tmp_path, two, clients=2, of=job(model=wide), steps=len(lies))
    run.join(0)
    liar = run.begin(lie, run.ticket(1), run.address, [each for each, _ in lies.values()], wide)
    assert run.end().parameters_sha256 == alone(0, len(lies), one, model=wide)
    liar.result(LONG_S)
    for text, (_, why) in zip(run.texts(), lies.values(), strict=True):
        assert why in text


def test_an_old_round_and_a_guest_that_was_not_drawn(tmp_path: Path) -> None:
    """A late answer counts for no other round."""
    late = fed.RoundRules(there=2, deadline_s=8.0)
    run = Running(tmp_path, fed.fed_avg(2, 1, 4), clients=2, steps=2, rules=late)
    first: list[RoundOrder] = []

    def never(order: RoundOrder, model: dict[str, Tensor]) -> ClientMovement:
        first.append(order)
        return truth(first[0] if len(first) > 1 else RoundOrder(7, [], b""), packed(model))

    run.join(0)
    run.begin(lie, run.ticket(1), run.address, [never] * 3)
    assert run.end().parameters_sha256 == alone(0, 2)
    assert [text.partition(": ")[2] for text in run.texts()] == [
        "client-1 sent a movement of an old round (7)",
        "client-1 is late",
        "client-1 sent a movement of an old round (0)",
        "client-1 is late",
    ]


def test_a_client_that_reads_nothing_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, full = ChannelServer.sent, list[bytes]()

    def refuses(server: ChannelServer[Any, Any], peer: bytes, message: Any) -> bool | None:
        """The first client's queue takes no round."""
        if isinstance(message, ClientWelcome) and message.number == 1:
            full.append(peer)
        return False if isinstance(message, RoundOrder) and peer in full else sent(server, peer, message)

    monkeypatch.setattr(ChannelServer, "sent", refuses)
    run = Running(tmp_path, fed.fed_avg(2, 1, 4), clients=2, steps=1, rules=fed.RoundRules(there=2, deadline_s=600.0))
    for client in range(2):
        run.join(client)
    assert run.end().parameters_sha256 == alone(0, 1)
    assert run.texts() == ["round 0: client-1 did not get the round: its queue is full, because it reads no messages"]


def floods(ticket: Path, tap: Tap) -> None:
    """Be a client that answers its round by a message that is too large, and by one without an end."""
    enough, passed = 24 << 20, [0]
    ended = Event()

    def stops(data: bytes) -> bytes:
        """The line stands still in the middle of the second message."""
        passed[0] += len(data)
        if passed[0] > enough:
            ended.wait(LONG_S)
        return data

    channel: ChannelClient[ToClient, FromClient] = ChannelClient(
        tap.address,
        ClientTicket.read(ticket).keys,
        ToClient,  # type: ignore[arg-type] # a union of types
    )
    try:
        channel.send(ClientHello(7, layout(tensors_of(model()))))
        assert isinstance(channel.take(LONG_S), ClientWelcome)
        while not isinstance(order := channel.take(LONG_S), RoundOrder):
            assert order is not None
        tap.alter = stops
        channel.send(truth(order, bytes(3 << 20)))
        channel.send(truth(order, bytes(64 << 20)))
        until_s = time.monotonic() + LONG_S
        while not channel.parted_s:
            assert time.monotonic() < until_s, "the server holds the message"
    finally:
        channel.close()
        ended.set()


def test_strangers_and_floods_of_a_ticket_holder_stop_no_round(tmp_path: Path) -> None:
    """The server hangs up on the flood before its message has ended, and so holds a part of it only."""
    rules = fed.RoundRules(there=2, return_s=0.1, deadline_s=600.0)
    run = Running(tmp_path, fed.fed_avg(2, 1, 4), clients=2, steps=3, rules=rules)
    port = int(run.address.rpartition(":")[2])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    with suppress(ConnectionError):  # the oldest are closed
        for each in strangers:
            each.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + bytes(1000))
    run.join(0)
    with closing(Tap(port)) as tap:
        run.begin(floods, run.ticket(1), tap).result(LONG_S)
    assert run.end().parameters_sha256 == alone(0, 3)
    assert run.texts() == ["round 0: client-1 has vanished"]
    for each in strangers:
        each.close()


def test_a_ticket_bounds_the_samples_and_can_be_revoked(tmp_path: Path) -> None:
    rules = fed.RoundRules(there=2, fewest=2, return_s=0.1)
    run = Running(tmp_path, fed.fed_avg(2, 1, 4), clients=3, steps=3, rules=rules)
    large = run.join(2, data() + data())
    with pytest.raises(PolytempoError, match="120 samples, and its ticket is for 1 to 100"):
        large.result(LONG_S)
    run.join(0)

    def leave(number: int) -> None:
        fed.revoke(run.keys, 1)

    revoked = run.join(1, on_round=leave)
    again = revoked.exception(LONG_S)
    assert isinstance(again, PolytempoError)
    assert "revoked" in str(again)
    stranger = run.join(1, patience_s=0.5)
    with pytest.raises(PolytempoError, match="does not know this ticket"):
        stranger.result(LONG_S)
    run.join(2)
    run.end()
    assert any("client-1 is refused: its ticket is revoked" in text for text in run.texts())


def test_a_client_that_said_a_wrong_size_comes_again_in_the_same_round(tmp_path: Path) -> None:
    run = Running(tmp_path, fed.fed_avg(2, 1, 4), clients=2, steps=1, rules=fed.RoundRules(there=2, fewest=2))
    with pytest.raises(PolytempoError, match="its ticket is for"):
        run.join(1, data() + data()).result(LONG_S)
    for client in range(2):
        run.join(client)
    assert run.end().steps == 1


def test_options_that_deal_data_are_refused(tmp_path: Path) -> None:
    fed.make_tickets(tmp_path / "keys", 1, ANY)
    with pytest.raises(ValueError, match=r"sampling='weighted\(\)': clients on machines of their own"):
        fed.serve(job(), fed.fed_avg(1), tmp_path / "keys", listen=ANY, sampling="weighted()")


@pytest.mark.parametrize("strategy", [fed.fed_avg_m(3, 1, 4), fed.scaffold(3, 1, 4)], ids=str)
def test_a_server_that_died_goes_on_and_its_clients_come_back(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies in round 2, with its answers; the next server begins that round again from the checkpoint.

    Clients begin it with the control variates that they had before it.
    """
    note = RoundServer._note

    def dies(server: RoundServer, opened: Any) -> None:
        if opened.number == 2:
            raise OSError("the server's machine is gone")
        note(server, opened)

    monkeypatch.setattr(RoundServer, "_note", dies)
    first = Running(tmp_path, strategy, steps=4, checkpoint_every=1)
    clients = [first.join(client) for client in range(CLIENTS)]
    with pytest.raises(OSError, match="machine is gone"):
        first.result.result(LONG_S)
    monkeypatch.setattr(RoundServer, "_note", note)
    again = Running(tmp_path, strategy, steps=4, resume=True, listen=first.address)
    assert again.end().parameters_sha256 == simulated(strategy, 4)["hash"]
    assert {each.result(LONG_S).rounds for each in clients} == {4}


@pytest.mark.parametrize(
    "strategy",
    [
        fed.fed_buff(2, 2),
        fed.private(fed.fed_avg(3), noise=0.0),
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
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["client-0.ticket", "roster.json"]
