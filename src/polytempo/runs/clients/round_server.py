"""`RoundServer`: the server's side of rounds with clients that dial in.

round 7   drawn among the clients that are there: 2, 5, 9 ──Round──▶
          ◀─Movement─ 9      checked, taken
          ◀─Movement─ 2      NaN: refused by name, and asked no more in this round
                      5      silent at the deadline: the round goes on without it

sum 7     ◀─Movement─ 9      with keys, and then its part of each phase; see `sum_phases`     (`secure`)

buffer 7  ◀─Movement─ 9      began in round 5: age 2                             (`fed_buff`)
          ──Round──▶  4      another client begins, with the newest model; 2 and 5 are in training still
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor

from polytempo.core.calls.refusals import refuse
from polytempo.core.strategy import Buffering
from polytempo.federated.real_clients import RoundRules
from polytempo.federated.sampling import generator
from polytempo.federated.secure_sum import Primitives, Words
from polytempo.runs.clients.answers import checked, hello_problem
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
    SumTell,
    ToClient,
    layout,
    ordered,
)
from polytempo.runs.clients.open_round import AskedClient, OpenRound, RoundLost, SentRound, note_round, say, sent_round
from polytempo.runs.clients.sum_phases import SumMoves, part_verdict, sum_in_phases
from polytempo.runs.clients.tickets import TicketRoster, name_of
from polytempo.spec.text.plain_text import plain_text
from polytempo.training.federated.remote_rounds import NO_ROUND, RoundAnswers, RoundTask, SumTask
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
        buffering: Buffering | None = None,
        crypto: Primitives | None = None,
    ) -> None:
        """`welcome`: the message to each client, which gets its number. `places`: answers of a round, or as many as are
        expected. `tensors`: the model's, by name. `most_bytes`: the size of a client's tensors. `buffering`: clients
        train while the server goes on. `crypto`: the cryptography of secure sums."""
        self._buffering, self._crypto = buffering, crypto
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
        self._asked: dict[int, AskedClient] = {}
        self._orders: dict[int, SentRound] = {}
        """The rounds that clients in training began in."""
        self._looked_s, self._rounds, self._begun, self._given_up = -math.inf, 0, False, 0

    @property
    def samples(self) -> Mapping[int, int]:
        """The samples of each client that has come, by its number."""
        return self._samples

    @property
    def training(self) -> Mapping[int, int]:
        """Clients in training between rounds, and the rounds that they began in."""
        return {client: asked.number for client, asked in self._asked.items()}

    def performed(self, task: RoundTask) -> RoundAnswers:
        """A round; see `RemoteRounds`. PT2518 (a ValueError) where too few clients come or answer."""
        opened, words, scale = OpenRound(task, self._places if task.drawn is None else len(task.drawn)), None, 1.0
        self._orders[task.number] = sent = sent_round(task)
        opened.order = ordered(self._welcome, sent.mark, sent.rates)
        if self._buffering is not None:
            self._fill(opened, self._buffering)
            found = list(opened.answers)
        else:
            try:
                if task.sum is not None:
                    words, scale = self._sum(opened, task.sum)
                elif task.drawn is None:
                    self._draw(opened)
                else:
                    self._ask_drawn(opened, task.drawn)
                self._given_up = 0
            except RoundLost as lost:
                self._give_up(opened, lost)
            self._asked.clear()
            found = opened.found
        began = {asked.number for asked in self._asked.values()}
        self._orders = {number: order for number, order in self._orders.items() if number in began}
        self._begun, self._rounds = True, task.number + 1
        self._note(opened, found)
        return RoundAnswers([opened.answers[each] for each in found], words, scale)

    def _give_up(self, opened: OpenRound, lost: RoundLost) -> None:
        """End a round without an update. PT2518 in a server's first round, in the last of `draws` rounds given up, and
        where a lost server may have opened the round's sum: the next one, of the same model, could tell of a client."""
        self._given_up += 1
        if not self._begun or opened.opened_before or self._given_up >= self._rules.draws:
            self._too_few(lost.found, lost.when, lost.needed)
        opened.answers.clear()
        say(f"round {opened.number} is given up: {lost.found} clients {lost.when}, and {lost.needed} are needed")

    def _sum(self, opened: OpenRound, task: SumTask) -> tuple[Words, float]:
        """Add movements under masks: the sum, and the scale of its weights."""
        assert self._crypto is not None
        moves = SumMoves(
            there=self._there.keys,
            train=partial(self._ask_again, opened),
            draw=partial(self._draw, opened),
            part=partial(self._ask_part, opened),
            out=lambda client, why: self._out(client, opened, why),
        )
        return sum_in_phases(opened, task, self._crypto, self._rules, moves)

    def _ask_again(self, opened: OpenRound, chosen: list[int]) -> None:
        self._ask(chosen, opened)
        self._collect(opened)

    def _ask_part(self, opened: OpenRound, clients: Collection[int]) -> None:
        """Ask clients for their part of a sum's phase. Broken connections may come back."""
        self._asked.clear()
        for client in clients:
            self._asked[client] = AskedClient(opened.number, math.inf)
            if client in self._there:
                self._send_round(client, opened)
            else:
                self._lost(client)
        self._collect(opened)

    def _draw(self, opened: OpenRound, first: bool = True) -> None:
        """Ask clients that are there, and further ones where too few of them answer. `first`: the round begins."""
        number, least = opened.number, opened.fewest(self._rules.least(self._places))
        random = generator(self._welcome.seed, "cohort", number)
        for _ in range(self._rules.draws):
            wanted = self._places - len(opened.answers)
            waits = first or not self._begun
            there = self._enough(self._needed if first else 1, opened) if waits else self._free(opened)
            asked = min(len(there), -int(-wanted * (1 + self._rules.extra) // 1) if first else wanted)
            chosen = [int(each) for each in random.choice(there, asked, replace=False)] if there else []
            self._ask(chosen, opened)
            self._collect(opened)
            if len(opened.answers) >= least:
                return
            first = False
        raise RoundLost(len(opened.answers), f"answered in {self._rules.draws} draws of round {number}", least)

    def _ask_drawn(self, opened: OpenRound, drawn: Sequence[int]) -> None:
        """Ask the clients of a draw that are there. Nothing else decides who takes part."""
        self._enough(self._needed, opened)
        self._ask([each for each in drawn if each in self._there], opened)
        self._collect(opened)

    def _fill(self, opened: OpenRound, buffering: Buffering) -> None:
        """Take answers of clients in training until there are enough; where one ends, another begins."""
        self._take_over(opened.task)
        if not self._begun:
            self._enough(self._needed, opened)
        random, last_s, answered = generator(self._welcome.seed, "arrivals", opened.number), time.monotonic(), 0
        while len(opened.answers) < self._places:
            now_s = time.monotonic()
            self._settle(opened, buffering.oldest, now_s)
            in_time = sum(not asked.late for asked in self._asked.values())
            while in_time < buffering.concurrency and (free := self._free(opened)):
                in_time += 1
                self._ask([free[int(random.integers(len(free)))]], opened)
            if len(opened.answers) > answered:
                answered, last_s = len(opened.answers), now_s
            if now_s - last_s >= self._rules.wait_s:
                when = f"in {self._rules.wait_s:g} s of round {opened.number} that had no further answer"
                self._too_few(answered, when, self._places)
            self._look(opened)
            self._hear(opened, min(_LOOK_S / 4, self._rules.wait_s))

    def _take_over(self, task: RoundTask) -> None:
        """Go on with the clients that trained when the run was saved."""
        if self._begun or task.earlier is None:
            return
        for client, number in task.training.items():
            if self._buffering is not None and task.number - number <= self._buffering.oldest:
                self._orders.setdefault(number, sent_round(task.earlier(number)))
                until_s = time.monotonic() + self._rules.deadline_s
                self._asked[client] = AskedClient(number, until_s)

    def _settle(self, opened: OpenRound, oldest: int, now_s: float) -> None:
        """Let others begin in the place of clients that are late, and forget the vanished ones."""
        for client, asked in list(self._asked.items()):
            if client not in self._there and asked.broke_s == math.inf:
                asked.broke_s = now_s
            if now_s - asked.broke_s > self._rules.return_s:
                del self._asked[client]
                self._tell(opened.number, client, "has vanished")
            elif now_s >= asked.until_s:
                if not asked.late:
                    asked.late = True
                    self._tell(opened.number, client, "is late")
                if opened.number - asked.number > oldest:
                    del self._asked[client]

    def _free(self, opened: OpenRound) -> list[int]:
        """Clients that can begin."""
        busy = opened.out.keys() | opened.answers.keys() | self._asked.keys()
        return [each for each in sorted(self._there) if each not in busy]

    def close(self) -> None:
        """Tell the clients that the run is over, and listen no more."""
        for each in self._there.values():
            self._channel.send(each.peer, RoundsOver(self._rounds))
        self._channel.close(_FAREWELL_S)

    def abandon(self) -> None:
        """Listen no more; clients wait for a server that goes on."""
        self._channel.close()

    def _enough(self, needed: int, opened: OpenRound) -> list[int]:
        """The clients to draw from, once there are so many."""
        until_s = time.monotonic() + self._rules.wait_s
        while True:
            self._look(opened)
            free = self._free(opened)
            if len(free if self._buffering is None else self._there) >= needed:
                return free
            if time.monotonic() >= until_s:
                self._too_few(len(free), f"within {self._rules.wait_s:g} s before round {opened.number}", needed)
            self._hear(opened, max(0.0, min(_LOOK_S, until_s - time.monotonic())))

    def _ask(self, chosen: list[int], opened: OpenRound) -> None:
        self._count(chosen, opened.number, opened)
        for client in chosen:
            self._asked[client] = AskedClient(opened.number, time.monotonic() + self._rules.deadline_s)
            if client in opened.drawn:
                opened.drawn.remove(client)
            opened.drawn.append(client)
            self._send_round(client, opened)

    def _send_round(self, client: int, opened: OpenRound) -> None:
        number, taken = self._asked[client].number, opened.task.taken.get(client, NO_ROUND)
        order, asked = self._orders[number], None if opened.sum is None else opened.sum.asks(client)
        peer = self._there[client].peer
        if asked is None:
            self._count([client], number, opened)
        message = asked or RoundOrder(number, order.rates, order.content, taken, opened.draw)
        sent = self._channel.sent(peer, message)
        opened.sent_bytes += (asked.num_bytes if asked else len(order.content)) if sent else 0
        if sent is None:
            self._lost(client)
        elif not sent:
            del self._asked[client]
            opened.out[client] = why = "did not get the round: its queue is full, because it reads no messages"
            self._tell(opened.number, client, why)

    def _count(self, clients: Sequence[int], number: int, opened: OpenRound) -> None:
        """Count orders of round `number` before they travel."""
        peers = {client: (self._there[client].peer, number) for client in clients}
        if fresh := [client for client, place in peers.items() if place not in opened.counted]:
            opened.counted.update(peers.values())
            opened.task.asked(fresh)

    def _collect(self, opened: OpenRound) -> None:
        """Take answers until there are enough, none is to come, or the deadline has passed."""
        until_s = time.monotonic() + self._rules.deadline_s
        while opened.goes_on:
            now_s = time.monotonic()
            for client, asked in list(self._asked.items()):
                if now_s >= until_s or now_s - asked.broke_s > self._rules.return_s:
                    del self._asked[client]
                    self._tell(opened.number, client, "is late" if asked.broke_s == math.inf else "has vanished")
            if not self._asked:
                return
            self._look(opened)
            self._hear(opened, max(0.0, min(_LOOK_S / 4, until_s - now_s)))

    def _look(self, opened: OpenRound) -> None:
        """Follow the roster, and forget clients without a connection; once a second."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        self._roster.follow()
        for client, present in list(self._there.items()):
            if not self._roster.admits(client):
                self._dismiss(client, present.peer, opened)
            elif self._channel.sent(present.peer, ServerBeat()) is None:
                self._lost(client)

    def _lost(self, client: int) -> None:
        self._there.pop(client, None)
        asked = self._asked.get(client)
        if asked is not None and asked.broke_s == math.inf:
            asked.broke_s = time.monotonic()

    def _dismiss(self, client: int, peer: bytes, opened: OpenRound) -> None:
        self._channel.send(peer, ClientRefused("this ticket is revoked", final=True))
        if self._there.pop(client, None) is not None or client in self._asked:
            self._out(client, opened, "its ticket is revoked")

    def _hear(self, opened: OpenRound, wait_s: float) -> None:
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
            asked = self._asked.get(client)
            if asked is not None and message.round == asked.number:
                self._out(client, opened, f"it has an error, {plain_text(message.why[:_MOST_WHY])}")
        elif isinstance(message, SumTell):
            self._take_part(client, present, message, opened)
        else:
            self._take(client, present, message, opened)

    def _greet(self, client: int, peer: bytes, hello: ClientHello, opened: OpenRound) -> None:
        why = hello_problem(hello, self._layout, self._roster.members[client].most_samples)
        if why is None:
            self._there[client] = _Present(peer, hello.samples)
            self._samples[client] = hello.samples
            if client not in opened.drawn:  # refused for its hello, which is right now
                opened.out.pop(client, None)
            self._channel.send(peer, replace(self._welcome, number=client))
            asked = self._asked.get(client)
            if asked is not None:  # a new connection: the order may be lost with the old one
                asked.broke_s = math.inf
                self._send_round(client, opened)
            return
        self._there.pop(client, None)
        self._channel.send(peer, ClientRefused(why, final=True))
        self._out(client, opened, why)

    def _take(self, client: int, present: _Present, message: ClientMovement, opened: OpenRound) -> None:
        asked, summing = self._asked.get(client), opened.sum
        number = opened.number if asked is None else asked.number
        problem = None
        if summing is not None and message.draw == summing.draw and summing.has(client):
            problem = "its keys are there"
            if summing.contradicts(client, message.movement):
                self._out(client, opened, "it has sent other keys before")
        elif message.round != number or message.model != self._orders[number].mark or message.draw != opened.draw:
            problem = f"round {message.round} has ended, and this is round {opened.number}"
            if asked is not None and client not in opened.old:
                opened.old.add(client)
                self._tell(opened.number, client, f"sent a movement of an old round ({message.round})")
        elif asked is None:
            problem = "its part of the round is over" if client in opened.drawn else "it was not drawn for this round"
        elif self._buffering is not None and opened.number - number > self._buffering.oldest:
            problem = f"its movement began in round {number}, and this is round {opened.number}: too old to count"
            opened.too_old += 1
            del self._asked[client]
            self._tell(opened.number, client, f"sent a movement that is too old (from round {number})")
        if problem is not None:
            self._channel.send(present.peer, ClientRefused(problem))
            return
        answer, problem = checked(client, message, opened.task)
        if message.samples != present.samples:
            problem = f"it says that it has {message.samples:,} samples, and it said {present.samples:,} before"
        if problem is None and summing is not None:
            problem = summing.joins(client, message.movement)
        if problem is not None:
            self._channel.send(present.peer, ClientRefused(problem))
            self._out(client, opened, problem)
            return
        del self._asked[client]
        opened.answers[client] = answer
        opened.received_bytes += len(message.movement)

    def _take_part(self, client: int, present: _Present, message: SumTell, opened: OpenRound) -> None:
        verdict = part_verdict(client, message, opened, client in self._asked)
        if verdict.refused is not None:
            self._channel.send(present.peer, ClientRefused(verdict.refused))
        if verdict.over:
            del self._asked[client]
        if verdict.event is not None:
            self._tell(opened.number, client, verdict.event)
        if verdict.out:
            self._out(client, opened, verdict.refused or "")

    def _out(self, client: int, opened: OpenRound, why: str) -> None:
        self._asked.pop(client, None)
        if client not in opened.out:
            opened.out[client] = why
            self._tell(opened.number, client, f"is refused: {why}")

    def _tell(self, number: int, client: int, event: str) -> None:
        say(f"round {number}: {name_of(client)} {event}")

    def _note(self, opened: OpenRound, found: list[int]) -> None:
        note_round(opened, found, len(self._there), len(self._roster.members), self._buffering is not None)

    @property
    def _needed(self) -> int:
        """The clients that must be there before a round."""
        return self._rules.least(self._places) if self._begun else self._rules.there or self._places

    def _too_few(self, found: int, when: str, needed: int) -> None:
        refuse({"real clients", "too few"}, found=found, when=when, needed=needed, places=self._places)
