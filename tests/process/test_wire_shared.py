"""Arenas: tensors that processes share in place, and references to them that cannot lead astray."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from polytempo.core import Program
from polytempo.engines.processes.fork import fork
from polytempo.server.message import Beat, Message, Pulled
from polytempo.wire.frames import FrameLimits, Malformed, decode, encode
from polytempo.wire.shared import Arenas
from polytempo.wire.zeromq import Mailbox
from polytempo.worlds.process.mail import MailWorld

pytestmark = pytest.mark.process

SIZE = 1 << 30


@pytest.fixture(scope="module")
def arenas() -> Arenas:
    return Arenas(70, SIZE)


def elsewhere(work: Callable[[], Any]) -> Any:
    """The value of `work` in a process of its own, as JSON."""
    reading, writing = os.pipe()

    def child() -> None:
        with open(writing, "w", encoding="utf-8") as file:
            json.dump(work(), file)
        os._exit(0)

    process = fork(child)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    return json.loads(text)


def test_a_reference_leads_to_the_same_memory_in_another_process(arenas: Arenas) -> None:
    mine = arenas.empty(0, 1000)
    place = arenas.reference(mine)
    assert place is not None

    kept = []

    def work() -> Any:
        theirs = arenas.resolve(*place, (10, 100), torch.float32)
        theirs[0, 0] = 7
        kept.append(arenas.empty(1, 3).fill_(5))  # would be free, and zeros, without anybody who holds it
        return arenas.reference(kept[0])

    arena, offset = elsewhere(work)
    assert mine[0] == 7
    assert arenas.resolve(arena, offset, (3,), torch.float32).tolist() == [5, 5, 5]


def test_only_what_lies_in_an_arena_has_a_reference(arenas: Arenas) -> None:
    mine = arenas.empty(2, 64, torch.float64)
    place = arenas.reference(mine)
    assert place is not None
    number, offset = place
    assert number == 2
    assert arenas.reference(mine[8:]) == (2, offset + 64)
    assert arenas.reference(torch.zeros(64)) is None
    assert arenas.reference(torch.zeros(0)) is None
    assert arenas.reference(arenas.empty(2, 0)) is None


@pytest.mark.parametrize(
    ("arena", "offset", "shape"),
    [(-1, 0, (1,)), (70, 0, (1,)), (0, -4, (1,)), (0, 2, (1,)), (0, SIZE, (1,)), (0, 4, (SIZE // 4,)), (0, 0, (SIZE,))],
)
def test_a_reference_beyond_the_arena_is_refused(
    arenas: Arenas, arena: int, offset: int, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"arena"):
        arenas.resolve(arena, offset, shape, torch.float32)
    good = encode(Pulled(0, 0, 0, 1, 1, arenas.empty(3, 4)), arenas)
    bad = [bytes(good[0]).replace(b"\x94\x03\x00\x00\x91\x04", b"\x94\x03\xcd\x00\x01\x00\x91\x04")]
    assert bad != good
    with pytest.raises(Malformed, match="arena 3"):
        decode(bad, FrameLimits(), arenas)


def test_a_tensor_in_an_arena_travels_as_a_reference(arenas: Arenas) -> None:
    values = arenas.empty(4, 1 << 20)
    message = Pulled(0, 0, 0, 1, 1, values[:1024].view(32, 32))
    frames = encode(message, arenas)
    assert len(frames) == 1
    got = decode([bytes(frames[0])], FrameLimits(), arenas)
    assert isinstance(got, Pulled)
    assert got.values.data_ptr() == values.data_ptr()
    assert got.values.shape == (32, 32)
    assert len(encode(Pulled(0, 0, 0, 1, 1, values[::2]), arenas)) == 2  # not contiguous: its bytes
    with pytest.raises(Malformed, match="no memory is shared"):
        decode(frames, FrameLimits())


def test_an_arena_is_one_process_s_own_until_that_has_ended(arenas: Arenas) -> None:
    arenas.empty(5, 10)

    def work() -> str:
        arenas.empty(6, 10)
        try:
            arenas.empty(5, 10)
        except RuntimeError as error:
            return str(error)
        return "taken twice"

    assert elsewhere(work) == "a living process has this arena; give each node an arena of its own"
    assert arenas.empty(6, 10).sum() == 0


def test_memory_that_is_let_go_of_is_used_again(arenas: Arenas) -> None:
    places = set()
    for _ in range(4):
        large = arenas.empty(7, 100 << 20)
        places.add(arenas.reference(large))
        del large
    assert places == {(7, 0)}
    held = [arenas.empty(7, 100 << 20), arenas.empty(7, 100 << 20)]
    with pytest.raises(MemoryError, match="arena has"):
        arenas.empty(7, 100 << 20)
    assert len(held) == 2


def test_arenas_leave_no_descriptors_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    several = Arenas(5, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 5
    assert several.empty(4, 3).tolist() == [0, 0, 0]
    del several
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_arenas_are_none() -> None:
    with pytest.raises(ValueError, match="at least one arena"):
        Arenas(0, 1)


def test_two_worlds_with_mailboxes_and_shared_memory(arenas: Arenas, tmp_path: Path) -> None:
    """A worker asks, a server adds in place and answers: no tensor's bytes go through ZeroMQ."""
    tmp_path.chmod(0o700)
    addresses = [f"ipc://{tmp_path}/{node}" for node in (0, 1)]
    slots = {0: 8, 1: 9}

    def world(node: int, mailbox: Mailbox) -> MailWorld:
        mailbox.connect(1 - node, addresses[1 - node])
        return MailWorld(node, mailbox, (0, 0))

    async def server(world: MailWorld) -> int:
        sums = arenas.empty(slots[1], 1000)
        for step in range(3):
            source, message = await expected(world)
            assert isinstance(message, Pulled)
            sums += message.values
            await world.port.post(Pulled(0, 0, 0, step, step, sums), source)
        await expected(world)
        return world.trace.messages[1, "post"]

    async def worker(world: MailWorld) -> list[list[float]]:
        seen = []
        gradient = arenas.empty(slots[0], 1000)
        for step in range(3):
            gradient.fill_(step + 1)
            await world.port.post(Pulled(0, 0, 0, step, step, gradient), 1)
            _, answer = await expected(world)
            assert isinstance(answer, Pulled)
            assert arenas.reference(answer.values) is not None
            seen.append(answer.values[:2].tolist())
        await world.port.post(Beat(0, 0, 0), 1)
        return seen

    async def expected(world: MailWorld) -> tuple[int, Message]:
        mail = await world.port.take(20)
        assert mail is not None
        return mail  # type: ignore[return-value]

    def drive(node: int, program: Callable[[MailWorld], Program[Any]]) -> Any:
        with closing(Mailbox(node, addresses[node], references=arenas)) as mailbox:
            own = world(node, mailbox)
            value = own.drive(program(own))
            assert own.waited_s > 0
            mailbox.close(5)
            return value

    reading, writing = os.pipe()

    def child() -> None:
        os.write(writing, bytes([drive(1, server)]))
        os._exit(0)

    process = fork(child)
    assert drive(0, worker) == [[1, 1], [3, 3], [6, 6]]
    assert os.read(reading, 1) == b"\x03"
    assert os.waitpid(process, 0)[1] == 0
    os.close(reading)
    os.close(writing)
    assert list(tmp_path.iterdir()) == []
