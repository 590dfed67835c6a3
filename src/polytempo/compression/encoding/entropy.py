"""Ascending indices in fewer bytes: differences, byte by byte, through zstd.

Source: Y. Collet, M. Kucherawy, "Zstandard compression and the 'application/zstd' media type", RFC 8878, 2021; by its
library. N. Strom, 2015, section 4.2, names entropy coding of indices as a further factor of about 3.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

_LEVEL = 1
"""What zstd does best here is the coding of bytes by their frequency, which its lowest level has."""


def library() -> ModuleType:
    """The module `zstandard`. Raises ImportError that names the remedy."""
    try:
        import zstandard
    except ImportError:
        raise ImportError(
            "entropy=True needs the library zstandard; `pip install 'polytempo[zstd]'` brings it"
        ) from None
    return zstandard


def packed(indices: Tensor) -> Tensor:
    """Ascending indices (int32, on any device) as bytes.

    1. differences to the one before         3 5 260 261      3 2 255 1
    2. all lowest bytes, then the next ones, …: where one in a hundred is sent, three of four planes are almost all 0
    3. zstd
    """
    deltas = indices.cpu().diff(prepend=torch.zeros(1, dtype=torch.int32))
    planes = deltas.contiguous().view(torch.uint8).view(-1, 4).t().contiguous()
    found = library().ZstdCompressor(level=_LEVEL).compress(planes.numpy())
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def unpacked(raw: Tensor, count: int) -> Tensor:
    """The `count` indices (int64, on the CPU). Raises ValueError where the bytes are not those of as many."""
    zstd, data = library(), raw.cpu().contiguous().numpy().tobytes()
    try:
        if zstd.get_frame_parameters(data).content_size != 4 * count:
            raise ValueError(f"the indices of a wire are not {count}")
        planes = zstd.ZstdDecompressor().decompress(data, max_output_size=4 * count)
    except zstd.ZstdError as error:
        raise ValueError(f"the indices of a wire are no zstd frame: {error}") from None
    deltas = torch.frombuffer(bytearray(planes), dtype=torch.uint8).view(4, -1).t().contiguous().view(torch.int32)
    return deltas.view(-1).long().cumsum(0)
