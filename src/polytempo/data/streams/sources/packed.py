"""`packed`: documents of unequal length, put together into sequences of one length, whole where they fit.

    documents   aaaaa bb ccc dddd e                       length 8
    sequences   aaaaaccc  ddddbbe·                        · padding
    segments    11111222  11112230      positions  01234012  01230100      labels  aaaa-cc-  ddd-b---

Each block of 1,024 documents of a shard is packed separately, by best fit, the longest first. The lengths of the
documents decide everything, so the number of sequences is known, and any of them is found without the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polytempo.core.calls.refusals import refuse
from polytempo.data.streams.sharded_data import DerivedData, ShardedData, runs_of
from polytempo.data.streams.sources.kept_index import KEPT_FROM_SAMPLES, PartToCount, counted
from polytempo.data.streams.sources.sample_values import check_columns

DOCUMENTS_OF_BLOCK = 1024
NO_LABEL = -100
"""torch's `ignore_index`: the loss leaves the place out."""


class _Plan(msgspec.Struct, frozen=True):
    """A shard's packing."""

    lengths: bytes
    """int32: the tokens of each document."""
    sequences: bytes
    """int32: the sequences of each block."""


class DocumentPiece(NamedTuple):
    """The tokens `start` to `stop` (exclusive) of a document."""

    document: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.stop - self.start


def packing(lengths: Sequence[int], length: int) -> list[list[DocumentPiece]]:
    """Documents of these lengths in sequences of at most `length` tokens: best fit, the longest first.

    A document with more than `length` tokens is cut. Pieces of a sequence are in the order of documents.

    >>> [[piece.document for piece in sequence] for sequence in packing([5, 2, 3, 4, 1], 8)]
    [[0, 2], [1, 3, 4]]
    """
    pieces = [
        DocumentPiece(document, start, min(start + length, size))
        for document, size in enumerate(lengths)
        for start in range(0, size, length)
    ]
    sequences: list[list[DocumentPiece]] = []
    free: list[tuple[int, int]] = []  # (free places, sequence), sorted
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        best = bisect_left(free, (piece.size, -1))
        if best == len(free):
            sequences.append([])
            left, number = length, len(sequences) - 1
        else:
            left, number = free.pop(best)
        sequences[number].append(piece)
        insort(free, (left - piece.size, number))
    return sorted(sorted(sequence) for sequence in sequences)


class _Document(NamedTuple):
    raw: Any
    piece: DocumentPiece
    length: int


@final
class Packed(DerivedData):
    """The source that `packed` makes."""

    def __init__(self, source: ShardedData, length: int, column: str | int | None, pad: int) -> None:
        if length < 2:
            raise ValueError(f"length is {length}; a sequence has at least two tokens")
        self._source, self._length, self._column, self._pad = source, length, column, pad
        self.reading = source.reading
        keep = source.content_mark is not None and len(source) >= KEPT_FROM_SAMPLES
        parts = [
            PartToCount(
                f"packed\n{source.fingerprint}\n{source.content_mark}\n{shard}\n{column!r}\n{length}",
                lambda shard=shard: self._plan(shard),  # type: ignore[misc]
                keep=keep,
            )
            for shard in range(len(source.counts))
        ]
        plans = counted(parts, _Plan)
        self._lengths = [np.frombuffer(plan.lengths, np.int32) for plan in plans]
        self._ends = [np.cumsum(np.frombuffer(plan.sequences, np.int32), dtype=np.int64) for plan in plans]
        self.names = source.names
        self.counts = [int(ends[-1]) if len(ends) else 0 for ends in self._ends]
        if not any(self.counts):
            refuse({"data source", "no samples"}, where="packed: a source without tokens")

    @property
    def identity(self) -> object:
        """The source's, and the form of the sequences."""
        return ["packed", self._source.fingerprint, self._length, self._column, self._pad]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all documents: an epoch has each of them once."""
        return sum(int(lengths.sum()) for lengths in self._lengths)

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[list[_Document]]:
        """The sequences in `runs`, with one read of the documents that they have."""
        blocks = list(self._sequences(shard, runs))
        wanted = [
            number for begin, chosen in blocks for number in sorted({begin + p.document for s in chosen for p in s})
        ]
        documents = self._source.read(shard, runs_of(wanted))
        for begin, chosen in blocks:
            numbers = sorted({piece.document for sequence in chosen for piece in sequence})
            held = {number: next(documents) for number in numbers}
            for sequence in chosen:
                yield [
                    _Document(held[piece.document], piece, int(self._lengths[shard][begin + piece.document]))
                    for piece in sequence
                ]

    def decode(self, raw: list[_Document]) -> dict[str, Tensor]:
        """The tensors of a sequence."""
        length = self._length
        found, labels = torch.full((length,), self._pad), torch.full((length,), NO_LABEL)
        positions, segments = torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.int64)
        begin = 0
        for number, document in enumerate(raw, 1):
            piece, whole = document.piece, self._tokens(self._source.decode(document.raw))
            if len(whole) != document.length:
                refuse(
                    {"data source", "changed samples"},
                    where="packed",
                    found=f"a document has {len(whole):,} tokens",
                    expected=f"{document.length:,}",
                )
            end = begin + piece.size
            found[begin:end] = whole[piece.start : piece.stop]
            successors = whole[piece.start + 1 : piece.stop + 1]
            labels[begin : begin + len(successors)] = successors
            positions[begin:end] = torch.arange(piece.size)
            segments[begin:end] = number
            begin = end
        return {"tokens": found, "labels": labels, "positions": positions, "segments": segments}

    def _sequences(self, shard: int, runs: Sequence[range]) -> Iterator[tuple[int, list[list[DocumentPiece]]]]:
        """The first document of each block that has a sequence in `runs`, and these sequences."""
        ends = self._ends[shard]
        numbers = ((int(np.searchsorted(ends, number, "right")), number) for run in runs for number in run)
        for block, group in groupby(numbers, key=lambda each: each[0]):
            begin = block * DOCUMENTS_OF_BLOCK
            all_of = packing(self._lengths[shard][begin : begin + DOCUMENTS_OF_BLOCK].tolist(), self._length)
            first = int(ends[block]) - len(all_of)
            yield begin, [all_of[number - first] for _, number in group]

    def _plan(self, shard: int) -> _Plan:
        count = self._source.counts[shard]
        lengths = np.fromiter(
            (len(self._tokens(self._source.decode(raw))) for raw in self._source.read(shard, [range(count)])),
            np.int32,
        )
        return _Plan(lengths.tobytes(), _num_sequences(lengths, self._length).tobytes())

    def _tokens(self, sample: Any) -> Tensor:
        """A document's tokens, int64 (length,)."""
        if isinstance(self._column, str):
            check_columns([self._column], sample, "packed: a document")
        found = torch.as_tensor(sample if self._column is None else sample[self._column])
        if found.dim() != 1 or (len(found) and (found.is_floating_point() or found.is_complex())):
            raise ValueError(
                f"packed: a document is a row of whole numbers, and here is {found.dtype} {tuple(found.shape)}; name "
                "its column by column=…, and make tokens of text by pt.data.mapped"
            )
        return found.long()


def _num_sequences(lengths: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """The sequences of each block of documents."""
    blocks = [lengths[begin : begin + DOCUMENTS_OF_BLOCK] for begin in range(0, len(lengths), DOCUMENTS_OF_BLOCK)]
    return np.array([len(packing(block.tolist(), length)) for block in blocks], np.int32)


def packed(source: ShardedData, length: int, *, column: str | int | None = None, pad: int = 0) -> Packed:
    """Sequences of `length` tokens made of the source's documents: each token once, documents whole where they fit.

        source = pt.data.packed(pt.data.parquet("corpus/*.parquet"), 2048, column="input_ids")
        for batch in pt.shard(source, batch_size=8):
            logits = model(batch["tokens"], batch["positions"], pt.data.document_mask(batch["segments"]))
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    A document is a sample of `source`, or its `column`: a tensor or list of whole numbers. A sample is a dict of int64
    tensors of shape (length,):

    - `tokens`; `pad` where no document is.
    - `labels`: the token that follows in the same document; -100, which torch's losses leave out, for a document's last
      token and for padding.
    - `positions`: counted from 0 in each document.
    - `segments`: 1, 2, … for the documents of the sequence; 0 for padding. `document_mask` makes a mask of it.

    With that mask the sum of the loss over an epoch is the sum over the documents alone. A document with more tokens
    than `length` is cut; the last label of a piece is the next piece's first token, so no prediction is lost, and no
    token of a later piece sees an earlier piece.

    Documents stay in their shard and block of 1,024, which are packed by best fit, the longest first; the place of a
    token depends on the lengths alone.

    Cost: one pass over the source, through its functions, to learn the lengths; the cache folder (`$POLYTEMPO_CACHE`)
    keeps them for 10,000 documents or more of a source with a `content_mark`, as files have, and processes share the
    pass. Reading holds the documents of
    one block.

    Errors: `Incompatible`, a ValueError with a code: PT2605 (no such column), PT2606 (no tokens), PT2610 (a document
    has another length now). ValueError for documents that are not rows of whole numbers.
    """
    return Packed(source, length, column, pad)


def document_mask(segments: Tensor) -> Tensor:
    """The mask of causal attention within documents: bool (…, 1, length, length) for `segments` (…, length).

    True where a place may attend: for `scaled_dot_product_attention(query, key, value, attn_mask=…)`, with the 1 for
    the heads. Padding attends to padding, so that no row is empty.
    """
    same = segments.unsqueeze(-1) == segments.unsqueeze(-2)
    return same.tril().unsqueeze(-3)
