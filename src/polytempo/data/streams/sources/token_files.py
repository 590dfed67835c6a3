"""Files of token numbers, cut into sequences of one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from polytempo.core.calls.refusals import refuse
from polytempo.data.streams.sharded_data import ShardedData
from polytempo.data.streams.sources.stream_files import StreamFile, Urls, find_files, mark_of, opened

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class _Array(NamedTuple):
    offset: int
    dtype: np.dtype[Any]
    size: int


@final
class Tokens(ShardedData):
    """The source that `tokens` makes."""

    def __init__(self, files: Urls, length: int, dtype: str | None) -> None:
        if length < 1:
            raise ValueError(f"length is {length}; a sequence has at least one token")
        self._length = length
        self._files = find_files(files)
        self._arrays = [_array(file, dtype) for file in self._files]
        self.names = [file.name for file in self._files]
        self.counts = [max(0, (array.size - 1) // length) for array in self._arrays]
        if not any(self.counts):
            refuse({"data source", "no samples"}, where=f"{self._files[0].url}, in sequences of {length:,} tokens")

    @property
    def identity(self) -> object:
        """The length, and the form of each file: not its place, which may be moved."""
        return ["tokens", self._length, [(array.size, str(array.dtype)) for array in self._arrays]]

    @property
    def content_mark(self) -> str | None:
        """The states of the files."""
        return mark_of(self._files)

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """The sequences in `runs`; each run is one read."""
        array, length = self._arrays[shard], self._length
        with opened(self._files[shard], 1 << 12) as stream:
            for run in runs:
                for start in range(run.start, run.stop, each := max(1, (1 << 20) // length)):
                    stop = min(start + each, run.stop)
                    stream.seek(array.offset + start * length * array.dtype.itemsize)
                    wanted = ((stop - start) * length + 1) * array.dtype.itemsize
                    content = stream.read(wanted)
                    if len(content) < wanted:
                        url = self._files[shard].url
                        refuse({"data source", "damaged file"}, url=url, problem=f"it ends in sequence {stop:,}")
                    whole = torch.from_numpy(np.frombuffer(content, array.dtype).astype(np.int64))
                    for place in range(0, (stop - start) * length, length):
                        yield whole[place : place + length].clone(), whole[place + 1 : place + length + 1].clone()


def _array(file: StreamFile, dtype: str | None) -> _Array:
    with opened(file, 1 << 12) as stream:
        if file.url.endswith(".npy"):
            return _npy(stream, file)
    if dtype is None:
        raise ValueError(f"{file.url}: the file does not name the type of its numbers; give dtype='uint16' or 'int32'")
    kind = np.dtype(dtype)
    if kind.kind not in "iu":
        raise ValueError(f"dtype={dtype!r}: tokens are whole numbers, as of int32 or uint16")
    if file.size % kind.itemsize:
        problem = f"{file.size:,} bytes cannot be numbers of {kind}, which has {kind.itemsize} bytes each"
        refuse({"data source", "damaged file"}, url=file.url, problem=problem)
    return _Array(0, kind, file.size // kind.itemsize)


def _npy(stream: BinaryIO, file: StreamFile) -> _Array:
    problem = ""
    try:
        version = np.lib.format.read_magic(stream)
        shape, _, kind = _HEADERS[version](stream)
        offset = stream.tell()
    except (ValueError, KeyError) as error:
        problem = f"it is not an .npy file: {error}"
    else:
        if len(shape) != 1 or kind.kind not in "iu":
            problem = f"tokens are one row of whole numbers, and it has {kind} {shape}"
        elif offset + shape[0] * kind.itemsize > file.size:
            problem = f"it breaks off: {shape[0]:,} numbers of {kind} do not fit into {file.size:,} bytes"
    if problem:
        refuse({"data source", "damaged file"}, url=file.url, problem=problem)
    return _Array(offset, kind, shape[0])


def tokens(files: Urls, length: int, *, dtype: str | None = None) -> Tokens:
    """Sequences of `length` tokens and their successors, from files of token numbers: a shard for each file.

        source = pt.data.tokens("corpus/{000..299}.bin", length=1024, dtype="uint16")

    A file is an .npy array of one dimension, or bare numbers of `dtype`. Sample i of a file t is the pair of int64
    tensors (t[iL], …, t[iL + L - 1]) and (t[iL + 1], …, t[iL + L]), with L = `length`. So each token is predicted once;
    fewer than L + 1 tokens at the end of each file are not used. `pt.data.packed` keeps the ends of documents instead.

    Cost: headers are read when the source is made; a range reads its own bytes.

    Errors: `Incompatible`, a ValueError with a code: PT2602 (unreadable), PT2603 (changed since), PT2604 (broken off or
    another format), PT2606 (no file has a whole sequence). ValueError without `dtype` where a file needs it.
    """
    return Tokens(files, length, dtype)
