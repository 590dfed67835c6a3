"""What divided layers send in a pass, worked out from shapes: to the byte, by codecs or as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from polytempo.partition.hybrid.rounds import Spans
from polytempo.partition.wires import Wires


class ExchangedPieces(NamedTuple):
    """Flat tensors that travel in one exchange, without their values."""

    likes: list[Tensor]
    """One for each length that occurs."""
    times: list[int]
    """How many there are like each."""


class Volume(NamedTuple):
    """Bytes of all ranks together."""

    forward: int
    backward: int


def sample_pieces(spans: Spans, given: Tensor) -> ExchangedPieces:
    """A round's samples of each rank. `given`: what is given of one sample, flat."""
    return _pieces(Counter((end - begin) * given.numel() for begin, end in spans), given)


def feature_pieces(spans: Spans, parts: Sequence[int], made: Tensor) -> ExchangedPieces:
    """What each rank has of the outputs of each other one's samples in a round: `parts[r]` features. `made`: one
    sample's outputs, flat. Cost: no more than the ranks, unless they all differ."""
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
    """Of a pass of one layer and of its way back: each input to all, each output to whose sample it is.

    `parts[r]`: features of rank r; `given`, `made`: of one sample, flat; `of_inputs`: their gradients go back.
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
