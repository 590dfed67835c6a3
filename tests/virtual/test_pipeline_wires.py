"""Codecs between stages: the computation with them, the encoded tensors, and the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from pipelines import DELAYED, SAMPLES, WAITING, WIDTH, batches, chain, micro_batches, perceptron, trained, two_versions
from polytempo import compression as c
from polytempo.compression.encoding.coded import Coded
from polytempo.core import Codec, EncodeContext, NotFinite, Port
from polytempo.partition.cut import Stage
from polytempo.partition.cutting import cut
from polytempo.partition.schedules import gpipe, one_f_one_b
from polytempo.partition.wires import Wires, sent_bytes
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.worlds import VirtualWorld

EVERY = WAITING | DELAYED | {"pipedream_2bw": two_versions}
CODECS: dict[str, Callable[[], Codec]] = {
    "bf16": c.bf16,
    "fp16": c.fp16,
    "int8": c.int8,
    "int8 by rows": lambda: c.int8(block=WIDTH),
    "dynamic8": c.dynamic8,
    "qsgd": lambda: c.qsgd(levels=127),
}


@pytest.mark.parametrize("name", EVERY)
def test_an_identity_is_no_codec_to_the_bit(name: str) -> None:
    plain, ours = (trained(EVERY[name](4), wires=wires) for wires in (Wires(), Wires(c.exact(), c.exact())))
    assert ours.losses == plain.losses
    assert ours.sent_bytes == plain.sent_bytes
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True))


@pytest.mark.parametrize("name", CODECS)
def test_the_bytes_that_travel_are_those_that_are_claimed(name: str) -> None:
    codec, steps = CODECS[name](), 3
    plain = torch.empty(2, WIDTH, dtype=torch.float64)
    for wires in (Wires(codec), Wires(gradients=codec), Wires(codec, c.bf16())):
        ours = trained(one_f_one_b(4, 4), steps=steps, wires=wires)
        whole = chain(perceptron(), 4)
        layouts = micro_batches(batches(1)[0], 4, whole)[0].layouts
        assert ours.sent_bytes == [steps * 4 * each for each in sent_bytes(whole, layouts, 4, wires)]
        there, back = wires.num_bytes("forward", plain), wires.num_bytes("backward", plain)
        assert sum(ours.sent_bytes) == steps * 4 * 3 * (there + back)
    assert codec.wire_bytes(plain) <= plain.nbytes / 4


def test_the_next_stage_computes_with_what_it_decodes_and_the_gradient_passes_straight_through() -> None:
    """Two stages, one step, written out: ĥ for h, and ĝ for the gradient by it."""
    activations, gradients = c.int8(block=WIDTH), c.bf16()
    [(x, y)] = batches(1)
    model = perceptron()
    first, last = model[:4], model[4:]
    h = first(x)
    assert isinstance(h, Tensor)
    decoded = activations.decode(activations.encode(h)[0], h.detach()).requires_grad_()
    bound = 1 - activations.facts.law.bound(h)
    assert 0 < (decoded - h).detach().norm() ** 2 <= bound * h.detach().norm() ** 2
    nn.functional.mse_loss(last(decoded), y).backward()
    assert decoded.grad is not None
    h.backward(gradients.decode(gradients.encode(decoded.grad)[0], decoded.grad))
    lr = 0.05
    ours = trained(one_f_one_b(2, 1), steps=1, lr=lr, momentum=0.0, wires=Wires(activations, gradients))
    for mine, other in zip(ours.model.parameters(), model.parameters(), strict=True):
        assert other.grad is not None
        assert torch.equal(mine, other.detach().add(other.grad, alpha=-lr))


def test_a_schedule_that_computes_anew_uses_what_it_received() -> None:
    wires = Wires(c.qsgd(levels=127), c.qsgd(levels=127))
    stored, anew = (trained(gpipe(4, 4, recompute=recompute), wires=wires) for recompute in (False, True))
    assert stored.losses == anew.losses
    assert stored.losses != trained(gpipe(4, 4)).losses


class Crossing(nn.Module):
    """A tensor that two stages use, a mask, whole numbers and a single number, which all cross the first cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        mask, order, scale = h > 0, h.argsort(1), h.mean()
        middle = self.second(h).gather(1, order) * mask * scale
        out: Tensor = self.third(middle) + h
        return out


@dataclass(frozen=True)
class Counting:
    """bf16 that keeps its inputs."""

    given: list[tuple[Tensor, EncodeContext]] = field(default_factory=list)
    facts = c.bf16().facts

    def size(self, like: Tensor, terms: int = 1) -> object:
        return c.bf16().encoding.size(like, terms)

    def encode(self, x: Tensor, when: EncodeContext) -> Tensor:
        self.given.append((x, when))
        return c.bf16().encoding.encode(x, when)

    def decode(self, wire: Tensor, like: Tensor, when: EncodeContext) -> object:
        return c.bf16().encoding.decode(wire, like, when)


def test_a_tensor_is_encoded_once_for_all_who_use_it_and_numbers_and_masks_travel_as_they_are() -> None:
    """h crosses to stages 1 and 2; the only other encodable tensor that crosses is stage 1's output."""
    torch.manual_seed(0)
    model, x = Crossing(), torch.randn(SAMPLES, WIDTH, dtype=torch.float64)
    whole = cut(model, sample=x, by=["second", "third"])
    assert len(whole.values) == 5
    activations = Counting()
    wires = Wires(Coded(activations), None)  # type: ignore[arg-type]
    layouts = whole.layouts(x)
    seen: dict[str, Tensor] = {}
    parts = [StageProgram(whole, replace(one_f_one_b(3, 1), wires=wires), stage, _nothing) for stage in range(3)]

    def note(stage: Stage, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.update({f"{stage.index}.{name}": arg.detach() for name, arg in zip(stage.takes, args, strict=True)})

    async def program(port: Port) -> None:
        batch = MicroBatch((x,), layouts, lambda output: output.sum(), lambda part: None)
        await parts[port.rank].step(port, [batch])

    for stage in whole.stages[1:]:
        stage.module.register_forward_pre_hook(partial(note, stage))
    outcome = VirtualWorld(pt.cluster.ethernet(gbit_per_s=1), 3).run(program)
    [(h, _), (middle, _)] = activations.given
    assert torch.equal(seen["1.tanh"], seen["2.tanh"])
    assert torch.equal(seen["1.tanh"], h.bfloat16().double())
    assert torch.equal(seen["1.gt"], h > 0)
    assert torch.equal(seen["1.argsort"], h.argsort(1))
    assert torch.equal(seen["1.mean"], h.mean())
    assert not torch.equal(middle, middle.bfloat16().double())
    assert list(outcome.trace.bytes_sent.values()) == sent_bytes(whole, layouts, 3, wires)


async def _nothing() -> None:
    """No update."""


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Wires(c.feedback(c.one_bit())),
            ValueError,
            r"feedback\(one_bit\(\)\) remembers the t",
        ),
        (
            lambda: Wires(gradients=c.dgc(0.1)),
            ValueError,
            r"dgc\(.*\) remembers the tensor .*use a codec without feedba",
        ),
        (lambda: Wires(gradients=c.threshold(0.5)), ValueError, r"threshold\(tau=0.5\) wires vary in length"),
        (lambda: Wires(c.int8), TypeError, r"write int8\(\)"),
        (lambda: Wires("bf16"), TypeError, r"write bf16\(\)"),
    ],
)
def test_codecs_that_cannot_serve_are_refused_by_name(
    make: Callable[[], Wires], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_tensor_that_would_grow_travels_as_it_is() -> None:
    wires = Wires(c.int8(), c.int8())
    assert wires.codec("forward", torch.ones(1, 1)) is None
    assert wires.codec("forward", torch.ones(3)) is not None
    assert wires.codec("forward", torch.ones(8, dtype=torch.int64)) is None
    assert wires.num_bytes("backward", torch.ones(8, dtype=torch.bool)) == 8
    assert wires.codec("backward", torch.ones(())) is None


def test_what_cannot_be_encoded_names_the_tensor_and_its_stage() -> None:
    model = perceptron()
    whole = chain(model, 2)
    with torch.no_grad():
        model[0][0].bias[1] = torch.nan
    parts = [
        StageProgram(whole, replace(one_f_one_b(2, 1), wires=Wires(c.int8())), stage, _nothing) for stage in range(2)
    ]

    async def program(port: Port) -> None:
        await parts[port.rank].step(port, micro_batches(batches(1)[0], 1, whole))

    with pytest.raises(NotFinite, match=r"_3_1, which stage 0 sends"):
        VirtualWorld(pt.cluster.ethernet(gbit_per_s=1), 2).run(program)
