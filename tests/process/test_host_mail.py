"""Mail within a host by shared memory, between hosts by encrypted TCP; who lacks the keys learns nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polytempo as pt
from polytempo.engines.engine import EngineAddress, Launch, Role
from polytempo.engines.local_engine import Local, LocalEngine
from polytempo.replay.replay import replay
from polytempo.runs.process.host_mail import HostMailboxes, HostMemory, KeeperMail, host_memory
from polytempo.runs.process.program import perform
from polytempo.server.message import Beat, Push
from polytempo.server.record import HostPushEntry, PartEntry, PushEntry, read_record
from polytempo.wire.address_book import Addresses, Here, Place
from polytempo.wire.keys import make_keys
from polytempo.wire.shared import Arenas
from polytempo.wire.zeromq import Mailbox, TwoEnds

pytestmark = pytest.mark.process

HOST, KEEPER, ROOM = "127.0.0.1", 9, 1 << 20
LONG_S = 20.0


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short private folder for each of two pretended hosts."""
    made = tmp_path_factory.mktemp("h")
    for host in range(2):
        (made / str(host)).mkdir(mode=0o700)
    return made


def push(gradient: torch.Tensor) -> Push:
    return Push(0, 1, 1, 0, 0, 1, (0.1,), (0,), gradient)


# --- two ends


def test_both_ends_are_taken_from_in_turn_and_a_node_may_move_from_one_to_the_other(folder: Path) -> None:
    keys, arenas = make_keys(), Arenas(2, ROOM)
    with ExitStack() as stack:
        near = Mailbox(0, f"ipc://{folder}/0/m0", references=arenas)
        ends = TwoEnds(near, Mailbox(0, f"tcp://{HOST}:*", keys))
        by_file = Mailbox(1, f"ipc://{folder}/0/m1", references=arenas)
        by_tcp = Mailbox(2, f"tcp://{HOST}:*", keys)
        for mail in (ends, by_file, by_tcp):
            stack.callback(mail.close)
        by_file.connect(0, near.address)
        by_tcp.connect(0, ends.far.address)
        gradient = arenas.empty(1, 8).fill_(3.0)
        for _ in range(3):
            assert by_file.post(0, push(gradient))
            assert by_tcp.post(0, push(gradient))
        seen = [ends.take(LONG_S) for _ in range(6)]
        assert sorted(mail[0] for mail in seen if mail) == [1, 1, 1, 2, 2, 2]
        gradient.fill_(4.0)  # messages by file are in the sender's memory, messages by TCP are copies
        for mail in seen:
            assert mail is not None
            assert isinstance(mail[1], Push)
            assert mail[1].gradient.tolist() == [4.0 if mail[0] == 1 else 3.0] * 8
        ends.connect(1, by_file.address)
        assert ends.post(1, Beat(0, 1, 1))
        ends.connect(1, by_tcp.address)
        assert ends.post(1, Beat(0, 1, 2))
        taken = by_tcp.take(LONG_S)
        assert taken is not None
        assert taken[1].epoch == 2
        assert ends.take(0.0) is None


def test_an_end_that_is_not_there_is_refused(folder: Path) -> None:
    ends = TwoEnds(None, Mailbox(0, f"tcp://{HOST}:*", make_keys()))
    try:
        with pytest.raises(ValueError, match="is a file of another host"):
            ends.connect(1, f"ipc://{folder}/0/m1")
    finally:
        ends.close()


# --- the book


def test_nodes_find_each_other_by_the_keeper_alone_and_a_new_life_is_found_again(folder: Path) -> None:
    keys, memories = make_keys(), [HostMemory(host, folder / str(host), Arenas(4, ROOM)) for host in range(2)]
    with ExitStack() as stack:
        keeper = KeeperMail(KEEPER, HOST, keys, ROOM)
        stack.callback(keeper.close)

        def joined(node: int, life: int, host: int) -> object:
            boxes = HostMailboxes(life, HOST, keys, ROOM, (KEEPER, keeper.address), memories[host])
            mail = boxes.mailbox(node)
            stack.callback(mail.close)
            return mail

        def delivered(sender: object, to: object, node: int, epoch: int) -> bool:
            """True if a beat arrives before long, with the keeper serving."""
            for _ in range(400):
                sender.post(node, Beat(0, 1, epoch))
                keeper.take(0.02)
                sender.take(0.0)
                mail = to.take(0.03)
                if mail is not None and mail[1].epoch == epoch:
                    return True
            return False

        one, same, other = joined(0, 0, 0), joined(1, 1, 0), joined(2, 2, 1)
        assert delivered(one, same, 1, 1)
        assert delivered(one, other, 2, 2)
        assert delivered(other, same, 1, 3)
        same.close()
        again = joined(1, 3, 1)  # on the other host
        assert delivered(one, again, 1, 4)
        assert delivered(other, again, 1, 5)


@pytest.mark.parametrize("wrong", ["no keys", "other keys", "the server's key alone"])
def test_a_process_without_the_keys_neither_reads_nor_writes_the_book(wrong: str) -> None:
    keys, others = make_keys(), make_keys()
    half = replace(others, server_public=keys.server_public, server_secret=keys.server_secret)
    keeper = KeeperMail(KEEPER, HOST, keys, ROOM)
    stranger = Mailbox(0, f"tcp://{HOST}:*", {"no keys": None, "other keys": others}.get(wrong, half))
    try:
        stranger.connect(KEEPER, keeper.address)
        stranger.post(KEEPER, Here(Place(0, 99, 0, stranger.address), 0))
        assert keeper.take(0.6) is None
        assert stranger.take(0.0) is None
        assert not keeper.post(0, Beat(0, 1, 1)), "the book has no such node"
        assert keeper.counts.refused >= 1
        assert keeper.counts.taken == 0
    finally:
        stranger.close()
        keeper.close()


def test_a_book_is_only_taken_from_the_keeper() -> None:
    keys = make_keys()
    keeper = KeeperMail(KEEPER, HOST, keys, ROOM)
    node = HostMailboxes(0, HOST, keys, ROOM, (KEEPER, keeper.address)).mailbox(0)
    forger = Mailbox(3, f"tcp://{HOST}:*", keys)
    try:
        forger.connect(0, node.place.far)
        forger.post(0, Addresses(0, 7, (Place(1, 5, -1, forger.address),)))
        forger.post(0, Beat(3, 1, 1))
        assert node.take(LONG_S) is not None  # the beat; earlier messages have been read
        assert node._book.place_of(1) is None
    finally:
        for mail in (keeper, node, forger):
            mail.close()


# --- a run


class PretendedHosts:
    """Forks processes as agents of `hosts` hosts would: processes of one host share memory, and nothing else is
    shared."""

    known_hosts = 1
    """The number of hosts that the run knows, which decides the nodes' places."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts

    @contextmanager
    def open(self, launch: Launch) -> Iterator[LocalEngine]:
        """See `EngineSetup`."""
        memories: list[HostMemory | None] = []

        def work(role: Role) -> object:
            assert launch.spec is not None
            return perform(launch.spec, role, launch.setting(), HOST, memories[self.host_of(role)])

        with Local().open(launch._replace(work=work)) as inner:
            home = inner.address.home
            assert home is not None
            for host in range(self.hosts):
                (home / f"host-{host}").mkdir(mode=0o700)
            engine = _Forks(inner, lambda: self._meet(launch, home, memories), self.known_hosts)
            yield engine

    def host_of(self, role: Role) -> int:
        """The host of a process."""
        return role.node % self.hosts

    def _meet(self, launch: Launch, home: Path, memories: list[HostMemory | None]) -> None:
        if not memories:
            setting = launch.setting()
            memories += [host_memory(setting, host, home / f"host-{host}") for host in range(self.hosts)]


class _Forks:
    def __init__(self, inner: LocalEngine, meet: object, num_hosts: int = 1) -> None:
        self._inner, self._meet = inner, meet
        self.address = EngineAddress(HOST, inner.address.threads, num_hosts=num_hosts)
        self.poll, self.stop = inner.poll, inner.stop

    def start(self, role: Role, host: int = 0) -> object:
        """See `Engine`."""
        self._meet()
        return self._inner.start(role, host)


class TwoPairs(PretendedHosts):
    """Four workers, two on each of two hosts; the others are on the first."""

    known_hosts = 2

    def host_of(self, role: Role) -> int:
        """The host of a process."""
        return int(role.node in (2, 3))


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_run_uses_shared_memory_within_a_host_and_tcp_between_hosts(
    hosts: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path_factory.mktemp("p")  # short, for paths of sockets
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    said = tmp_path / "ways"
    _report_ways(said, monkeypatch)
    result = pt.run(
        pt.jobs.find("digits"),
        pt.strategies.async_sgd(shards=2, replicas=1),
        workers=2,
        epochs=2,
        lr=0.02,
        engine=PretendedHosts(hosts),
        out=tmp_path / "run",
    )
    assert result.server is not None
    assert result.server["updates"] == 90
    assert list(private.glob("polytempo-*")) == []
    ways = {line.split()[0] for line in said.read_text().splitlines()}
    assert ways == ({"ipc"} if hosts == 1 else {"ipc", "tcp"})


def test_workers_of_each_host_push_their_sum_and_the_run_can_be_replayed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("p")))
    job, out = pt.jobs.find("digits"), tmp_path / "run"
    strategy = pt.strategies.async_sgd(shards=2, hierarchical=True)
    result = pt.run(job, strategy, workers=4, epochs=4, engine=TwoPairs(2), out=out)
    assert result.server is not None
    together = []
    for path in (out / "record" / "0000").glob("shard-*.jsonl"):
        entries = [entry for entry in read_record(path).entries if isinstance(entry, PushEntry)]
        workers = [[entry.worker, *(part.worker for part in parts_of(entry))] for entry in entries]
        tickets = [t for entry in entries for each in (entry, *parts_of(entry)) for t in each.tickets]
        assert sorted(tickets) == list(range(180))
        together += [sorted(several) for several in workers if len(several) > 1]
    assert together
    assert all(several in ([0, 1], [2, 3]) for several in together)
    assert result.server["updates"] < 180
    again = replay(out, job, strategy)
    assert again.difference is None


def parts_of(entry: PushEntry) -> tuple[PartEntry, ...]:
    return entry.parts if isinstance(entry, HostPushEntry) else ()


def _report_ways(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write down the way of each line of a worker or a copy, except for lines to the coordinator."""
    connect = TwoEnds.connect

    def reporting(self: TwoEnds, node: int, address: str) -> None:
        connect(self, node, address)
        if node != 6:  # the coordinator
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(descriptor, f"{address[:3]} {self.far.node} {node}\n".encode())
            os.close(descriptor)

    monkeypatch.setattr(TwoEnds, "connect", reporting)
