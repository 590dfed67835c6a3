"""Connections of the ranks of a loop of one's own to its parameter server, which rank 0 starts beside itself.

one host         rank 0 ── home ──▶ ranks      sockets in a folder of mode 0700: no port, no key
several hosts    rank 0 ── address, keys ──▶ ranks      TCP with CURVE keys, from POLYTEMPO_KEYS or made for the run
ranks serve      the same, on one host as well, where nothing listens beyond loopback
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from polytempo.core import Mismatch, PolytempoError
from polytempo.engines.join.environment import recognise
from polytempo.engines.join.init import host_digest
from polytempo.engines.join.returned_rank import publish, running
from polytempo.engines.join.server_ranks import KEYS, hand_over, spend
from polytempo.engines.remote.network import address_to
from polytempo.runs.own_loop.loop_server import bracketed
from polytempo.runs.own_loop.server_process import ServerProcess
from polytempo.runs.process.host_mail import HostMailboxes
from polytempo.runs.process.mailbox_directory import NodeMail, OpenMail, socket_in
from polytempo.server.message import Message, RunFailed
from polytempo.training.model.agree import gather_json
from polytempo.training.own_loop.loop_facts import LoopFacts
from polytempo.training.own_loop.ticket_loop import RETURN
from polytempo.wire.frames import limits_of
from polytempo.wire.keys import Keys, make_keys, read_keys
from polytempo.wire.zeromq import Mailbox
from polytempo.worlds import ProcessWorld
from polytempo.worlds.process.process_world import ServerRanks

_LOOK_S = 0.25
"""A waiting rank looks for the server's process at this interval."""
_SILENT_S = 30.0
"""A server on another host is lost after this silence: it sends messages several times a second."""
_STARTING_S = 120.0
"""The time that the server's process has to start."""
_LINGER_S = 1.0


class LoopServerStart:
    """See `training.dealt_epochs.ServerStart`. Rank 0 starts an interpreter here, which loads torch meanwhile."""

    def __init__(self, world: ProcessWorld) -> None:
        self._process = ServerProcess() if world.rank == 0 else None

    def cancel(self) -> None:
        """End it: no epoch was begun."""
        if self._process is not None:
            self._process.end(0.0)

    def link(self, world: ProcessWorld, facts: LoopFacts) -> LoopLink:
        """Begin to serve, and connect this rank; a rank that has come back is connected to the present server."""
        if world.life > 1:
            return _rejoined(world, facts)
        servers = world.servers
        spread = facts.spread if servers is None else servers.spread
        mine = _Place(os.getpid(), _own_address() if spread else "127.0.0.1")
        places = [_Place(*each) for each in world.drive(gather_json(world.port, list(mine)))]
        keys = _agreed_keys(world, spread=spread) if spread or servers is not None else None
        told: dict[str, Any] = {}
        if self._process is not None:
            order = {
                "facts": facts.to_plain(),
                "launcher": os.getpid(),
                "threads": 1,
                "processes": [
                    p.process if h == facts.hosts[0] else None for p, h in zip(places, facts.hosts, strict=True)
                ],
                "keys": None if keys is None else keys.to_plain(),
                "host": mine.host,
                "servers": servers
                and {"ranks": servers.ranks, "spread": servers.spread, "have_keys": KEYS in os.environ},
            }
            told = self._process.begin(order, facts.blobs, _STARTING_S, partial(_hand_over, servers))
            told["process"] = self._process.pid
            _publish(world, facts, told, spread=spread)
        told = world.drive(gather_json(world.port, told))[0]
        if "failed" in told:
            raise PolytempoError(f"rank 0 could not start the parameter server: {told['failed']}")
        near = facts.hosts[world.rank] == facts.hosts[0]
        return LoopLink(_connected(world, told, facts, keys, mine.host, near=near), self._process)


def _connected(
    world: ProcessWorld, told: Mapping[str, Any], facts: LoopFacts, keys: Keys | None, host: str, *, near: bool
) -> WatchedMail:
    """The mail of this rank, which others reach at `host`. `near`: the server is on this host."""
    coordinator = facts.plan.topology.coordinator
    if keys is None:
        mail = _on_one_host(world.rank, told, facts)
    else:
        keeper = (coordinator, str(told["coordinator"]))
        mail = HostMailboxes(world.life, bracketed(host), keys, facts.plan.mail_bytes, keeper).mailbox(world.rank)
    return WatchedMail(mail, coordinator, process=told["process"] if near else None)


def _hand_over(servers: ServerRanks | None, ticket: str) -> None:
    assert servers is not None
    hand_over(servers, ticket)


# ---------------------------------------------------------------------- ranks that come back


def _publish(world: ProcessWorld, facts: LoopFacts, told: Mapping[str, Any], *, spread: bool) -> None:
    """Let a rank that is started again find the server. Keys are not in it."""
    if world.servers is not None:
        spend(world.servers)
    if world.store is not None and "ready" in told:
        loop = {"facts": facts.to_plain(), "told": told, "hosts": facts.hosts, "host": host_digest(), "spread": spread}
        publish(world.store, loop)


def _rejoined(world: ProcessWorld, facts: LoopFacts) -> LoopLink:
    assert world.store is not None
    loop = running(world.store, world.rank)
    theirs, mine = loop["facts"], facts.to_plain()
    for name in sorted(set(theirs) - {"first_epoch", "timeout_s"}):
        if json.dumps(theirs[name]) != json.dumps(mine[name]):
            raise Mismatch(
                f"rank {world.rank} has come back with another {name} than the run: {mine[name]!r}, and the run has "
                f"{theirs[name]!r}"
            )
    if (behind := facts.first_epoch - theirs["first_epoch"]) < 0:
        raise ValueError(
            f"rank {world.rank} has come back at epoch {facts.first_epoch}, and the run began at epoch "
            f"{theirs['first_epoch']}; load the position that the others have loaded"
        )
    near, spread = loop["host"] == host_digest(), loop["spread"]
    keys = _keys_again(world, loop["told"]) if spread or world.servers is not None else None
    mail = _connected(world, loop["told"], facts, keys, _own_address() if spread else "127.0.0.1", near=near)
    row = RETURN.format(worker=world.rank, process=os.getpid(), host=host_digest()).encode()
    return LoopLink(mail, None, greeting=(row,), epochs_behind=behind)


def _keys_again(world: ProcessWorld, told: Mapping[str, Any]) -> Keys:
    """The run's keys for a rank that has come back, from the file of keys, or, on one host, the server's folder."""
    path = os.environ.get(KEYS)
    if path is None and (world.servers is None or world.servers.spread):
        raise ValueError(
            f"rank {world.rank} has been started again, and the keys of a run over several hosts travel once; set "
            f"{KEYS} to a file of keys on all ranks, so that one can come back"
        )
    return read_keys(Path(told["ready"]) / "keys" if path is None else Path(path))


class _Place(NamedTuple):
    """The process and host of a rank."""

    process: int
    host: str
    """Others reach the rank at this address."""


def _on_one_host(rank: int, told: Mapping[str, Any], facts: LoopFacts) -> OpenMail:
    home = Path(told["ready"])
    try:
        status = home.lstat()
    except FileNotFoundError:
        raise PolytempoError(
            f"the parameter server (process {told['process']}) has ended before rank {rank} reached it; its log, which "
            "is rank 0's, says why"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PolytempoError(f"{home} is not a private folder of this user, so the process there is not the server")
    mailbox = Mailbox(rank, socket_in(home, rank), None, limits_of(facts.plan.mail_bytes))
    return NodeMail(rank, mailbox, lambda node: socket_in(home, node), moves=False)


class WatchedMail:
    """A rank's mailbox that notices the end of the server. `coordinator` is the server's node.

    `process`: the server's process if it is on this host. `take` raises PolytempoError when the server has failed or
    is gone.
    """

    def __init__(self, mail: OpenMail, coordinator: int, *, process: int | None) -> None:
        self._mail, self._coordinator, self._process = mail, coordinator, process
        self._heard_s = time.monotonic()
        self._last_s = self._looked_s = 0.0

    def post(self, to: int, message: Message) -> bool:
        """See `worlds.mail.Mail`."""
        return self._mail.post(to, message)

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """See `worlds.mail.Mail`."""
        now_s = time.monotonic()
        until_s = float("inf") if wait_s is None else now_s + wait_s
        if now_s - self._last_s > _LOOK_S:
            self._heard_s = now_s  # it computed, and read nothing
        while True:
            mail = self._mail.take(max(0.0, min(_LOOK_S, until_s - time.monotonic())))
            self._last_s = time.monotonic()
            if mail is not None:
                if mail[0] == self._coordinator:
                    self._heard_s = self._last_s
                return _unfailed(mail)
            if self._last_s - self._looked_s >= _LOOK_S:  # also where callers wait for less
                self._looked_s = self._last_s
                if (mail := self._look()) is not None:
                    return _unfailed(mail)
            if self._last_s >= until_s:
                return None

    def close(self, linger_s: float) -> None:
        """See `worlds.mail.Mail`."""
        self._mail.close(linger_s)

    def _look(self) -> tuple[int, Message] | None:
        """PolytempoError where the server is gone; but first the messages that it has sent before."""
        if self._process is not None and not _runs(self._process):
            if (mail := self._mail.take(0.0)) is not None:
                return mail
            raise PolytempoError(
                f"the parameter server (process {self._process}, which rank 0 had started) has ended without a word; "
                "rank 0 was killed, or its log says why"
            )
        if self._process is None and self._last_s - self._heard_s > _SILENT_S:
            raise PolytempoError(
                f"the parameter server on rank 0's host has said nothing for {_SILENT_S:g} s; look at rank 0, and at "
                "the network between the hosts"
            )
        return None


def _unfailed(mail: tuple[int, Message]) -> tuple[int, Message]:
    if isinstance(mail[1], RunFailed):
        raise PolytempoError(mail[1].reason)
    return mail


class LoopLink:
    """See `training.ticket_loop.ServerLink`."""

    def __init__(
        self,
        mail: WatchedMail,
        process: ServerProcess | None,
        *,
        greeting: tuple[bytes, ...] = (),
        epochs_behind: int = 0,
    ) -> None:
        self.mail, self.greeting, self.epochs_behind = mail, greeting, epochs_behind
        self._process = process
        self.account: dict[str, Any] | None = None

    def close(self, *, wait_s: float, reason: str = "") -> None:
        """See `ServerLink`."""
        self.mail.close(_LINGER_S)
        if self._process is not None:
            self.account = self._process.end(wait_s, reason)


def _runs(process: int) -> bool:
    """True if a process of this host runs; an uncollected process that has ended does not."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _own_address() -> str:
    """The address of this host for others: the source address of its packets to rank 0's host."""
    place = recognise(os.environ)
    if place.master_address is None:
        return "127.0.0.1"
    return address_to(place.master_address)


def _agreed_keys(world: ProcessWorld, *, spread: bool) -> Keys:
    """The run's keys on all ranks, from the file of keys, or made by rank 0; these travel as torch's messages do."""
    path = os.environ.get(KEYS)
    everywhere = world.drive(gather_json(world.port, path is not None))
    if any(everywhere) and not all(everywhere):
        without = [rank for rank, has in enumerate(everywhere) if not has]
        raise ValueError(f"{KEYS} is set on some ranks and not on ranks {without}; set it on all, or on none")
    if path is not None:
        return read_keys(Path(path))
    mine = make_keys() if world.rank == 0 else None
    if mine is not None and spread:
        print(
            "polytempo: the keys of the parameter server travel between the hosts as gradients do under "
            f"torch.distributed, unencrypted; set {KEYS} to a file of keys where others can listen",
            file=sys.stderr,
        )
    found = world.drive(gather_json(world.port, None if mine is None else mine.to_plain()))[0]
    return Keys.from_plain(found)
