"""`delta`: a message as the words that differ from the message that its receiver holds.

held      [ w0 | w1 | w2 | w3 | w4 | … ]       version v
message   [ w0 | W1 | w2 | w3 | W4 | … ]
wire      [ 2, v | W1 W4 | 1 2 ]               count, version held; changed words; a byte of gap before each
          [ -1, v | the whole message ]        shorter, or nothing is held
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polytempo.compression.encoding.coded import exact
from polytempo.core.calls.refusals import refuse
from polytempo.core.codec import Codec, Facts, check_codec

HEAD_BYTES = 16
"""The head of a wire: two int64."""
_ALIGNED = 8
_SKIP = 255
"""A byte of the gaps that skips so many words, and stands for none."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def delta(codec: Codec | None = None) -> Delta:
    """Pulls as the changed words of `codec`'s messages (None: of the parameters as they are).

        pt.strategies.async_sgd(pull_codec=pt.compression.delta(pt.compression.bf16()))

    A word is a number of `codec`'s wire: 2 bytes of `bf16()`, 4 of float32. The shard compares the bits of its message
    with the last pulled message's, and sends the changed words and the gaps between them. The worker holds the same
    message afterwards as without `delta`, bit by bit: -0.0, denormals and NaN payloads, too. A worker that holds
    nothing (a new life, another layout of shards) gets the whole, and so does one where more has changed than pays.

    Cost: for n changed words of b bytes, 16 + n (b + 1) bytes, and one more for each 255 unchanged words in a row;
    never more than 16 + the whole message. Where 1 % of bf16 words change, as in steps of fine-tuning, that is 1/66 of
    the bytes; float32 words change wherever a gradient is not 0, so alone `delta()` pays where most gradients are 0.
    Memory: the shard keeps for each worker the weights that it pulled last, and the worker its last message. Two
    encodings a pull, and one pass over both messages.

    It fits pulls from a parameter server, where a worker names the version that it holds; the wires of an exchange
    between ranks have no such base. Errors: `Incompatible` (PT2801) elsewhere; PT2802 for a codec with wires of varying
    length, with memory, or that draws.

    Source: "Understanding and exploiting weight update sparsity for communication-efficient distributed RL" (PULSE),
    arXiv 2602.03839, 2026; L. Hu, R. Zhao et al., "SparseRL-Sync: Lossless weight synchronization with about
    100 times less communication", arXiv 2605.07330, 2026. Deviation: gaps of one byte for places, and no general
    compressor behind.
    """
    if codec is not None:
        check_codec(codec)
        facts = codec.facts
        if not facts.fixed or facts.draws or facts.memory != "none":
            refuse({"delta", "words without a place"}, codec=facts.name)
    return Delta(exact() if codec is None else codec)


@dataclass(frozen=True, repr=False)
class Delta:
    """See `delta`. It encodes messages (`compression.exchange.packing`) of `codec`, uint8, a multiple of 8 bytes."""

    codec: Codec

    def __repr__(self) -> str:
        return self.facts.name

    @cached_property
    def facts(self) -> Facts:
        """The codec's law; its operations at both messages, and comparing them."""
        inner = self.codec.facts
        name = "delta()" if inner.name == "exact()" else f"delta({inner.name})"
        return inner._replace(
            name=name, flops=2 * inner.flops + 4, summable=False, elementwise=False, fixed=False, memory="own"
        )

    def difference(self, message: Tensor, held: Tensor | None, version: int, dtype: torch.dtype) -> Tensor:
        """The wire of `message`, of tensors of `dtype`, for a receiver that holds `held`, of `version`; None: nothing.

        Shapes: (bytes,) all three.
        """
        words, gaps = message[:0], message[:0]
        pays = held is not None
        if held is not None:
            word = self._word(dtype)
            now = message.view(word)
            places = torch.nonzero(now != held.view(word)).view(-1)
            words, gaps = now[places].view(torch.uint8), _gaps(places)
            pays = words.numel() + gaps.numel() < message.numel()
        parts = (words, gaps) if pays else (message,)
        used = HEAD_BYTES + sum(part.numel() for part in parts)
        wire = torch.full((-(-used // _ALIGNED) * _ALIGNED,), _SKIP, dtype=torch.uint8)  # a skip at the end means none
        head = [words.numel() // word.itemsize, version] if pays else [-1, version]
        wire[:HEAD_BYTES].view(torch.int64).copy_(torch.tensor(head))
        wire[HEAD_BYTES:used] = torch.cat(parts)
        return wire

    def message(self, wire: Tensor, held: Tensor | None, version: int, dtype: torch.dtype) -> Tensor:
        """The message, at a receiver that holds `held`, of `version`. Raises ValueError where it is of another base."""
        if wire.dtype is not torch.uint8 or wire.dim() != 1 or wire.numel() < HEAD_BYTES or wire.numel() % _ALIGNED:
            raise ValueError(f"{tuple(wire.shape)} of {wire.dtype} is not a wire of {self.facts.name}")
        if wire.data_ptr() % _ALIGNED or wire.storage_offset() % _ALIGNED or not wire.is_contiguous():
            wire = wire.clone(memory_format=torch.contiguous_format)
        count, base = wire[:HEAD_BYTES].view(torch.int64).tolist()
        rest = wire[HEAD_BYTES:]
        if count < 0:
            return rest
        if held is None or base != version:
            raise ValueError(f"words that changed since version {base} came, and version {version} is held")
        word = self._word(dtype)
        if count * word.itemsize > rest.numel():
            raise ValueError(f"a wire of {rest.numel()} bytes cannot hold {count} words of {word.itemsize}")
        message = held.clone()
        words, gaps = rest[: count * word.itemsize], rest[count * word.itemsize :].to(torch.int64)
        ends = gaps != _SKIP
        places = torch.where(ends, gaps + 1, _SKIP).cumsum(0)[ends] - 1
        now = message.view(word)
        if places.numel() != count or (count and int(places[-1]) >= now.numel()):
            raise ValueError(f"a wire has {count} words and {places.numel()} places among {now.numel()} words")
        now[places] = words.view(word)
        return message

    def _word(self, dtype: torch.dtype) -> torch.dtype:
        return _WORDS[self.codec.wire_dtype(torch.empty((), dtype=dtype)).itemsize]


def _gaps(places: Tensor) -> Tensor:
    """The unchanged words before each place, ascending: as many skips as fit, then the rest, in bytes."""
    gaps = torch.diff(places, prepend=places.new_tensor([-1])) - 1
    ends = (torch.div(gaps, _SKIP, rounding_mode="floor") + 1).cumsum(0)
    found = torch.full((int(ends[-1]) if len(ends) else 0,), _SKIP, dtype=torch.uint8)
    found[ends - 1] = (gaps % _SKIP).to(torch.uint8)
    return found
