"""IDX files, the format of MNIST and Fashion-MNIST, and of the digits that come with Polytempo.

byte  0 0   type   dims   size of each dim            values, big-endian, row-major
      00 00  08     03    0000ea60 0000001c 0000001c  ...

The digits: 1,797 handwritten ones of 8 x 8 pixels, ten classes. They are the test part of *Optical Recognition of
Handwritten Digits* (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998; CC BY 4.0), as scikit-learn's
`load_digits` hands it out.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polytempo.data.plan import permutation
from polytempo.data.readers import Split

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_DIMS = 4
MAX_BYTES = 4 << 30


def read_idx(path: Path) -> Tensor:
    """The tensor in an IDX file, gzip-compressed where its name ends in `.gz`.

    Raises ValueError, naming the file, if it does not match its header; nothing is allocated before the header has been
    checked.
    """
    try:
        with _opened(path) as file:
            return _tensor(file, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _opened(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _tensor(file: gzip.GzipFile | BinaryIO, path: Path) -> Tensor:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not 1 <= magic[3] <= MAX_DIMS:
        raise ValueError(f"{path} is not an IDX file: it begins with 0x{magic.hex()}")
    header = file.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise ValueError(f"{path} ends within its header")
    shape = struct.unpack(f">{magic[3]}I", header)
    dtype = numpy.dtype(TYPES[magic[2]])
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > MAX_BYTES:
        raise ValueError(f"{path} says that it holds {shape}, {num_bytes} bytes; at most {MAX_BYTES} are read")
    values = file.read(num_bytes + 1)
    if len(values) != num_bytes:
        held = "more" if len(values) > num_bytes else f"{len(values)}"
        raise ValueError(f"{path} says that it holds {shape}, {num_bytes} bytes, but it has {held}")
    array = numpy.frombuffer(values, dtype).astype(dtype.newbyteorder("="))  # a copy that may be written
    return torch.from_numpy(array).reshape(shape)


def mnist(folder: Path) -> Split:
    """MNIST, Fashion-MNIST or another data set in the same four files (`.gz` or plain).

    Images: float32 (N, 1, height, width), less the mean of the training pixels, over their standard
    deviation. Labels: int64 (N,).
    """
    images, labels = _pair(folder, "train")
    mean, deviation = pixel_statistics(images)
    held_out, held_out_labels = _pair(folder, "t10k")
    return Split(
        TensorDataset(scaled(images, mean, deviation).unsqueeze(1), labels),
        TensorDataset(scaled(held_out, mean, deviation).unsqueeze(1), held_out_labels),
    )


def pixel_statistics(images: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of all pixels of uint8 `images`, from exact counts: the same on every machine."""
    counts = torch.bincount(images.flatten(), minlength=256).tolist()
    total = sum(counts)
    mean = sum(value * count for value, count in enumerate(counts)) / total
    variance = sum((value - mean) ** 2 * count for value, count in enumerate(counts)) / total
    return mean, math.sqrt(variance) or 1.0


def scaled(images: Tensor, mean: float, deviation: float) -> Tensor:
    """`(images - mean) / deviation` in float32."""
    return images.float().sub_(mean).div_(deviation)


def _pair(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images_path, labels_path = _found(folder, f"{part}-images-idx3-ubyte"), _found(folder, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dtype != torch.uint8 or images.dim() != 3 or images.numel() == 0:
        raise ValueError(f"{images_path} holds {images.dtype} {tuple(images.shape)}; expected bytes (N, height, width)")
    if labels.dtype != torch.uint8 or labels.shape != images.shape[:1]:
        raise ValueError(f"{labels_path} holds {tuple(labels.shape)} labels for {len(images)} images in {images_path}")
    return images, labels.long()


def _found(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise ValueError(
        f"{folder} has no {name}.gz (nor {name}); expected there: "
        "{train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, .gz or plain"
    )


FOLDER = Path(__file__).parents[1] / "digits_idx"
NUM_TEST = 360


def digits() -> Split:
    """1,437 digits to train on and 360 to test with, always the same ones.

    Images: float32 (N, 64), less the mean of the training pixels, over their standard deviation.
    Labels: int64 (N,).
    """
    images = read_idx(FOLDER / "images-idx3-ubyte.gz").flatten(1)
    labels = read_idx(FOLDER / "labels-idx1-ubyte.gz").long()
    order = permutation(len(images), 0, 0)
    train, test = order[:-NUM_TEST], order[-NUM_TEST:]
    mean, deviation = pixel_statistics(images[train])
    return Split(
        TensorDataset(scaled(images[train], mean, deviation), labels[train]),
        TensorDataset(scaled(images[test], mean, deviation), labels[test]),
    )
