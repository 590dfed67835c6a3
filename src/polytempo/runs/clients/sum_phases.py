"""A round's secure sum as its server performs it: phase after phase, and again until one sum can be opened.

sum_in_phases   makes a `SumRound` and asks clients by the server's `SumMoves`
part_verdict    decides about a client's message; the server acts on it
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from polytempo.federated.real_clients import RoundRules
from polytempo.federated.secure_sum import Primitives, Words
from polytempo.runs.clients.client_messages import SumTell
from polytempo.runs.clients.open_round import OpenRound, RoundLost
from polytempo.runs.clients.sum_round import SumRound
from polytempo.training.federated.remote_rounds import SumTask


class SumMoves(NamedTuple):
    """A server's moves in a round. `train`, `draw` and `part` return when answers are there, or late."""

    there: Callable[[], Collection[int]]
    """Connected clients."""
    train: Callable[[list[int]], None]
    """Ask clients for an answer to the round."""
    draw: Callable[[bool], None]
    """Draw clients until there are enough answers. True: the round begins."""
    part: Callable[[Collection[int]], None]
    """Ask clients for their part of the sum's phase."""
    out: Callable[[int, str], None]
    """Leave a client out of the round, for a reason."""


def sum_in_phases(
    opened: OpenRound, task: SumTask, crypto: Primitives, rules: RoundRules, moves: SumMoves
) -> tuple[Words, float]:
    """Add movements under masks, and again where too few clients stay: the sum, and the scale of its weights.

    `RoundLost` where no sum can be opened.
    """
    for attempt in range(rules.draws):
        silent, there = set[int]() if opened.sum is None else opened.sum.silent, moves.there()
        again = [each for each in opened.found if each in there and each not in {*opened.out, *silent}]
        opened.answers.clear()
        opened.sum = summing = SumRound(opened.number, task, crypto, opened.failed, opened.order)
        moves.train(again)
        if len(opened.answers) < opened.fewest(rules.least(opened.most)):
            moves.draw(not attempt)
        samples = {client: opened.answers[client].samples for client in opened.found}
        while summing.begins(samples):
            moves.part(summing.there - opened.out.keys())
        summed, wrong = summing.ends()
        opened.opened_before |= not summing.opened <= opened.asked_to_open
        if summing.is_last:
            opened.asked_to_open |= summing.there
        for client, why in wrong.items():
            moves.out(client, why)
        if summed is not None:
            return summed.words, opened.summed(summed.clients)
    when = f"stayed in the last of {rules.draws} secure sums of round {opened.number}"
    raise RoundLost(summing.told, when, summing.least)


class PartVerdict(NamedTuple):
    """The server's verdict about a client's part of a phase."""

    refused: str | None = None
    """The answer to a part that does not count."""
    event: str | None = None
    """The client's event for the run's stream."""
    over: bool = False
    """The client is not waited for in this phase."""
    out: bool = False
    """True: the client is left out of the round, because of `refused`."""


def part_verdict(client: int, message: SumTell, opened: OpenRound, asked: bool) -> PartVerdict:
    """Take a client's part of a phase, or its reason to leave the sum. `asked`: it is waited for."""
    summing = opened.sum
    if summing is None or not asked or message.place != summing.place:
        event = None
        if asked and client not in opened.old:
            opened.old.add(client)
            event = f"sent a part of another sum (of round {message.round})"
        return PartVerdict("this phase of the sum is over", event)
    problem = summing.takes(client, message)
    if problem is None:
        opened.received_bytes += message.num_bytes
        return PartVerdict(over=True)
    if summing.accuses(message):  # it can take part in the next sum
        return PartVerdict(problem, problem.removeprefix("it "), over=True)
    return PartVerdict(problem, out=True)
