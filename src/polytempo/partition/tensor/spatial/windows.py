"""Convolutions and poolings of pictures with some places on each rank.

A rank computes its area of the output, and so needs the places of the input that the windows of that area reach. For a
kernel of k places, a stride s, a dilation d and p places before the picture:

    outputs [a, b)  ◀──  inputs [a·s - p, (b-1)·s - p + d·(k-1) + 1)
    transposed      ◀──  inputs [⌈(a + p - d·(k-1)) / s⌉, ⌊(b-1 + p) / s⌋ + 1)

It has most of them; the rest, the halo, comes from the ranks that have it, once for each layer, and the halo's gradient
goes back. Kernels may reach past the neighbour. Each function returns None where it cannot be divided: for options
that are not listed, and for an output, or an input, without a place for each rank. Then every rank computes the whole.

Halo of a convolution with stride 1, without dilation, on H × W places over R × C ranks, each way, for all ranks:

    B · I · [(R-1)·(k-1)·W + (C-1)·(k-1)·H + (R-1)·(C-1)·(k-1)²]          numbers, of B samples and I channels

if no kernel reaches past a neighbour; and backward 2·(N-1) numbers for each of the layer's parameters. The input of a
network needs no gradient, and then none travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from polytempo.partition.tensor.exchange import shared_together, summed
from polytempo.partition.tensor.layers.convolution import Convolution
from polytempo.partition.tensor.layers.locally_connected import LocallyConnected2d
from polytempo.partition.tensor.spatial.areas import Area, Areas, PictureGrid, Span, common
from polytempo.partition.tensor.spatial.halos import with_halos
from polytempo.partition.tensor.spatial.picture_part import PicturePart

Function = Callable[..., Any]
Sizes = int | Sequence[int]


class SlidingWindow(NamedTuple):
    """The windows of one dimension."""

    kernel: int
    stride: int
    before: int
    after: int
    dilation: int = 1
    ceil: bool = False

    @property
    def reach(self) -> int:
        """PictureGrid from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int) -> int:
        """Number of windows."""
        room = size + self.before + self.after - self.reach
        if not self.ceil or room < 0:
            return room // self.stride + 1
        found = -(-room // self.stride) + 1
        return found - ((found - 1) * self.stride >= size + self.before)  # a window begins in the picture

    def inputs(self, span: Span) -> Span:
        """The places that some windows reach."""
        first, last = (output * self.stride - self.before for output in (span[0], span[1] - 1))
        return first, last + self.reach


class Transposed(NamedTuple):
    """The windows of one dimension of a transposed convolution."""

    kernel: int
    stride: int
    before: int
    more: int
    dilation: int

    @property
    def reach(self) -> int:
        """PictureGrid from the first to the last that an input adds to."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int) -> int:
        """PictureGrid of the output."""
        return (size - 1) * self.stride - 2 * self.before + self.reach + self.more

    def inputs(self, span: Span) -> Span:
        """The inputs that add to some outputs; they may be outside of the picture."""
        first = -(-(span[0] + self.before - self.reach + 1) // self.stride)
        return first, (span[1] - 1 + self.before) // self.stride + 1


def slid(part: PicturePart, windows: Sequence[SlidingWindow], fill: float = 0.0) -> PicturePart | None:
    """The places that this rank's windows reach, `fill` outside of the picture, and the places of the output."""
    found = outputs_of(part.places, windows)
    if found is None:
        return None
    want = wanted(found, windows)
    return part.of(with_halos(part.group, part.tensor, part.places.areas, want, fill), found)


def outputs_of(places: PictureGrid, windows: Sequence[SlidingWindow]) -> PictureGrid | None:
    """The places of the output; None where a rank would have none, or windows that reach no place of the picture."""
    found = _output(places, [window.outputs(size) for window, size in zip(windows, places.sizes, strict=True)])
    return found if found is not None and _reached(places, wanted(found, windows)) else None


def windows_of(layer: Convolution | LocallyConnected2d) -> list[SlidingWindow]:
    """The windows of each dimension."""
    kernel = layer.kernel_size
    spread = (1, 1) if isinstance(layer, LocallyConnected2d) else layer.dilation
    sides = padding_of(layer.padding, kernel, spread)
    return [SlidingWindow(k, s, *side, d) for k, s, side, d in zip(kernel, layer.stride, sides, spread, strict=True)]


def wanted(outputs: PictureGrid, windows: Sequence[SlidingWindow | Transposed]) -> Areas:
    """The areas that each rank's windows reach."""
    return tuple(
        tuple(window.inputs(span) for window, span in zip(windows, area, strict=True)) for area in outputs.areas
    )


def _output(places: PictureGrid, sizes: Sequence[int]) -> PictureGrid | None:
    found = PictureGrid(tuple(sizes), places.grid)
    return found if found.divide else None


def _reached(places: PictureGrid, want: Areas) -> bool:
    picture: Area = tuple((0, size) for size in places.sizes)
    return all(common(picture, area) is not None for area in want)


# ---------------------------------------------------------------------- convolutions


def convolution(function: Function) -> Function:
    """One of torch's functions `conv1d`, `conv2d` and `conv3d`, of parts."""

    def divided(
        part: PicturePart,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> PicturePart | None:
        kernel, dims = weight.shape[2:], part.dims
        steps, spread = _each(stride, dims), _each(dilation, dims)
        if len(kernel) != dims:
            return None
        sides = padding_of(padding, kernel, spread)
        windows = [SlidingWindow(k, s, *side, d) for k, s, side, d in zip(kernel, steps, sides, spread, strict=True)]
        given = slid(part, windows)
        if given is None:
            return None
        w, b = shared_together(part.group, weight, bias)
        return given.of(function(given.tensor, w, b, steps, 0, spread, groups))

    return divided


def padding_of(padding: Sizes | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """PictureGrid before and after the picture."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":  # torch puts the odd place behind
        both = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(each // 2, each - each // 2) for each in both]
    assert not isinstance(padding, str), padding
    return [(each, each) for each in _each(padding, len(kernel))]


def transposed(function: Function) -> Function:
    """One of torch's functions `conv_transpose1d`, `conv_transpose2d` and `conv_transpose3d`, of parts."""

    def divided(
        part: PicturePart,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> PicturePart | None:
        kernel, dims = weight.shape[2:], part.dims
        if len(kernel) != dims:
            return None
        steps, spread = _each(stride, dims), _each(dilation, dims)
        options = zip(kernel, steps, _each(padding, dims), _each(output_padding, dims), spread, strict=True)
        windows = [Transposed(*each) for each in options]
        sizes = [window.outputs(size) for window, size in zip(windows, part.places.sizes, strict=True)]
        found = _output(part.places, sizes)
        if found is None:
            return None
        want = wanted(found, windows)
        if not _reached(part.places, want):
            return None
        picture: Area = tuple((0, size) for size in part.places.sizes)
        clipped = tuple(area for each in want if (area := common(picture, each)) is not None)
        given = with_halos(part.group, part.tensor, part.places.areas, clipped)
        w, b = shared_together(part.group, weight, bias)
        made = function(given, w, None, steps, 0, 0, groups, spread)
        cropped = _cropped(made, windows, clipped[part.group.rank], found.areas[part.group.rank])
        return part.of(cropped if b is None else cropped + b.view(-1, *[1] * dims), found)

    return divided


def _cropped(made: Tensor, windows: Sequence[Transposed], inputs: Area, outputs: Area) -> Tensor:
    """The outputs of an area of a transposed convolution's, which begin with the first place that an input adds to."""
    pads: list[int] = []
    for dim in range(-1, -len(windows) - 1, -1):
        first = inputs[dim][0] * windows[dim].stride - windows[dim].before
        pads += [first - outputs[dim][0], outputs[dim][1] - first - made.shape[dim]]
    return functional.pad(made, pads) if any(pads) else made


# ---------------------------------------------------------------------- poolings


def max_pooling(function: Function) -> Function:
    """One of torch's functions `max_pool1d`, `max_pool2d` and `max_pool3d`, of parts."""

    def divided(
        part: PicturePart,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> PicturePart | None:
        if return_indices or not part.tensor.is_floating_point():
            return None
        windows = _pooled(part.dims, kernel_size, stride, padding, dilation, ceil_mode)
        given = slid(part, windows, -torch.inf)
        if given is None:
            return None
        kernel, steps, spread = ([each[i] for each in windows] for i in (0, 1, 4))
        return given.of(function(given.tensor, kernel, steps, 0, spread))

    return divided


def mean_pooling(function: Function) -> Function:
    """One of torch's functions `avg_pool1d`, `avg_pool2d` and `avg_pool3d`, of parts."""

    def divided(
        part: PicturePart,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> PicturePart | None:
        windows = _pooled(part.dims, kernel_size, stride, padding, 1, ceil_mode)
        given = slid(part, windows)
        if given is None:
            return None
        kernel, steps = ([each[i] for each in windows] for i in (0, 1))
        means = function(given.tensor, kernel, steps)
        if divisor_override is not None:
            return given.of(means * (prod(kernel) / divisor_override))
        area = given.places.areas[part.group.rank]
        counts = _counts(windows, part.places.sizes, area, count_include_pad)
        if all(each == window.kernel for own, window in zip(counts, windows, strict=True) for each in own):
            return given.of(means)
        for dim, own in enumerate(counts, start=-part.dims):
            factor = means.new_tensor([windows[dim].kernel / each for each in own])
            means = means * factor.view(-1, *[1] * (-dim - 1))
        return given.of(means)

    return divided


def _counts(windows: Sequence[SlidingWindow], sizes: Sequence[int], area: Area, with_padding: bool) -> list[list[int]]:
    """PictureGrid of each window that count, in each dimension: torch counts padding, but none beyond it."""
    found = []
    for window, size, span in zip(windows, sizes, area, strict=True):
        low, high = (-window.before, size + window.after) if with_padding else (0, size)
        begins = [output * window.stride - window.before for output in range(*span)]
        found.append([min(begin + window.kernel, high) - max(begin, low) for begin in begins])
    return found


def _pooled(
    dims: int, kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil: bool
) -> list[SlidingWindow]:
    sizes = _each(kernel, dims)
    steps = sizes if stride is None or stride == [] else _each(stride, dims)
    sides, spread = _each(padding, dims), _each(dilation, dims)
    return [SlidingWindow(k, s, p, p, d, ceil) for k, s, p, d in zip(sizes, steps, sides, spread, strict=True)]


def adaptive_mean(pooling: Function) -> Function:
    """The adaptive mean pooling of parts, by torch's `pooling` with windows of one size.

    Outputs of one place are whole on every rank: a sum over ranks. Other sizes must divide the picture's.
    """
    by_windows = mean_pooling(pooling)

    def divided(part: PicturePart, output_size: Sizes) -> PicturePart | Tensor | None:
        asked = _asked(output_size, part.places.sizes)
        if all(each == 1 for each in asked):
            dims = tuple(range(-part.dims, 0))
            return summed(part.group, part.tensor.sum(dims, keepdim=True) / prod(part.places.sizes))
        kernel = _dividing(asked, part.places.sizes)
        return None if kernel is None else by_windows(part, kernel)

    return divided


def adaptive_max(pooling: Function) -> Function:
    """The adaptive max pooling of parts, by torch's `pooling`; sizes of the output must divide the picture's."""
    by_windows = max_pooling(pooling)

    def divided(part: PicturePart, output_size: Sizes, return_indices: bool = False) -> PicturePart | None:
        kernel = _dividing(_asked(output_size, part.places.sizes), part.places.sizes)
        return None if kernel is None or return_indices else by_windows(part, kernel)

    return divided


def _asked(output_size: Any, sizes: Sequence[int]) -> list[int]:
    asked = [output_size] * len(sizes) if isinstance(output_size, int) or output_size is None else list(output_size)
    return [size if each is None else int(each) for each, size in zip(asked, sizes, strict=True)]


def _dividing(asked: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    if any(each < 1 or size % each for each, size in zip(asked, sizes, strict=True)):
        return None
    return [size // each for each, size in zip(asked, sizes, strict=True)]


def _each(given: Sizes, dims: int) -> list[int]:
    """One number for each dimension."""
    if isinstance(given, int):
        return [given] * dims
    found = [int(each) for each in given]
    return found * dims if len(found) == 1 else found
