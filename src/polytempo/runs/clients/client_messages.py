"""Messages between a server of rounds and its clients. They are msgpack, and tensors in them safetensors; no pickle.

client ──ClientHello, ClientMovement, RoundDeclined, SumTell──▶ server      at each connection it says hello
       ◀─ClientWelcome, RoundOrder, ClientRefused, RoundsOver, SumAsk─
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from safetensors.torch import load, save
from torch import Tensor

HEADROOM_BYTES = 1 << 20
"""Bytes of a message beside its tensors."""
_Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Text = Annotated[str, Meta(max_length=2000)]


class ClientHello(Struct, tag="hello", frozen=True):
    """A client is there, with so many samples. `model`: the digest of its model's names, shapes and dtypes."""

    samples: _Count
    model: _Text


class ClientMovement(Struct, tag="movement", frozen=True):
    """A client's part of round `round`, from the model with the digest `model`."""

    round: _Count
    model: _Text
    samples: _Count
    loss: float
    movement: bytes
    """θ - θₖ or its codes, and the changes of a control variate, by name; for a secure sum the client's public keys."""
    right: float = 0.0
    tested: float = 0.0
    first_loss: float = 0.0
    """The loss of the round's model on its samples, where the strategy weighs by it."""
    draw: _Count = 0
    """The order's."""


class RoundDeclined(Struct, tag="declined", frozen=True):
    """A client cannot take part in round `round`."""

    round: _Count
    why: _Text


class ClientWelcome(Struct, tag="welcome", frozen=True):
    """The server's run, as far as a client's training depends on it."""

    number: int
    strategy: str
    lr: float
    seed: int


class RoundOrder(Struct, tag="round", frozen=True):
    """A round begins: train from `model`."""

    round: int
    rates: list[float]
    model: bytes
    """The model or its codes, and the server's control variate, by name."""
    taken: int = -1
    """The last round that the server has taken a movement of this client in (-1: none)."""
    draw: int = 0
    """The number of a secure sum, never twice the same: a sum that too few clients stay in is made again."""


class SumAsk(Struct, tag="ask", frozen=True):
    """A phase of the secure sum `draw` begins for a client; see `sum_round`."""

    round: int
    draw: int
    phase: int
    content: dict[int, bytes]
    """Keys, shares or names of clients, by number."""
    samples: dict[int, _Count] = {}
    """Samples of each client, by number, in phase 1: a client makes its own weight of them."""
    failed: list[int] = []
    """Earlier sums of the round that cannot be opened: their shares do not fit."""

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and shares."""
        return sum(map(len, self.content.values()))


class SumTell(Struct, tag="tell", frozen=True):
    """A client's part of a phase. `why`: it leaves the sum. `wrong`: clients that have sent it wrong shares. `opened`:
    it leaves because it has given shares for other clients of this round."""

    round: _Count
    draw: _Count
    phase: _Count
    content: dict[int, bytes] = {}
    why: _Text = ""
    wrong: list[int] = []
    opened: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of shares or words."""
        return sum(map(len, self.content.values()))

    @property
    def place(self) -> tuple[int, int, int]:
        """The round, the draw and the phase."""
        return self.round, self.draw, self.phase


class ServerBeat(Struct, tag="beat", frozen=True):
    """The server is there; a client need not answer."""


class ClientRefused(Struct, tag="refused", frozen=True):
    """The server did not take the last message. `final`: nor will it take another one. `hello`: say hello again."""

    why: str
    final: bool = False
    hello: bool = False


class RoundsOver(Struct, tag="over", frozen=True):
    """The run is over, after so many rounds."""

    rounds: int


FromClient = ClientHello | ClientMovement | RoundDeclined | SumTell
ToClient = ClientWelcome | RoundOrder | ServerBeat | ClientRefused | RoundsOver | SumAsk


def ordered(welcome: ClientWelcome, mark: str, rates: Sequence[float]) -> str:
    """A digest of an order to train, but for the client's number. `mark`: of the model."""
    return digest(msgspec.json.encode([welcome.strategy, welcome.lr, welcome.seed, mark, list(rates)]))


def agreement(number: int, draw: int, order: str, keys: Mapping[int, bytes], samples: Mapping[int, int]) -> bytes:
    """A digest of the facts that all clients of a secure sum have to be told alike: `agreed` of their masks.

    `order`: of `ordered`. Where clients get different facts, their masks do not cancel: a server that has others
    train at the rate 0, or weighs them by 0, gets random numbers in place of one client's movement.
    """
    told = [number, draw, order, [[client, keys[client], samples[client]] for client in sorted(keys)]]
    return hashlib.sha256(msgspec.msgpack.encode(told)).digest()


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Named tensors as bytes."""
    return save({name: each.detach().to("cpu").contiguous() for name, each in tensors.items()})


def unpacked(content: bytes) -> dict[str, Tensor]:
    """The tensors in bytes of `packed`. ValueError for anything else."""
    try:
        return load(content)
    except Exception as error:  # SafetensorError; of hostile dtypes and shapes KeyError, TypeError, RuntimeError
        raise ValueError(f"they are not named tensors ({type(error).__name__})") from error


def digest(content: bytes) -> str:
    """A text that tells contents apart."""
    return hashlib.sha256(content).hexdigest()[:32]


def layout(tensors: Mapping[str, Tensor]) -> str:
    """A digest of the names, shapes and dtypes of tensors."""
    facts = [[name, str(each.dtype), list(each.shape)] for name, each in sorted(tensors.items())]
    return digest(msgspec.json.encode(facts))


def problem_of(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """The reason to refuse tensors of a client as its movement; None: they are one.

    Numbers above √max of their dtype are refused, too: their squares would not be finite at the server.
    """
    for name, each in found.items():
        if name not in expected:
            return f"it has a tensor {name[:80]!r}, which the model does not train"
        own = expected[name]
        if each.shape != own.shape or each.dtype != own.dtype:
            return f"{name} is {each.dtype} of shape {tuple(each.shape)[:8]}, not {own.dtype} of {tuple(own.shape)}"
        if not bool(torch.isfinite(each).all()):
            return f"{name} has NaN or infinity"
        if each.numel() and float(each.abs().max()) > torch.finfo(each.dtype).max ** 0.5:
            return f"{name} has numbers above {torch.finfo(each.dtype).max ** 0.5:.3g}"
    return None if found else "it has no tensor"
