"""`Codec`: how one tensor becomes fewer bytes, and comes back. Pure: it has no port, hence no communication.

x ──encode──▶ wire (flat, few bytes) ──▶ another rank ──add_──▶ out += x̂
x + r ──encode_──▶ wire, and r ← (x + r) - x̂ : the rest goes with the next tensor

A codec has three parts:

facts      the basis of an exchange's decisions: `Facts`, plain data
encoding   the reference in plain torch, some ten lines      one class a file in `compression`, see `compression.coded`
kernels    the same bits in fewer passes over memory         native, at the end of some encodings' files
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from polytempo.core.calls.refusals import refuse
from polytempo.core.transform import Transform

CodecState = Any
"""A tree as `core.state` has it; None where a codec remembers nothing."""


class EncodeContext(NamedTuple):
    """The number of an encoding of a tensor: a codec depends on this and the values alone.

    Random numbers are a pure function of the codec's seed, of (step, rank, tensor, life), and of the element's
    position, so a context can be repeated, and no rank has to send a generator's state.
    """

    step: int = 1
    """Encodings of the tensor so far, this one included."""
    rank: int = 0
    """The rank that encodes. All ranks draw alike where a codec says so (`random_k`)."""
    tensor: int = 0
    """A number for the tensor, the same on all ranks and in all runs: a checksum of its name and place."""
    terms: int = 1
    """Wires that are added before the sum is decoded (1: none)."""
    agreed: float | None = None
    """The largest `statistic` among the ranks, for codecs with a statistic and wires that are added."""
    life: int = 0
    """Restarts of the encoding process (a worker of a parameter server); each counts steps from 1 again."""


ALONE = EncodeContext()
"""The context of a single encoding outside of training."""


class Law(NamedTuple):
    """A codec's promise about x̂ = decode(encode(x)). `bound` takes a tensor like x, and looks at its shape only.

    "lossless": x̂ = x. "unbiased": E x̂ = x and E‖x̂ - x‖² ≤ bound · ‖x‖². "contraction": ‖x - x̂‖² ≤ (1 - bound) · ‖x‖²
    (in expectation where the codec draws). "conserving": with feedback nothing is lost; for a single x nothing, but
    that E‖x̂ - x‖² may come to bound · ‖x‖² where the bound is not 0.
    """

    kind: Literal["lossless", "unbiased", "contraction", "conserving"]
    bound: Callable[[Tensor], float] = lambda like: 0.0


class Facts(NamedTuple):
    """Properties of a codec for all tensors: plain data that exchanges, strategies and errors read."""

    name: str
    """The call that makes it: `top_k(ratio=0.01)`."""
    law: Law
    flops: float
    """Operations for an element, encoding and decoding together, which a virtual clock charges."""
    summable: bool = False
    """True if wires may be added before they are decoded."""
    sparse: bool = False
    """True if wires hold a few entries, so that a sum of several is denser than each."""
    fixed: bool = True
    """True if every wire has exactly `wire_bytes`; otherwise that is the most, and the values decide."""
    draws: bool = False
    """True if encoding draws random numbers: another sequence in each step and on each rank."""
    elementwise: bool = False
    """True if a wire has one number for each element, in order, so that many tensors make one wire."""
    passes_nonfinite: bool = False
    """True if NaN and infinities arrive as such. Otherwise `encode` raises `NotFinite`."""
    memory: Literal["none", "residual", "own"] = "none"
    """State from one tensor to the next: nothing; the unsent rest (`feedback`); or more (`dgc`), which cannot be cut
    into stripes."""
    state_bytes: Callable[[Tensor], int] = lambda like: 0
    """Bytes of its state once a tensor like this has been encoded."""
    momentum: float = 0.0
    """The codec's own momentum. The optimizer must then have none, or it counts twice."""
    statistic: Callable[[Tensor], float] | None = None
    """The number that ranks agree on before they encode wires that are added (the largest counts). None: nothing."""


@runtime_checkable
class Codec(Protocol):
    """One tensor of any shape to a flat wire and back.

    A wire is a flat tensor of `wire_dtype(x)`. Wires of uint8 have a multiple of 4 bytes, so that they can be laid one
    behind the other. `summable` ones are numbers: the sum of `when.terms` wires, element by element, decodes to the
    sum of the tensors. Tensors are float32, float64, float16 or bfloat16, on any device.

    To add a codec write an `Encoding`, four members in plain torch, and put it into `Coded` (`compression.coded`).
    """

    @property
    def facts(self) -> Facts:
        """The codec's properties."""

    def init(self, like: Tensor) -> CodecState:
        """The state before the first tensor."""

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """The type of a wire's elements."""

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """Bytes of a wire: exact where `fixed`, else the most."""

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """`facts.statistic` of the tensor that `encode` would encode; None without a statistic."""

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """The wire of x, and the next state. `out`: memory for it (`wire_bytes`, flat); the wire is its beginning."""

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """x̂, shaped like `like` and of its dtype, in memory of its own."""

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """Add decode(wire) to `out`, touching only the elements with entries."""


@runtime_checkable
class PartlyGiven(Protocol):
    """A codec's state that a lone rank gives only a part of (`dgc`)."""

    def given(self) -> tuple[list[Tensor], CodecState]:
        """The tensors that are given, and the state afterwards."""


@runtime_checkable
class DeltaCodec(Protocol):
    """Messages of `codec` as their difference from the message that the receiver holds: `compression.delta`."""

    @property
    def codec(self) -> Codec:
        """The codec of the messages."""

    @property
    def facts(self) -> Facts:
        """Name, law and cost."""

    def difference(self, message: Tensor, held: Tensor | None, version: int, dtype: torch.dtype) -> Tensor:
        """The wire of `message`, of tensors of `dtype`, for a receiver that holds `held`, of `version`."""

    def message(self, wire: Tensor, held: Tensor | None, version: int, dtype: torch.dtype) -> Tensor:
        """The message. Raises ValueError where the wire is malformed, or of another base."""


PullCodec = Codec | DeltaCodec
"""The encoding of a parameter server's answers to pulls."""


def check_codec(given: object) -> None:
    """Raise TypeError for anything but a codec, such as `bf16` where `bf16()` is meant. It says how to write it.

    `Incompatible` for `delta`, which only a pull from a server has a base for.
    """
    if isinstance(given, Codec) and not isinstance(given, type):
        return
    if isinstance(given, DeltaCodec) and not isinstance(given, type):
        refuse({"delta", "no pull"}, codec=given.facts.name)
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    if isinstance(given, Transform) or name.partition("(")[0] == "low_rank":
        raise TypeError(
            "a codec is needed, got a transform; PowerSGD (low_rank) is an aggregation, not a codec: use "
            "strategies.power_sgd(), or aggregation.low_rank() as a transform"
        )
    what = f"<function {name}>" if inspect.isfunction(given) else repr(given)
    written = f"; write {name}()" if name.isidentifier() else ""
    raise TypeError(f"a codec is the answer of one of pt.compression, got {what}{written}")


def check_forgetful(codec: Codec) -> None:
    """Raise ValueError for a codec with memory, and for a codec with wires of varying length."""
    if codec.facts.memory != "none":
        raise ValueError(
            f"{codec.facts.name} remembers the tensor before, but tensors between parts of a model belong to other "
            "samples each time; use a codec without feedback, as bf16() or int8()"
        )
    if not codec.facts.fixed:
        raise ValueError(
            f"{codec.facts.name} wires vary in length, which the receiver must know; use a codec of fixed length, as "
            "bf16() or int8()"
        )
