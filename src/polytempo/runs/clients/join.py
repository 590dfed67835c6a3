"""`join`: a client of a server of rounds. It dials out, trains on its own data, and sends movements."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polytempo.core import EncodeContext
from polytempo.core.calls.refusals import refuse
from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import InRounds
from polytempo.federated.clients import Client
from polytempo.federated.privacy import clip_
from polytempo.federated.rounds import CONTROL
from polytempo.federated.secure_sum import Primitives, primitives
from polytempo.runs.clients.client_memory import ClientMemory, LostClientState
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
    SumAsk,
    SumTell,
    ToClient,
    digest,
    layout,
    ordered,
    packed,
    unpacked,
)
from polytempo.runs.clients.opened_sums import OpenedSums
from polytempo.runs.clients.sum_part import SumPart
from polytempo.runs.clients.tickets import ClientTicket, url_of
from polytempo.runs.frame.arguments import checked_job
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import data_of, model_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.federated import noise_record
from polytempo.training.federated.client_movements import from_wire, to_wire
from polytempo.training.federated.local_passes import LocalPasses
from polytempo.training.federated.remote_rounds import NO_ROUND
from polytempo.training.job.evaluate import Evaluation, tensors_of
from polytempo.training.model.randomness import caller_state_kept, kept_random_states
from polytempo.wire.channel import ChannelClient

PATIENCE_S = 600.0
_TICK_S = 0.2
_FAREWELL_S = 2.0
_MOST_MODELS = 8
"""The size of a server's message: the model's code and a control variate."""


class ClientPart(NamedTuple):
    """A client's part of a run."""

    number: int
    """The client's."""
    rounds: int
    """Rounds of the run."""
    trained: int
    """Rounds that this process has trained in."""


@caller_state_kept()
def join(
    job: Job | str,
    ticket: str | Path | ClientTicket,
    data: Dataset[Any] | Data | str | Path | None = None,
    *,
    server: str | None = None,
    patience_s: float = PATIENCE_S,
    on_round: Callable[[int], None] | None = None,
    state: str | Path | None = None,
) -> ClientPart:
    """Be a client of a server until its run is over; see `polytempo.federated.join`."""
    job = checked_job(job)
    ticket = ticket if isinstance(ticket, ClientTicket) else ClientTicket.read(ticket)
    own = data if isinstance(data, Data) else _data(job, data)
    import_module("torch._dynamo")  # optimizers need it: seconds here instead of in the first round
    with kept_random_states():
        tensors = tensors_of(model_of(job))
    most_bytes = _MOST_MODELS * sum(each.numel() * each.element_size() for each in tensors.values()) + HEADROOM_BYTES
    address = ticket.server if server is None else url_of(server)
    channel: ChannelClient[ToClient, FromClient] = ChannelClient(
        address,
        ticket.keys,
        ToClient,  # type: ignore[arg-type] # a union of types
        most_bytes=most_bytes,
    )
    folder = None if state is None else Path(state) / digest(ticket.keys.client_public)
    loop = None
    try:
        loop = _ClientLoop(job, ticket.number, own, tensors, channel, patience_s, on_round, folder)
        return loop.stay()
    finally:
        if loop is not None:
            loop.close()
        channel.close(_FAREWELL_S)


def _data(job: Job, given: Dataset[Any] | str | Path | None) -> Data:
    if given is None or isinstance(given, str | Path):
        return data_of(job, None if given is None else Path(given))
    return Data(given)


class _ClientLoop:
    def __init__(
        self,
        job: Job,
        number: int,
        data: Data,
        tensors: dict[str, Tensor],
        channel: ChannelClient[ToClient, FromClient],
        patience_s: float,
        on_round: Callable[[int], None] | None,
        folder: Path | None,
    ) -> None:
        if not hasattr(data.train, "__len__"):
            raise ValueError("a client says how many samples it has; give a data set with a length, not a stream")
        self._job, self._number, self._data, self._channel = job, number, data, channel
        self._samples, self._layout = len(data.train), layout(tensors)
        self._patience_s, self._on_round, self._folder = patience_s, on_round, folder
        self._memory: ClientMemory | None = None
        self._passes: LocalPasses | None = None
        self._evaluation: Evaluation | None = None
        self._welcome: ClientWelcome | None = None
        self._answer: ClientMovement | None = None
        self._rounds: InRounds | None = None
        self._from, self._rates = NO_ROUND, list[float]()
        self._trained = 0
        self._crypto: Primitives | None = None
        self._moved: list[Tensor] = []
        """The movement of `_answer`, for a secure sum."""
        self._part: SumPart | None = None
        self._opened: OpenedSums | None = None

    def stay(self) -> ClientPart:
        """Answer the server's rounds until the run is over."""
        connections = 0
        while True:
            parted_s = self._channel.parted_s
            if self._channel.connections != connections:
                connections = self._channel.connections
                self._hello()
            if parted_s > self._patience_s:
                raise PolytempoError(
                    f"the server at {self._channel.address} was not there for {self._patience_s:g} s, or does not know "
                    "this ticket; ask its owner, or give a longer patience_s"
                )
            message = self._channel.take(_TICK_S)
            if isinstance(message, RoundsOver):
                return ClientPart(self._number, message.rounds, self._trained)
            if isinstance(message, ClientWelcome):
                self._meet(message)
            elif isinstance(message, RoundOrder):
                self._train(message)
            elif isinstance(message, SumAsk):
                self._add(message)
            elif isinstance(message, ClientRefused):
                print(f"polytempo: the server refused: {message.why}", file=sys.stderr)
                if message.final:
                    raise PolytempoError(f"the server at {self._channel.address} refused this client: {message.why}")
                if message.hello:
                    self._hello()

    def close(self) -> None:
        """Let another process have the files of this client."""
        for each in (self._memory, self._opened):
            if each is not None:
                each.close()

    def _hello(self) -> None:
        self._channel.send(ClientHello(self._samples, self._layout))

    def _meet(self, welcome: ClientWelcome) -> None:
        if welcome == self._welcome:
            return
        self._answer, self._part, self._moved = None, None, []  # of another strategy, rate or seed
        strategy = parse_strategy(welcome.strategy)
        if strategy.rounds is None:
            refuse({"real clients", "other rounds"}, strategy=strategy, reason="it has no rounds")
        options = RunOptions(lr=welcome.lr, seed=welcome.seed)
        spec = RunSpec.of(replace(self._job, schedule=None), strategy, 1, options)
        assert strategy.rounds is not None
        self._rounds = strategy.rounds
        known = self._welcome
        if known is None or (welcome.strategy, welcome.seed) != (known.strategy, known.seed):  # else the run goes on
            if self._memory is not None:
                self._memory.close()
            run = digest(f"{welcome.strategy} {welcome.seed} {self._layout}".encode())
            self._memory = ClientMemory(None if self._folder is None else self._folder / run)
        self._crypto = None if strategy.rounds.secure is None else primitives()
        if self._crypto is not None and self._opened is None:
            self._opened = OpenedSums(self._folder)
        self._passes = LocalPasses(spec, strategy.rounds.local, torch.device("cpu"))
        self._welcome, self._number = welcome, welcome.number
        if self._data.test is not None and self._job.correct is not None:
            self._evaluation = Evaluation(self._job, self._passes.model, self._data)

    def _train(self, order: RoundOrder) -> None:
        if self._passes is None:
            return
        mark = digest(order.model)
        asked, last = (order.round, mark, order.taken, order.rates), self._answer
        if last is None or (last.round, last.model, self._from, self._rates) != asked:
            try:
                self._answer = self._trained_from(order, mark, self._passes)
            except Exception as error:
                self._channel.send(RoundDeclined(order.round, type(error).__name__))  # its text may have data
                raise
            self._trained, self._from, self._rates = self._trained + 1, order.taken, order.rates
            self._part = None
        assert self._answer is not None
        answer = self._answer
        if self._crypto is not None:
            if self._part is None or self._part.draw != order.draw:
                assert self._rounds is not None
                assert self._welcome is not None
                where = self._number, self._samples, order.draw, f"{order.round} {mark}"
                told = ordered(self._welcome, mark, order.rates)
                self._part = SumPart(*where, self._moved, self._rounds, self._crypto, told)
            answer = msgspec.structs.replace(answer, movement=self._part.keys, draw=order.draw)
        if not self._channel.parted_s:  # else the server asks again, after the hello that comes first
            self._channel.send(answer)
        if self._on_round is not None:
            self._on_round(order.round)

    def _add(self, asked: SumAsk) -> None:
        """Answer a phase of a secure sum."""
        if self._part is None or self._opened is None or self._part.draw != asked.draw:
            told = SumTell(asked.round, asked.draw, asked.phase, why="another process had its part of this sum")
        else:
            told = self._part.tells(asked, self._opened)
        if not self._channel.parted_s:
            self._channel.send(told)

    def _trained_from(self, order: RoundOrder, mark: str, passes: LocalPasses) -> ClientMovement:
        assert self._rounds is not None
        found, codec, when = unpacked(order.model), self._rounds.pull_codec, EncodeContext(step=order.round + 1)
        controls = {name: found[name] for each in passes.names if (name := f"{CONTROL}{each}") in found}
        if codec is not None:
            coded = zip(passes.names, passes.own, strict=True)
            found |= {name: from_wire(found[name], own.detach(), codec, when, name) for name, own in coded}
        received, state = [found[name] for name in passes.names], self._state(order, passes)
        client = Client(self._number, self._data.train, torch.arange(self._samples), self._data.collate)
        right, tested = 0.0, 0.0
        if self._evaluation is not None:
            scored = found | (state if passes.kept else {})
            right, tested = self._evaluation.sums(scored, 0, 1)[2:4].tolist()
        passes.noise_seed = noise_record.drawn_secret()
        turn = passes.turn(client, order.round, received, found, controls, state, order.rates)
        if turn.state:
            assert self._memory is not None
            self._memory.put(order.round, turn.state, order.taken)
        if self._rounds.privacy is not None:
            clip_(turn.movement, self._rounds.privacy.clip)
        codec, when = self._rounds.codec, when._replace(rank=self._number)
        moved = {passes.names[i]: turn.movement[i] for i in turn.used}
        if codec is not None:
            moved = {name: to_wire(each, codec, when, name) for name, each in moved.items()}
        self._moved = turn.movement if self._crypto is not None else []
        loss = float(torch.stack(turn.losses).mean())
        sent = packed(moved | turn.changes) if self._crypto is None else b""
        return ClientMovement(order.round, mark, self._samples, loss, sent, right, tested, turn.first_loss)

    def _state(self, order: RoundOrder, passes: LocalPasses) -> dict[str, Tensor]:
        """The tensors that this client begins with. LostClientState where the server's variate has a lost one's."""
        assert self._rounds is not None
        if not passes.kept and not self._rounds.local.controls:
            return {}
        assert self._memory is not None
        state = self._memory.after(order.taken)
        if state is not None:
            return state
        why = f"client-{self._number} has lost its tensors of round {order.taken}"
        if self._rounds.local.controls:
            raise LostClientState(
                f"{why}: the server's control variate has its part, so it cannot begin again; let its `state` be a "
                "folder, and let the server have a checkpoint in each few rounds"
            )
        print(f"polytempo: {why}; it begins with the server's", file=sys.stderr)
        return {}
