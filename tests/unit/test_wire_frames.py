"""Frames: every message there and back, tensors in place; other bytes are `Malformed`, and cost nothing."""

from __future__ import annotations

import random
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polytempo.server import message as messages
from polytempo.server.message import Beat, Message, Pulled, Push, Replicate, Request, Rows, Ticket
from polytempo.wire.frames import VERSION, FrameLimits, Malformed, decode, encode
from polytempo.wire.message_parts import Frame
from some_cases import examples

LIMITS = FrameLimits(total_bytes=1 << 20, header_bytes=1 << 16, num_frames=16)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
WHOLE = st.integers(-(2**40), 2**40)


def every_kind(kind: type[Message] = Message) -> list[type[Message]]:
    derived = kind.__subclasses__()
    return [leaf for each in derived for leaf in every_kind(each)] if derived else [kind]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randint(0, 2, shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
    return values.t() if values.dim() == 2 and draw(st.booleans()) else values


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """The possible values of a field of this type."""
    if hint is Tensor:
        return tensors()
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of([values_of(each) for each in get_args(hint)])
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        if rest == [...]:
            return st.lists(values_of(first), max_size=3).map(tuple)
        return st.tuples(values_of(first), *map(values_of, rest))
    if get_origin(hint) is dict:
        keys, values = get_args(hint)
        return st.dictionaries(values_of(keys), values_of(values), max_size=1)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(hint, **{name: values_of(each) for name, each in hints(hint).items()})
    if isinstance(hint, type) and issubclass(hint, tuple):  # a NamedTuple
        return st.builds(hint, **{name: values_of(each) for name, each in get_type_hints(hint).items()})
    plain = {
        int: WHOLE,
        str: st.text(max_size=9),
        bool: st.booleans(),
        bytes: st.binary(max_size=9),
        float: st.floats(allow_nan=False),
        type(None): st.none(),
    }
    return plain[hint]


def hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    found = get_type_hints(kind)
    return {name: found[name] for name in kind.__struct_fields__}


def same(a: Any, b: Any) -> bool:
    """Equal types, values, and bits of tensors."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, msgspec.Struct):
        fields = a.__struct_fields__
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in fields)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def arrived(frames: Sequence[Frame]) -> list[Frame]:
    """The frames as another process would have them."""
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type[Message]) -> None:
    @settings(max_examples=examples(12))
    @given(values_of(kind))
    def there_and_back(message: Message) -> None:
        assert same(message, decode(arrived(encode(message)), LIMITS))

    there_and_back()


def test_a_kind_below_another_one_is_read_also_if_it_is_imported_later() -> None:
    """A decoder has been made by then, and the number of kinds directly below `Message` stays the same."""
    assert same(pushed(torch.ones(2)), decode(arrived(encode(pushed(torch.ones(2)))), LIMITS))

    class Later(Request, frozen=True, eq=False):
        pass

    later = Later(0, 0, 1)
    assert same(later, decode(arrived(encode(later)), LIMITS))


@pytest.mark.parametrize("part_bytes", [3, 7, 32])
def test_what_is_cut_into_parts_comes_back_as_it_was(part_bytes: int) -> None:
    for gradient in (torch.arange(9.0), torch.arange(5, dtype=torch.uint8), torch.tensor([]), torch.ones(8) > 0):
        message = pushed(gradient)
        frames = encode(message, None, part_bytes)
        assert max(map(len, frames)) <= part_bytes
        assert same(message, decode(arrived(frames), FrameLimits(num_frames=128)))


def pushed(gradient: Tensor) -> Push:
    return Push(0, 0, 1, 0, 0, 1, (0.1,), (7,), gradient, (Rows(0, torch.tensor([3]), torch.ones(1, 2)),))


def test_a_tensors_frame_is_its_memory() -> None:
    gradient = torch.zeros(3)
    frames = encode(pushed(gradient))
    gradient[1] = 1
    assert bytes(frames[1]) == gradient.numpy().tobytes()
    buffer = bytearray(frames[1])
    got = decode([frames[0], memoryview(buffer), *frames[2:]], LIMITS)
    assert isinstance(got, Push)
    buffer[:4] = torch.tensor([5.0]).numpy().tobytes()
    assert got.gradient.tolist() == [5, 1, 0]


def test_a_frame_that_lies_crooked_is_read_all_the_same() -> None:
    frames = encode(pushed(torch.tensor([1.0, 2.0])))
    crooked = memoryview(bytearray(b"." + bytes(frames[1])))[1:]
    got = decode([frames[0], crooked, *frames[2:]], LIMITS)
    assert isinstance(got, Push)
    assert got.gradient.tolist() == [1, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        torch.zeros([1] * 9),
        torch.empty(2, device="meta"),
    ],
    ids=["complex", "sparse", "nine dimensions", "meta"],
)
def test_what_cannot_travel_is_refused_when_it_is_sent(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="travel, got"):
        encode(pushed(tensor))


# ---------------------------------------------------------------------------------------------------- malformed


def header(*fields: Any) -> bytes:
    return bytes([VERSION]) + msgspec.msgpack.encode(fields)


def pulled(descriptor: Any) -> bytes:
    return header("Pulled", 0, 0, 0, 1, 1, descriptor)


EIGHT = bytes(8)

WRONG: dict[str, tuple[list[Frame], str]] = {
    "no frames": ([], "1 to 16 frames"),
    "too many frames": ([b"x"] * 17, "1 to 16 frames"),
    "an empty header": ([b""], "1 to 65536 bytes"),
    "a long header": ([bytes(65537)], "1 to 65536 bytes"),
    "too much in all": ([pulled([0, [2], 1]), bytes(1 << 19), bytes(1 << 19)], "up to 1048576 bytes"),
    "another version": ([b"\x01" + pulled([0, [2], 1])[1:], EIGHT], "version 1"),
    "not msgpack": ([bytes([VERSION]) + b"\xc1"], "malformed"),
    "parts that are not there": ([pulled([0, [2], 1, 2]), EIGHT], "2 frames from 1 on"),
    "an empty part": ([pulled([0, [2], 1, 2]), EIGHT, b""], "one of them is empty"),
    "parts of another tensor": ([pulled([0, [2], 1, 2]), EIGHT, EIGHT], "have 16 bytes, their tensor 8"),
    "one part": ([pulled([0, [2], 1, 1]), EIGHT], "the parts of one behind each other"),
    "parts out of order": ([pulled([0, [2], 2, 2]), EIGHT, EIGHT], "the parts of one behind each other"),
    "a cut header, and no number": ([bytes([128 + VERSION])], "a header in 0 frames more"),
    "a cut header, and no rest": ([bytes([128 + VERSION, 1]) + b"\x90"], "a header in 1 frames more"),
    "a cut header that is long": ([bytes([128 + VERSION, 1]), bytes(65535)], "more than 65536 bytes"),
    "cut off": ([pulled([0, [2], 1])[:-1], EIGHT], "truncated"),
    "more than a message": ([pulled([0, [2], 1]) + b"\x00", EIGHT], "trailing"),
    "an unknown message": ([header("Burn", 0)], "Burn"),
    "a missing field": ([header("Beat", 0, 0)], "at least length 4"),
    "a field of another type": ([header("Beat", "x", 0, 0)], "Expected `int`"),
    "nothing but nesting": ([bytes([VERSION]) + b"\x91" * 60000], "array"),
    "nesting where a tensor is": ([pulled([0, [2], 1])[:-4] + b"\x91" * 60000], "recursion"),
    "no descriptor": ([pulled("x")], "no descriptor"),
    "a reference, and nothing shared": ([pulled([0, 0, 0, [2]])], "no memory is shared"),
    "an unknown dtype": ([pulled([8, [2], 1]), EIGHT], "no dtype"),
    "a dtype that is true": ([pulled([True, [2], 1]), EIGHT], "no dtype"),
    "a shape that is a number": ([pulled([0, 2, 1]), EIGHT], "a shape is"),
    "a length that is no whole number": ([pulled([0, [2.0], 1]), EIGHT], "a shape is"),
    "nine dimensions": ([pulled([0, [1] * 9, 1]), bytes(4)], "a shape is"),
    "a negative length": ([pulled([0, [-2], 1]), EIGHT], "negative"),
    "two negative lengths": ([pulled([0, [-2, -1], 1]), EIGHT], "negative"),
    "a huge length": ([pulled([0, [2**62], 1]), EIGHT], "larger than any"),
    "a product beyond 64 bits": ([pulled([0, [2**32, 2**32, 2], 1]), EIGHT], "larger than any"),
    "huge beside zero": ([pulled([0, [0, 2**63], 1]), b""], "larger than any"),
    "a short frame": ([pulled([0, [2], 1]), bytes(7)], "7 bytes, its tensor 8"),
    "a long frame": ([pulled([0, [2], 1]), bytes(9)], "9 bytes, its tensor 8"),
    "no frame": ([pulled([0, [2], 1])], "header's order"),
    "the header as a frame": ([pulled([0, [2], 0]), EIGHT], "header's order"),
    "a frame for two": (
        [header("Pulled", 0, 0, 0, 1, 1, [0, [2], 1], [[0, [0, [2], 1], [0, [2], 1]]]), EIGHT],
        "order",
    ),
    "a frame for none": ([pulled([0, [2], 1]), EIGHT, EIGHT], "3 frames"),
    "a bool that is 2": ([pulled([7, [1], 1]), b"\x02"], "0 or 1"),
    "no unicode": ([bytes([VERSION]) + b"\x94\xa4Beat\x00\x00\xa1\xff"], "Expected `int`"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what: str) -> None:
    frames, reason = WRONG[what]
    with pytest.raises(Malformed, match=f"(?i){reason}"):
        decode(frames, LIMITS)


class Shared:
    """One arena with any requested memory, all ones."""

    def reference(self, tensor: Tensor) -> tuple[int, int]:
        return 0, 0

    def resolve(self, arena: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(("code", "dtype"), list(enumerate(DTYPES)))
def test_all_but_bools_may_be_referred_to(code: int, dtype: torch.dtype) -> None:
    """Shared memory can become another number than 0 or 1 at any time."""
    message = Pulled(0, 0, 0, 1, 1, torch.ones(2, dtype=dtype))
    frames = encode(message, Shared())
    assert len(frames) == (2 if dtype is torch.bool else 1)
    assert same(decode(arrived(frames), LIMITS, Shared()), message)
    by_reference = pulled([0, 0, code, [2]])
    if dtype is torch.bool:
        with pytest.raises(Malformed, match="bools travel as bytes"):
            decode([by_reference], LIMITS, Shared())
    else:
        assert same(decode([by_reference], LIMITS, Shared()), message)


def refused(frames: Sequence[Frame]) -> bool:
    """True if they are `Malformed`. A message that comes of them must be whole; any other error fails the test."""
    try:
        message = decode(frames, LIMITS)
    except Malformed:
        return True
    assert message.num_bytes <= LIMITS.total_bytes
    return False


@given(st.lists(st.binary(max_size=40), max_size=4), st.booleans())
def test_any_bytes_at_all(frames: list[bytes], with_version: bool) -> None:
    assert refused([bytes([VERSION]) + frames[0], *frames[1:]] if with_version and frames else frames)


def test_a_hundred_thousand_malformed_messages_leave_nothing_behind() -> None:
    seed = 4
    print(f"seed {seed}")
    chance = random.Random(seed)
    valid = [
        arrived(encode(message))
        for message in [
            Beat(1, 2, 3),
            pushed(torch.arange(5.0)),
            Replicate(0, 1, 2, pushed(torch.zeros(2, 2, dtype=torch.bool))),
            Pulled(0, 1, 2, 3, 4, torch.zeros(0)),
            messages.Deal(0, 0, 1, "train", (Ticket(1, 2, 3),)),
            messages.Statistics(0, 0, 0, 1, 1, 1, {1: 2}, 0, 0, 0, ((1, 2),)),
        ]
    ]
    num_refused, before = 0, 0
    for i in range(102_000):
        if i == 10_000:
            before = resident_bytes()
        num_refused += refused(garbled(chance, chance.choice(valid)))
    assert num_refused >= 100_000
    assert resident_bytes() - before < 8 << 20


def garbled(chance: random.Random, valid: list[Frame]) -> list[Frame]:
    """Random bytes, or a valid message with one thing done to it."""
    head = bytes(valid[0])
    at = chance.randrange(1, len(head))
    match chance.randrange(8):
        case 0:
            return [bytes([VERSION]) + chance.randbytes(chance.randrange(60)), *valid[1:]]
        case 1:
            return [chance.randbytes(chance.randrange(20)) for _ in range(chance.randrange(4))]
        case 2:
            return [head[:at], *valid[1:]]
        case 3:
            return [head[:at] + chance.randbytes(5) + head[at:], *valid[1:]]
        case 4:
            return [head, *valid[1:], b"one more"]
        case 5:
            return [head[:at] + b"\xd9" + head[at + 1 :] + b"\xc0", *valid[1:]]
        case 6:
            return [*valid[1:], head + b"!"]
        case _:
            return [bytes([chance.randrange(2, 256)]) + head[1:], *valid[1:]]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_single_flipped_bit_is_refused_or_makes_a_whole_message() -> None:
    for frames in (arrived(encode(pushed(torch.arange(5.0)))), arrived(encode(messages.View(1, ((1, 2),), ((0, 0),))))):
        head = bytearray(frames[0])
        outcomes = set()
        for bit in range(8 * len(head)):
            head[bit // 8] ^= 1 << bit % 8
            outcomes.add(refused([bytes(head), *frames[1:]]))
            head[bit // 8] ^= 1 << bit % 8
        assert outcomes == {True, False}
