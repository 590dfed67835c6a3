"""`png`: a picture as the bytes of a PNG file.

    signature │ IHDR width, height, 8 bits, gray or RGB │ IDAT zlib(0, row, 0, row, …) │ IEND

Source: W3C, Portable Network Graphics (2003): chunks 11.2, filter type 0 of 9.2.
"""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {1: 0, 3: 2}
"""Channels -> colour type."""


def png(image: Tensor) -> bytes:
    """The PNG file of `image`, uint8 of shape (height, width, channels) with one channel or three."""
    height, width, channels = image.shape
    rows = torch.cat([image.new_zeros(height, 1), image.reshape(height, -1)], dim=1).contiguous()
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    body = zlib.compress(rows.numpy().tobytes(), level=6)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
