"""`Wires`: tensors between the stages of a pipeline, or between the ranks of split layers, in fewer bytes.

    forward    stage 0 ── h, encoded ──▶ stage 1 computes with ĥ = decode(encode(h))
    backward   stage 0 ◀── ĝ ────────── stage 1 sends g = ∂L/∂ĥ, encoded; stage 0 takes ĝ for ∂L/∂h

So the gradient passes the codec of activations as if it were the identity (straight through).
`partition.tensor.model_group` lists the encoded exchanges of split layers, `partition.hybrid.exchange` of divided ones.

Sources: Y. Bengio, N. Léonard, A. Courville, "Estimating or propagating gradients through stochastic neurons for
conditional computation", 2013, section 3.1 (straight through); T. Dettmers, "8-bit approximations for parallelism in
deep learning", 2016, for 8-bit activations and gradients between the parts of a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polytempo.core import Codec
from polytempo.core.codec import check_codec, check_forgetful
from polytempo.partition.cut import Cut, Layout

Way = Literal["forward", "backward"]
WAYS: tuple[Way, Way] = ("forward", "backward")

_FLOATS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_WHOLE = {4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Wires:
    """The codecs of both ways; None: tensors travel as they are.

    Raises ValueError for a codec with a memory, or with wires of varying length.
    """

    activations: Codec | None = None
    gradients: Codec | None = None

    def __str__(self) -> str:
        """The codecs in words."""
        names = ("activations", self.activations), ("their gradients", self.gradients)
        return ", ".join(f"{what} by {codec.facts.name}" for what, codec in names if codec is not None) or "as they are"

    def __post_init__(self) -> None:
        for codec in (self.activations, self.gradients):
            if codec is not None:
                check_codec(codec)
                check_forgetful(codec)

    @property
    def draws(self) -> bool:
        """True if the sent values depend on random numbers."""
        return any(each is not None and each.facts.draws for each in (self.activations, self.gradients))

    def codec(self, way: Way, like: Tensor) -> Codec | None:
        """The codec of a tensor like this on its way. None for whole numbers, truth values and single numbers (a size,
        a scale), and for a tensor that would not get smaller."""
        codec = self.activations if way == "forward" else self.gradients
        if codec is None or not like.is_floating_point() or like.dim() == 0 or codec.wire_bytes(like) > like.nbytes:
            return None
        return codec

    def num_bytes(self, way: Way, like: Tensor) -> int:
        """Bytes sent for a tensor like this."""
        codec = self.codec(way, like)
        return like.nbytes if codec is None else codec.wire_bytes(like)

    def common_codec(self, way: Way, likes: Sequence[Tensor], times: Sequence[int] | None = None) -> Codec | None:
        """The codec of tensors in one exchange. None where together they would not get smaller.

        `times`: the number of tensors like each; None: one.
        """
        codec = self.activations if way == "forward" else self.gradients
        if codec is None:
            return None
        own = [(like, count) for like, count in _counted(likes, times) if like.numel()]
        if not all(like.is_floating_point() for like, _ in own):
            return None
        encoded = sum(codec.wire_bytes(like) * count for like, count in own)
        return None if encoded > sum(like.nbytes * count for like, count in own) else codec

    def common_bytes(self, way: Way, likes: Sequence[Tensor], times: Sequence[int] | None = None) -> int:
        """Bytes of the wires of tensors in one exchange, each as often as `times` says."""
        codec = self.common_codec(way, likes, times)
        if codec is None:
            return sum(like.nbytes * count for like, count in _counted(likes, times))
        return sum(codec.wire_bytes(like) * count for like, count in _counted(likes, times) if like.numel())

    def shared_bytes(self, way: Way, numbers: float, itemsize: int, ranks: int) -> float:
        """Bytes sent for so many numbers of `itemsize` bytes, if each rank encodes its share as one wire."""
        share = round(numbers / ranks)
        if not share or (self.activations if way == "forward" else self.gradients) is None:
            return float(numbers * itemsize)
        piece = without_memory(share, itemsize)
        if self.common_codec(way, [piece]) is None:
            return float(numbers * itemsize)
        return float(ranks * self.common_bytes(way, [piece]))


def _counted(likes: Sequence[Tensor], times: Sequence[int] | None) -> Iterable[tuple[Tensor, int]]:
    return zip(likes, times or [1] * len(likes), strict=True)


def without_memory(numbers: int, itemsize: int, *, whole: bool = False) -> Tensor:
    """A flat tensor of so many numbers (`whole`: whole ones) of `itemsize` bytes, to ask for its wire's bytes."""
    return torch.empty((), dtype=(_WHOLE if whole else _FLOATS)[itemsize]).expand(numbers)


AS_THEY_ARE = Wires()
"""Nothing is encoded."""


def message_bytes(cut: Cut, layouts: Mapping[str, Layout], wires: Wires) -> dict[tuple[int, int], int]:
    """Bytes from part a to part b for one micro-batch, by (a, b): every tensor once to each part that uses it, a < b,
    and its gradient once from each of them, a > b."""
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for value in cut.values:
        shape, dtype = layouts[value.name]
        like = torch.empty((), dtype=dtype).expand(shape)
        for target in value.targets:
            sent[value.source, target] += wires.num_bytes("forward", like)
            sent[target, value.source] += wires.num_bytes("backward", like) * value.requires_grad
    return dict(sent)


def sent_bytes(cut: Cut, layouts: Mapping[str, Layout], num_stages: int, wires: Wires) -> list[int]:
    """Bytes that each stage sends to others for one micro-batch. A part at the same stage is sent nothing."""
    sent = [0] * num_stages
    for (source, target), count in message_bytes(cut, layouts, wires).items():
        sent[source % num_stages] += count * (source % num_stages != target % num_stages)
    return sent
