"""`Compression`: what tensors are on their way. Write one of your own as a subclass of `Compressor`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Two static methods. What `compress` answers is summed over the ranks, then handed to `decompress`."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that travels, and what `decompress` needs besides."""
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
        """In float16, and the dtype that it had."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """In the dtype that it had."""
        return tensor.to(ctx)


class Compression:
    """The compressors that there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
