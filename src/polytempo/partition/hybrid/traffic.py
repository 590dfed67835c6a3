"""The traffic of divided layers in a pass, computed from shapes: its rounds, and its bytes, by codecs or without.

    joined   one round    every rank sends all of its samples to all others
    turns    N rounds     in round k rank k sends all of its samples
    slices   N rounds     in each round every rank sends an N-th of its samples

All send the same bytes, and compute the same. Rounds overlap: the next one's samples travel while the layer computes
with these. With "turns" one rank's link carries a round, with "slices" all ranks' links do.

Source: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: the schemes (a), (b) and
(c) of its section 3.1. There a round goes on through all fully connected layers, which saves memory; here each layer
has rounds of its own, so that anything may come between layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from polytempo.partition.wires import Wires


class ExchangedPieces(NamedTuple):
    """Flat tensors that travel in one exchange, without their values."""

    likes: list[Tensor]
    """One for each length."""
    times: list[int]
    """The number of tensors like each."""


class Volume(NamedTuple):
    """Bytes of all ranks together."""

    forward: int
    backward: int


def sample_pieces(spans: Spans, given: Tensor) -> ExchangedPieces:
    """A round's samples of each rank. `given`: one sample's inputs, flat."""
    return _pieces(Counter((end - begin) * given.numel() for begin, end in spans), given)


def feature_pieces(spans: Spans, parts: Sequence[int], made: Tensor) -> ExchangedPieces:
    """Each rank's features of the outputs of the other ranks' samples in a round: `parts[r]` features. `made`: one
    sample's outputs, flat. Cost: at most the number of ranks, unless they all differ."""
    lengths, each = [end - begin for begin, end in spans], made.numel() // sum(parts)
    found: Counter[int] = Counter()
    for length, holders in Counter(lengths).items():
        for part, makers in Counter(parts).items():
            found[length * part * each] += holders * makers
    found.subtract(Counter(length * part * each for length, part in zip(lengths, parts, strict=True)))
    return _pieces(+found, made)


def volume(
    rounds: Sequence[Spans], parts: Sequence[int], given: Tensor, made: Tensor, wires: Wires, *, of_inputs: bool
) -> Volume:
    """Bytes of a pass of one layer and of its way back: each input to all, each output to its sample's rank.

    `parts[r]`: features of rank r; `given`, `made`: one sample's, flat; `of_inputs`: their gradients go back.
    """
    forward = backward = 0
    for spans in rounds:
        samples, features = sample_pieces(spans, given), feature_pieces(spans, parts, made)
        others = len(parts) - 1
        forward += others * wires.common_bytes("forward", *samples) + wires.common_bytes("forward", *features)
        backward += others * wires.common_bytes("backward", *samples) * of_inputs
        backward += wires.common_bytes("backward", *features)
    return Volume(forward, backward)


def _pieces(counts: Counter[int], like: Tensor) -> ExchangedPieces:
    one = like.new_empty(())
    return ExchangedPieces([one.expand(numbers) for numbers in counts], list(counts.values()))


Exchange = Literal["joined", "turns", "slices"]
EXCHANGES: tuple[Exchange, ...] = ("joined", "turns", "slices")
Spans = list[tuple[int, int]]
"""Begin and end of each rank's samples of a round, among its own."""


def rounds(exchange: Exchange, samples: Sequence[int]) -> list[Spans]:
    """The rounds, where rank r has `samples[r]`. Each sample is in one of them."""
    num_ranks = len(samples)
    if exchange == "joined":
        return [[(0, size) for size in samples]]
    if exchange == "turns":
        return [[(0, size if rank == turn else 0) for rank, size in enumerate(samples)] for turn in range(num_ranks)]
    return [[(size * k // num_ranks, size * (k + 1) // num_ranks) for size in samples] for k in range(num_ranks)]
