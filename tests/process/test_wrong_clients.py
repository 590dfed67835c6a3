"""Wrong clients are refused by name while the round goes on, and strangers and floods stop no round.

Servers and clients are threads of this process.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.test_federated import data, job, model, wide
from polytempo import federated as fed
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
from polytempo.runs.clients.tickets import ClientTicket
from polytempo.training.job.evaluate import tensors_of
from polytempo.wire.channel import ChannelClient, ChannelServer
from process.client_runs import LONG_S, Running, alone
from process.test_wire_zeromq import Tap

pytestmark = pytest.mark.process


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
