"""`Codec`: how one tensor becomes fewer bytes, and comes back. Pure: it has no port, hence no communication.

x ──encode──▶ wire (flat, few bytes) ──▶ another rank ──add_──▶ out += x̂
x + r ──encode_──▶ wire, and r ← (x + r) - x̂ : what was not sent goes with the next tensor

A codec has three parts, each in a place of its own:

facts      what an exchange decides by: `Facts`, plain data
encoding   the reference in plain torch, some ten lines      one class a file in `compression`, see `compression.coded`
kernels    the same bits in fewer passes over memory         `compression.kernels`, for those encodings that have some
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from polytempo.core.transform import Transform

CodecState = Any
"""A tree as `core.state` has it; None where a codec remembers nothing."""


class EncodeContext(NamedTuple):
    """Which encoding of which tensor this is: all that a codec may depend on besides the values.

    Random numbers are a pure function of the codec's seed, of (step, rank, tensor, life), and of the element's
    position, so a context can be repeated, and no rank has to send a generator's state.
    """

    step: int = 1
    """How often the tensor has been encoded, this time included."""
    rank: int = 0
    """Who encodes. All ranks draw alike where a codec says so (`random_k`)."""
    tensor: int = 0
    """A number for the tensor, the same on all ranks and in all runs: a checksum of its name and place."""
    terms: int = 1
    """How many wires are added before the sum is decoded (1: none)."""
    agreed: float | None = None
    """The largest `statistic` among the ranks, for codecs that have one and whose wires are added."""
    life: int = 0
    """How often who encodes had ended and begun to count steps anew (a worker of a parameter server)."""


ALONE = EncodeContext()
"""The context where a tensor is encoded by itself, to look at it."""


class Law(NamedTuple):
    """What a codec promises of x̂ = decode(encode(x)). `bound` takes a tensor like x, and looks at its shape only.

    "lossless": x̂ = x. "unbiased": E x̂ = x and E‖x̂ - x‖² ≤ bound · ‖x‖². "contraction": ‖x - x̂‖² ≤ (1 - bound) · ‖x‖²
    (in expectation where the codec draws). "conserving": with feedback nothing is lost; for a single x nothing, but
    that E‖x̂ - x‖² may come to bound · ‖x‖² where the bound is not 0.
    """

    kind: Literal["lossless", "unbiased", "contraction", "conserving"]
    bound: Callable[[Tensor], float] = lambda like: 0.0


class Facts(NamedTuple):
    """What a codec is, whatever the tensor: plain data that exchanges, strategies and errors read."""

    name: str
    """As a person would write it: `top_k(ratio=0.01)`."""
    law: Law
    """What it promises."""
    flops: float
    """Operations for an element, encoding and decoding together: what a virtual clock charges."""
    summable: bool = False
    """Whether wires may be added before they are decoded."""
    sparse: bool = False
    """Whether wires hold a few entries, so that a sum of several is denser than each."""
    fixed: bool = True
    """Whether every wire has exactly `wire_bytes`; otherwise that is the most, and its values decide."""
    draws: bool = False
    """Whether encoding draws random numbers, which are another sequence in each step and on each rank."""
    elementwise: bool = False
    """Whether a wire has one number for each element, in order, so that many tensors make one wire."""
    passes_nonfinite: bool = False
    """Whether NaN and infinities arrive as such. Otherwise `encode` raises `NotFinite`."""
    memory: Literal["none", "residual", "own"] = "none"
    """What goes from one tensor to the next: nothing; what was not sent (`feedback`); or that and more (`dgc`), which
    cannot be cut into stripes."""
    state_bytes: Callable[[Tensor], int] = lambda like: 0
    """What it remembers of a tensor like this, once it has been encoded."""
    momentum: float = 0.0
    """What the codec has of it already. The optimizer must then have none, or it counts twice."""
    statistic: Callable[[Tensor], float] | None = None
    """What ranks must agree on before they encode wires that are added (the largest counts). None: nothing."""


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
        """What it is."""

    def init(self, like: Tensor) -> CodecState:
        """The state before the first tensor."""

    def wire_dtype(self, like: Tensor, terms: int = 1) -> torch.dtype:
        """The type of a wire's elements."""

    def wire_bytes(self, like: Tensor, terms: int = 1) -> int:
        """Bytes of a wire: exact where `fixed`, else the most."""

    def statistic(self, x: Tensor, state: CodecState) -> float | None:
        """`facts.statistic` of what `encode` would encode; None, where there is none."""

    def encode(
        self, x: Tensor, state: CodecState = None, when: EncodeContext = ALONE, out: Tensor | None = None
    ) -> tuple[Tensor, CodecState]:
        """The wire of x, and the next state. `out`: memory for it (`wire_bytes`, flat); the wire is its beginning."""

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext = ALONE) -> Tensor:
        """x̂, shaped like `like` and of its dtype, in memory of its own."""

    def add_(self, wire: Tensor, out: Tensor, when: EncodeContext = ALONE) -> None:
        """out += decode(wire), touching only what the wire has entries for."""


@runtime_checkable
class PartlyGiven(Protocol):
    """A codec's state of which not all that ranks would add up is to be given, where one is left alone (`dgc`)."""

    def given(self) -> tuple[list[Tensor], CodecState]:
        """What is given, and the state after it."""


def check_codec(given: object) -> None:
    """Raise TypeError for what is no codec, such as `bf16` where `bf16()` is meant. It says how to write it."""
    if isinstance(given, Codec) and not isinstance(given, type):
        return
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
    """Raise ValueError for a codec that remembers something, and for one whose wires vary in length."""
    if codec.facts.memory != "none":
        raise ValueError(
            f"{codec.facts.name} remembers what it did with the tensor before, but what passes between parts of a "
            "model belongs to other samples each time; use a codec without feedback, as bf16() or int8()"
        )
    if not codec.facts.fixed:
        raise ValueError(
            f"{codec.facts.name} wires vary in length, which the receiver must know; use a codec of fixed length, as "
            "bf16() or int8()"
        )
