"""Exchanges of a divided layer: samples to the weights, outputs to their samples' ranks, gradients back.

             rank 0          rank 1
    x        a b             c d          samples
    gather   a b c d         a b c d      all samples, forward; backward the sum of all ranks' gradients
    W        ▔▔▔▔            ▁▁▁▁         each rank has some of the output features
    deal     ab, both halves cd, both     outputs of the own samples, forward; backward their gradients

With N ranks, B samples of all of them, and I and O numbers of a sample:

| | bytes of all ranks, each way |
|---|---|
| gather, and its gradients | (N-1) · B · I |
| deal, and its gradients | (N-1)/N · B · O |

Sums are formed in the order of ranks.

With codecs Q of activations and R of gradients, for rank r's samples x_r, its features y_rj of rank j's samples, and
partial sums p_rj of the gradients of these:

    gather     [Q(x_0) │ Q(x_1) │ …]                  on all ranks, on the sender, too
    deal       [Q(y_0j) │ … y_jj … │ Q(y_Nj)]         the own piece, which travels nowhere, as it is
    back       as deal, with R, of gradients
    and        p_jj + Σ_{r≠j} R(p_rj)                 as a reduction between split layers (`tensor.model_group`)

Gradients pass Q as if it were the identity (`partition.wires`). The bytes are counted by `partition.hybrid.traffic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.partition.hybrid.traffic import ExchangedPieces, Spans, Volume, feature_pieces, sample_pieces, volume
from polytempo.partition.tensor.model_group import Occasion
from polytempo.partition.tensor.rounds import AS_IT_IS, RoundCodec, to_all, to_each, to_owners
from polytempo.partition.wires import Wires

Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A layer's output from its input, weight and bias."""

_SAMPLES, _FEATURES = 1015, 1016
"""Channels of the gathers and the deals: a round's samples travel while the outputs of the one before do."""
_Step = Literal["gather", "deal", "return", "reduce"]
_STEPS: tuple[_Step, ...] = ("gather", "deal", "return", "reduce")
"""Exchanges of a round: the first two forward, the others backward."""


@dataclass(frozen=True)
class DividedCall:
    """One call of a divided layer on one rank. Shapes: inputs (samples, …), outputs with features in `output_dim`."""

    port: Port
    compute: Compute
    rounds: list[Spans]
    parts: Sequence[int]
    """Output features of each rank."""
    output_dim: int
    samples: Sequence[int]
    """Samples of each rank."""
    wires: Wires
    occasion: Occasion
    """The number of this call in its pass, for codecs that draw."""
    name: str
    """The layer's name, for errors."""
    share: float | None = None
    """This rank's weight in the step, where its passes may have other numbers of samples; None: as in this pass."""

    def by(self, step: _Step, round_number: int, pieces: ExchangedPieces) -> RoundCodec:
        """The codec of these pieces; the same on all ranks."""
        forward, place = step in _STEPS[:2], _STEPS.index(step)
        codec = self.wires.common_codec("forward" if forward else "backward", *pieces)
        if codec is None:
            return AS_IT_IS
        number = len(_STEPS) * (self.occasion.number * len(self.rounds) + round_number) + place
        what = "activations" if forward else "gradients"
        return RoundCodec(codec, self.occasion.step, number, f"the {what} of layer {self.name}")

    def volume(self, inputs: Tensor, output: Tensor) -> Volume:
        """Bytes of all ranks in this call with these tensors, and on its way back."""
        given, made = _of_one(inputs), _of_one(output)
        return volume(self.rounds, self.parts, given, made, self.wires, of_inputs=inputs.requires_grad)

    @property
    def weight(self) -> float:
        """The weight of this rank's loss, a mean over its samples, in the mean over all samples of the step."""
        return self.samples[self.port.rank] / max(sum(self.samples), 1) if self.share is None else self.share


class Kept(NamedTuple):
    """One round's computation, kept for its gradients."""

    inputs: Tensor
    output: Tensor


async def forward(
    call: DividedCall, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool
) -> tuple[Tensor, list[Kept]]:
    """The outputs of this rank's samples, all features; with `keep` also each round's computation, for `backward`."""
    port, dealing, kept = call.port, [], list[Kept]()
    gathering = await port.start(_gathered(call, inputs, 0))
    for number in range(len(call.rounds)):
        whole: Tensor = await gathering
        if number + 1 < len(call.rounds):
            gathering = await port.start(_gathered(call, inputs, number + 1))
        with torch.set_grad_enabled(keep):
            taken = whole.requires_grad_(keep and inputs.requires_grad)
            output = call.compute(taken, weight, bias)
        kept += [Kept(taken, output)] * keep
        dealing.append(await port.start(_dealt(call, output.detach(), number)))
    return torch.cat([await each for each in dealing]), kept


async def backward(
    call: DividedCall, gradient: Tensor, kept: Sequence[Kept], parameters: Sequence[Tensor], *, of_inputs: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradients of this rank's inputs (None if not `of_inputs`), and of its part of the parameters.

    A loss is taken to be the mean over a rank's samples. Parameters get the gradient of the mean over all samples,
    inputs the gradient of their own rank's loss, like everything that each rank computes alone.
    """
    port, found, reducing = call.port, [torch.zeros_like(p) for p in parameters], []
    own = gradient * call.weight
    gathering = await port.start(_returned(call, own, 0))
    for number, (inputs, output) in enumerate(kept):
        outputs: Tensor = await gathering
        if number + 1 < len(call.rounds):
            gathering = await port.start(_returned(call, own, number + 1))
        asked = [*parameters, *[inputs] * of_inputs]
        answers = torch.autograd.grad(output, asked, outputs, retain_graph=True)
        for total, each in zip(found, answers, strict=False):
            total += each
        if of_inputs:
            reducing.append(await port.start(_reduced(call, answers[-1], number)))
    if not of_inputs:
        return None, found
    mine = torch.cat([await each for each in reducing])
    return (mine / call.weight if call.weight else mine), found


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)


def _like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return tensor.new_empty(()).expand(prod(shape))


def _of_one(tensor: Tensor) -> Tensor:
    """A tensor like one sample of (samples, …), flat."""
    return _like(tensor, tensor.shape[1:])


async def _gathered(call: DividedCall, inputs: Tensor, number: int) -> Tensor:
    """All ranks' samples of a round, from this rank's inputs."""
    port, spans = call.port, call.rounds[number]
    begin, end = spans[port.rank]
    shapes = [(end - begin, *inputs.shape[1:]) for begin, end in spans]
    by = call.by("gather", number, sample_pieces(spans, _of_one(inputs)))
    mine, likes = _flat(inputs.detach()[begin:end]), [_like(inputs, shape) for shape in shapes]
    found = await to_all(port.on_channel(_SAMPLES), mine, likes, by)
    return torch.cat([each.view(shape) for each, shape in zip(found, shapes, strict=True)])


async def _reduced(call: DividedCall, partial: Tensor, number: int) -> Tensor:
    """The sum over ranks of this rank's samples of a round."""
    port, spans = call.port, call.rounds[number]
    sizes = [end - begin for begin, end in spans]
    by = call.by("reduce", number, sample_pieces(spans, _of_one(partial)))
    total = await to_owners(port.on_channel(_SAMPLES), [_flat(each) for each in partial.split(sizes)], by)
    return total.view(sizes[port.rank], *partial.shape[1:])


async def _dealt(call: DividedCall, output: Tensor, number: int) -> Tensor:
    """All features of this rank's samples of a round, from this rank's features of all samples."""
    port, spans = call.port, call.rounds[number]
    sizes = [end - begin for begin, end in spans]
    dim = output.dim() + call.output_dim
    pieces = [_flat(each) for each in output.split(sizes)]
    shapes = [(sizes[port.rank], *output.shape[1:dim], part, *output.shape[dim + 1 :]) for part in call.parts]
    whole = _like(output, (*output.shape[1:dim], sum(call.parts), *output.shape[dim + 1 :]))
    by = call.by("deal", number, feature_pieces(spans, call.parts, whole))
    likes = [_like(output, shape) for shape in shapes]
    found = await to_each(port.on_channel(_FEATURES), pieces, likes, by)
    return torch.cat([each.view(shape) for each, shape in zip(found, shapes, strict=True)], dim)


async def _returned(call: DividedCall, gradient: Tensor, number: int) -> Tensor:
    """The gradient of this rank's features of all samples of a round: the adjoint of `_dealt`."""
    port, spans = call.port, call.rounds[number]
    begin, end = spans[port.rank]
    dim, own = gradient.dim() + call.output_dim, call.parts[port.rank]
    pieces = [_flat(each) for each in gradient[begin:end].split(list(call.parts), dim)]
    shapes = [(e - b, *gradient.shape[1:dim], own, *gradient.shape[dim + 1 :]) for b, e in spans]
    by = call.by("return", number, feature_pieces(spans, call.parts, _of_one(gradient)))
    likes = [_like(gradient, shape) for shape in shapes]
    found = await to_each(port.on_channel(_FEATURES), pieces, likes, by)
    return torch.cat([each.view(shape) for each, shape in zip(found, shapes, strict=True)])


class Divided(torch.autograd.Function):
    """`forward` and `backward` as one operation of autograd; `drive` runs them to their end."""

    @staticmethod
    def forward(ctx: Any, call: DividedCall, drive: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's part of the layer's output: (its samples, …)."""
        ctx.call, ctx.drive = call, drive
        ctx.parameters = [each for each in (weight, bias) if each is not None and each.requires_grad]
        answer, ctx.kept = drive(forward(call, inputs, weight, bias, keep=True))
        return answer  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """The gradients of `forward`'s arguments."""
        needed = ctx.needs_input_grad
        of_inputs, found = ctx.drive(backward(ctx.call, gradient, ctx.kept, ctx.parameters, of_inputs=needed[2]))
        of_parameters = iter(found)
        weight, bias = (next(of_parameters) if needed[i] else None for i in (3, 4))
        return None, None, of_inputs, weight, bias
