"""`RoundServer`: the server's side of rounds with clients that dial in.

round 7   drawn among the clients that are there: 2, 5, 9 ──Round──▶
          ◀─Movement─ 9      checked, taken
          ◀─Movement─ 2      NaN: refused by name, and asked no more in this round
                      5      silent at the deadline: the round goes on without it
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor

from polytempo.core import EncodeContext
from polytempo.core.calls.refusals import refuse
from polytempo.federated.real_clients import RoundRules
from polytempo.federated.sampling import generator
from polytempo.runs.clients.client_messages import (
    HEADROOM_BYTES,
    ClientHello,
    ClientMovement,
    ClientRefused,
    ClientWelcome,
    FromClient,
    RoundDeclined,
    RoundOrder,
    RoundsOver,
    ServerBeat,
    ToClient,
    digest,
    layout,
    packed,
    problem_of,
    unpacked,
)
from polytempo.runs.clients.tickets import TicketRoster, name_of
from polytempo.spec.text.plain_text import plain_text
from polytempo.training.federated.client_movements import from_wire
from polytempo.training.federated.client_states import CONTROL
from polytempo.training.federated.remote_rounds import NO_ROUND, ClientAnswer, RoundTask
from polytempo.training.observe.user_log import user_log
from polytempo.wire.channel import ChannelServer

_LOOK_S = 1.0
"""Seconds between looks at the roster's file and at connections."""
_HIGH_WATER = 64
_FAREWELL_S = 2.0
_MOST_WHY = 200
_NO_HELLO = "it has not said hello, or another process has its ticket"


class _Present(NamedTuple):
    """A client that is there."""

    peer: bytes
    samples: int


@dataclass
class _Open:
    """A round that goes on."""

    task: RoundTask
    content: bytes
    mark: str
    pending: dict[int, float] = field(default_factory=dict)
    """Clients that are asked, and the time when the connection of each broke (inf: it is there)."""
    asked: list[int] = field(default_factory=list)
    """Clients in the order of draws."""
    answers: dict[int, ClientAnswer] = field(default_factory=dict)
    out: dict[int, str] = field(default_factory=dict)
    """Refused clients, and why."""
    late: set[int] = field(default_factory=set)
    """Clients that have sent a movement of another round in this one."""

    @property
    def number(self) -> int:
        """The round's."""
        return self.task.number


class RoundServer:
    """Listens at `address` for the clients of `roster`, and performs rounds with them."""

    def __init__(
        self,
        address: str,
        roster: TicketRoster,
        rules: RoundRules,
        welcome: ClientWelcome,
        places: int,
        tensors: Mapping[str, Tensor],
        most_bytes: int,
    ) -> None:
        """`welcome`: the message to each client, which gets its number. `tensors`: the model's, by name. `most_bytes`:
        the size of a client's tensors."""
        self._roster, self._rules, self._welcome, self._places = roster, rules, welcome, places
        self._layout = layout(tensors)
        self._channel: ChannelServer[FromClient, ToClient] = ChannelServer(
            address,
            roster.keys,
            FromClient,  # type: ignore[arg-type] # a union of types
            known=roster.known,
            most_bytes=most_bytes + HEADROOM_BYTES,
            high_water=_HIGH_WATER,
        )
        self.address = self._channel.address
        self._there: dict[int, _Present] = {}
        self._samples: dict[int, int] = {}
        self._looked_s, self._rounds, self._begun = -math.inf, 0, False

    @property
    def samples(self) -> Mapping[int, int]:
        """The samples of each client that has come, by its number."""
        return self._samples

    def performed(self, task: RoundTask) -> list[ClientAnswer]:
        """A round; see `RemoteRounds`. PT2518 (a ValueError) where too few clients come or answer."""
        content, number = packed(task.tensors), task.number
        opened = _Open(task, content, digest(content))
        random, least, first = generator(self._welcome.seed, "cohort", number), self._rules.least(self._places), True
        needed = least if self._begun else self._rules.there or self._places
        for _ in range(self._rules.draws):
            wanted = self._places - len(opened.answers)
            there = self._enough(needed if first else 1, opened)
            asked = min(len(there), -int(-wanted * (1 + self._rules.extra) // 1) if first else wanted)
            chosen = [int(each) for each in random.choice(there, asked, replace=False)] if there else []
            self._ask(chosen, opened)
            self._collect(opened)
            if len(opened.answers) >= least:
                break
            first = False
        else:
            self._too_few(len(opened.answers), f"after {self._rules.draws} draws of round {number}", least)
        self._begun, self._rounds = True, number + 1
        self._note(opened)
        return [opened.answers[each] for each in opened.asked if each in opened.answers]

    def close(self) -> None:
        """Tell the clients that the run is over, and listen no more."""
        for each in self._there.values():
            self._channel.send(each.peer, RoundsOver(self._rounds))
        self._channel.close(_FAREWELL_S)

    def abandon(self) -> None:
        """Listen no more; clients wait for a server that goes on."""
        self._channel.close()

    def _enough(self, needed: int, opened: _Open) -> list[int]:
        """The clients to draw from, once there are so many."""
        until_s = time.monotonic() + self._rules.wait_s
        while True:
            self._look(opened)
            free = [each for each in sorted(self._there) if each not in opened.out and each not in opened.answers]
            if len(free) >= needed:
                return free
            if time.monotonic() >= until_s:
                self._too_few(len(free), f"within {self._rules.wait_s:g} s before round {opened.number}", needed)
            self._hear(opened, max(0.0, min(_LOOK_S, until_s - time.monotonic())))

    def _ask(self, chosen: list[int], opened: _Open) -> None:
        for client in chosen:
            opened.pending[client] = math.inf
            if client in opened.asked:
                opened.asked.remove(client)
            opened.asked.append(client)
            self._send_round(client, opened)

    def _send_round(self, client: int, opened: _Open) -> None:
        taken = opened.task.taken.get(client, NO_ROUND)
        order = RoundOrder(opened.number, list(opened.task.rates), opened.content, taken)
        sent = self._channel.sent(self._there[client].peer, order)
        if sent is None:
            self._lost(client, opened)
        elif not sent:
            del opened.pending[client]
            opened.out[client] = why = "did not get the round: its queue is full, because it reads no messages"
            self._tell(opened.number, client, why)

    def _collect(self, opened: _Open) -> None:
        """Take answers until there are enough, none is to come, or the deadline has passed."""
        until_s = time.monotonic() + self._rules.deadline_s
        while len(opened.answers) < self._places:
            now_s = time.monotonic()
            for client, broke_s in list(opened.pending.items()):
                if now_s >= until_s or now_s - broke_s > self._rules.return_s:
                    del opened.pending[client]
                    self._tell(opened.number, client, "is late" if broke_s == math.inf else "has vanished")
            if not opened.pending:
                return
            self._look(opened)
            self._hear(opened, max(0.0, min(_LOOK_S / 4, until_s - now_s)))

    def _look(self, opened: _Open) -> None:
        """Follow the roster, and forget clients without a connection; once a second."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        self._roster.follow()
        for client, present in list(self._there.items()):
            if not self._roster.admits(client):
                self._dismiss(client, present.peer, opened)
            elif self._channel.sent(present.peer, ServerBeat()) is None:
                self._lost(client, opened)

    def _lost(self, client: int, opened: _Open) -> None:
        self._there.pop(client, None)
        if opened.pending.get(client) == math.inf:
            opened.pending[client] = time.monotonic()

    def _dismiss(self, client: int, peer: bytes, opened: _Open) -> None:
        self._channel.send(peer, ClientRefused("this ticket is revoked", final=True))
        if self._there.pop(client, None) is not None or client in opened.pending:
            self._out(client, opened, "its ticket is revoked")

    def _hear(self, opened: _Open, wait_s: float) -> None:
        """Take the next message, if one comes."""
        found = self._channel.take_named(wait_s)
        if found is None:
            return
        peer, name, message = found
        client = int(name)
        self._roster.follow()
        if not self._roster.admits(client):
            self._dismiss(client, peer, opened)
        elif isinstance(message, ClientHello):
            self._greet(client, peer, message, opened)
        elif (present := self._there.get(client)) is None or present.peer != peer:
            self._channel.send(peer, ClientRefused(_NO_HELLO, hello=present is None))
        elif isinstance(message, RoundDeclined):  # it has an error of its own, and will leave
            del self._there[client]
            if message.round == opened.number and client in opened.pending:
                self._out(client, opened, f"it has an error, {plain_text(message.why[:_MOST_WHY])}")
        else:
            self._take(client, present, message, opened)

    def _greet(self, client: int, peer: bytes, hello: ClientHello, opened: _Open) -> None:
        most = self._roster.members[client].most_samples
        if hello.model != self._layout:
            why = "its job has another model: other names, shapes or dtypes"
        elif not 1 <= hello.samples <= most:
            why = f"it says that it has {hello.samples:,} samples, and its ticket is for 1 to {most:,}"
        else:
            self._there[client] = _Present(peer, hello.samples)
            self._samples[client] = hello.samples
            if client not in opened.asked:  # refused for its hello, which is right now
                opened.out.pop(client, None)
            self._channel.send(peer, replace(self._welcome, number=client))
            if client in opened.pending:  # a new connection: the order may be lost with the old one
                opened.pending[client] = math.inf
                self._send_round(client, opened)
            return
        self._there.pop(client, None)
        self._channel.send(peer, ClientRefused(why, final=True))
        self._out(client, opened, why)

    def _take(self, client: int, present: _Present, message: ClientMovement, opened: _Open) -> None:
        if message.round != opened.number or message.model != opened.mark:
            self._channel.send(
                present.peer, ClientRefused(f"round {message.round} has ended, and this is round {opened.number}")
            )
            if client in opened.pending and client not in opened.late:
                opened.late.add(client)
                self._tell(opened.number, client, f"sent a movement of an old round ({message.round})")
            return
        if client not in opened.pending:
            why = "its part of the round is over" if client in opened.asked else "it was not drawn for this round"
            self._channel.send(present.peer, ClientRefused(why))
            return
        answer, problem = _checked(client, message, opened.task)
        if message.samples != present.samples:
            problem = f"it says that it has {message.samples:,} samples, and it said {present.samples:,} before"
        if problem is not None:
            self._channel.send(present.peer, ClientRefused(problem))
            self._out(client, opened, problem)
            return
        del opened.pending[client]
        opened.answers[client] = answer

    def _out(self, client: int, opened: _Open, why: str) -> None:
        opened.pending.pop(client, None)
        if client not in opened.out:
            opened.out[client] = why
            self._tell(opened.number, client, f"is refused: {why}")

    def _tell(self, number: int, client: int, event: str) -> None:
        text = f"round {number}: {name_of(client)} {event}"
        print(f"polytempo: {text}", file=sys.stderr)
        user_log().log_text("clients", text)

    def _note(self, opened: _Open) -> None:
        names = " ".join(name_of(each) for each in opened.asked if each in opened.answers)
        user_log().log_text("clients/round", f"round {opened.number}: {names}")
        user_log().log({"clients/there": float(len(self._there)), "clients/refused": float(len(opened.out))})

    def _too_few(self, found: int, when: str, needed: int) -> None:
        refuse({"real clients", "too few"}, found=found, when=when, needed=needed, places=self._places)


def _checked(client: int, message: ClientMovement, task: RoundTask) -> tuple[ClientAnswer, str | None]:
    """A client's answer, and the reason to refuse it."""
    movement, problem = dict[str, Tensor](), None
    try:
        movement = unpacked(message.movement)
        if task.codec is not None:
            when = EncodeContext(step=task.number + 1, rank=client)
            movement = {name: _decoded(name, each, task, when) for name, each in movement.items()}
        problem = problem_of(movement, task.expected)
    except ValueError as error:
        problem = str(error)
    numbers = message.loss, message.first_loss
    if not (all(map(math.isfinite, numbers)) and 0 <= message.right <= message.tested < math.inf):
        problem = problem or f"its loss is {message.loss}, and {message.right} of {message.tested} are right"
    told = message.samples, message.loss, movement, message.right, message.tested, message.first_loss
    answer = ClientAnswer(client, *told)
    return answer, problem or task.problem(answer)


def _decoded(name: str, wire: Tensor, task: RoundTask, when: EncodeContext) -> Tensor:
    """The tensor of a code; others as they are. ValueError for a code of no such tensor."""
    if name not in task.expected or name.startswith(CONTROL) or task.codec is None:
        return wire
    try:
        return from_wire(wire, task.expected[name], task.codec, when, name)
    except Exception as error:  # of hostile codes IndexError, RuntimeError, too
        raise ValueError(f"{name} is not a code of {task.codec.facts.name} ({type(error).__name__})") from error
