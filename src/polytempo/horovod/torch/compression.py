"""`Compression`: the form of tensors on their way. Write one of your own as a subclass of `Compressor`.

casts    compress ─▶ sum of casts ─▶ decompress               `none`, `fp16`, `bf16`, and your own
codecs   an exchange by `polytempo.compression`, as `pt.attach` makes it: wires that cannot be added are gathered, or
         added stripe by stripe; unsent parts go with the next gradient
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polytempo import compression
from polytempo.compression import feedback
from polytempo.core import Codec
from polytempo.horovod.runtime.groups import CodecExchange


class Compressor:
    """Two static methods. The answers of `compress` are summed over the ranks, then handed to `decompress`."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that travels, and further facts for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel as float16, and are summed so. Values beyond 65,504 become infinite."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor in float16, and its former dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """The tensor in its former dtype."""
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Floating-point tensors travel as bfloat16, and are summed so: the range of float32, and 8 significant bits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor in bfloat16, and its former dtype."""
        return (tensor.bfloat16() if tensor.is_floating_point() else tensor), tensor.dtype


class CodecCompression:
    """A codec of `polytempo.compression` as it is, or called with arguments: `Compression.top_k(0.05)`.

    `DistributedOptimizer` keeps for each gradient the part that the codec left out, and adds it to the next one, for
    codecs that are biased (`compression.feedback`); codecs that are right on average (`qsgd`, `natural`, `terngrad`) go
    without. `allreduce` forgets it: there the answer is the sum of the encoded tensors.
    """

    def __init__(self, make: Callable[..., Codec], arguments: Mapping[str, Any] | None = None) -> None:
        self._make, self._arguments = make, arguments

    def __call__(self, *args: Any, **kwargs: Any) -> CodecCompression:
        """The same codec with these arguments, by position or by name, as in `polytempo.compression`."""
        bound = inspect.signature(self._make).bind(*args, **kwargs).arguments
        return CodecCompression(self._make, {name: _plain(value) for name, value in bound.items()})

    def codec(self) -> Codec:
        """The codec. Errors: the errors of its function, such as TypeError for a missing argument."""
        return self._make(**(self._arguments or {}))

    def single(self) -> CodecExchange:
        """An exchange of one tensor that has no next one. ValueError for codecs that need a later exchange."""
        codec = self.codec()
        if codec.facts.memory != "none":
            raise ValueError(
                f"{codec.facts.name} sends the rest of a tensor later, and an all-reduce has no later; use it in "
                "DistributedOptimizer, or a codec without feedback(…)"
            )
        return CodecExchange(codec)

    def lasting(self) -> CodecExchange:
        """An exchange of gradients of one name, step by step, that loses nothing."""
        codec = self.codec()
        law = codec.facts.law
        leaves_out = law.kind == "contraction" or (law.kind == "conserving" and law.bound(_LARGE) < 1)
        return CodecExchange(feedback(codec) if codec.facts.memory == "none" and leaves_out else codec)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in (self._arguments or {}).items())
        return f"Compression.{self._make.__name__}({given})"


_LARGE = torch.empty(1024, 1024, device="meta")
"""A large tensor for questions about a codec."""

AnyCompression = type[Compressor] | CodecCompression
"""The types of `compression`."""


def _plain(value: Any) -> Any:
    return value.codec() if isinstance(value, CodecCompression) else value


class Compression:
    """The compressors that there are: Horovod's two, bf16, and the codecs of `polytempo.compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    dgc = CodecCompression(compression.dgc)
    dynamic8 = CodecCompression(compression.dynamic8)
    exact = CodecCompression(compression.exact)
    feedback = CodecCompression(compression.feedback)
    int8 = CodecCompression(compression.int8)
    natural = CodecCompression(compression.natural)
    one_bit = CodecCompression(compression.one_bit)
    pca = CodecCompression(compression.pca)
    prune = CodecCompression(compression.prune)
    qsgd = CodecCompression(compression.qsgd)
    random_k = CodecCompression(compression.random_k)
    sign = CodecCompression(compression.sign)
    terngrad = CodecCompression(compression.terngrad)
    threshold = CodecCompression(compression.threshold)
    top_k = CodecCompression(compression.top_k)
