"""The native kernels, called on memory that the tests lay out: any address, one buffer for several arguments."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from native.twin import TwinHyper
from polytempo.compression.encoding.coded import Coded
from polytempo.core import Codec
from polytempo.native.library import load, why_not

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
OPS = ("sum", "average", "min", "max", "product", "band", "bor", "bxor")
ORDERS = ("linear", "tree")
RULES = ("sgd", "adam", "adamw", "adagrad")

SLACK_BYTES = 64
UNTOUCHED = 0xA5


class HyperStructure(ctypes.Structure):
    """`pt_hyper` of native/kernels_abi.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "weight_decay", "momentum", "dampening", "beta1", "beta2")),
        *((name, ctypes.c_double) for name in ("eps", "lr_decay")),
        ("step", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rule", "nesterov", "maximize", "first")),
    )


def by_torch(codec: Codec) -> Codec:
    """The same codec without kernels."""
    assert isinstance(codec, Coded)
    assert codec.kernels is not None
    return dataclasses.replace(codec, kernels=None)


def library() -> ctypes.CDLL:
    loaded = load()
    assert loaded is not None, why_not()
    return loaded


def choose(isa: str) -> bool:
    """Use this instruction set; False where the machine lacks it."""
    return bool(library().pt_choose_isa(isa.encode()) == 0)


def instruction_sets() -> list[str]:
    """The instruction sets of this machine, the best last; the one in use stays the same."""
    before = library().pt_isa().decode()
    found = [isa for isa in ("baseline", "v3", "v4") if choose(isa)]
    choose(before)
    return found


class Buffer:
    """A tensor's elements at `offset_bytes` from an aligned address, between bytes that no kernel may touch."""

    def __init__(self, values: Tensor, offset_bytes: int) -> None:
        self.like, self.begin = values, SLACK_BYTES + offset_bytes
        self.end = self.begin + values.numel() * values.element_size()
        self.bytes = torch.full((self.end + SLACK_BYTES,), UNTOUCHED, dtype=torch.uint8)
        self.bytes[self.begin : self.end] = values.contiguous().view(torch.uint8)

    @property
    def pointer(self) -> int:
        return self.bytes.data_ptr() + self.begin

    def values(self) -> Tensor:
        """The present values, after a look at the bytes around them."""
        around = torch.cat([self.bytes[: self.begin], self.bytes[self.end :]])
        assert bool((around == UNTOUCHED).all()), "a kernel wrote beside its output"
        return self.bytes[self.begin : self.end].clone().view(self.like.dtype)


def pointers(addresses: Sequence[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def reduce_(outs: Sequence[Buffer], sources: Sequence[Buffer], op: str, order: str = "linear") -> int:
    """The status of pt_reduce, which writes `outs`."""
    like = sources[0].like
    status: int = library().pt_reduce(
        DTYPES.index(like.dtype),
        OPS.index(op),
        ORDERS.index(order),
        pointers([out.pointer for out in outs]),
        len(outs),
        pointers([source.pointer for source in sources]),
        len(sources),
        like.numel(),
    )
    return status


def update_(
    hyper: TwinHyper,
    gradients: Sequence[Buffer | None],
    weights: Tensor,
    state: Sequence[Buffer | None],
    outs: Sequence[Buffer | None],
) -> int:
    """The status of pt_update, which reads p, m, v of `state` and writes to `outs`."""
    fields = dataclasses.asdict(hyper) | {"rule": RULES.index(hyper.rule)}
    structure = HyperStructure(**fields)
    assert state[0] is not None, "there is always a p"
    status: int = library().pt_update(
        DTYPES.index(weights.dtype),
        ctypes.addressof(structure),
        pointers([address(gradient) for gradient in gradients]),
        weights.data_ptr(),
        len(gradients),
        *(address(buffer) for buffer in (*state, *outs)),
        state[0].like.numel(),
    )
    return status


def address(buffer: Buffer | None) -> int | None:
    return None if buffer is None else buffer.pointer


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal to the bit, and NaN where the other is NaN."""
    assert found.dtype == expected.dtype
    if found.dtype.is_floating_point:
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = (torch.where(x.isnan(), 0, x) for x in (found, expected))
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Eight decades, both signs, zeros of both signs, ties of int8, and a row of zeros where there are rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 8 - 8)
    x.view(-1)[::11] = 0.0
    x.view(-1)[5::13] = -0.0
    x.view(-1)[3::17] = 0.5 / 127
    if len(shape) > 1:
        x[-1] = 0
    return x
