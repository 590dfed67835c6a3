"""Messages between stages: exact bytes, values as the codec has them, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER
from polytempo.compression import bf16, exact, feedback, fp16, natural, qsgd, recv, send
from polytempo.core import Codec, EncodeContext, Facts, Law, NotFinite, Port
from polytempo.worlds import Outcome, VirtualWorld

ACTIVATIONS = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))


def passed(x: Tensor, codec: Codec, step: int = 1, tag: int = 0) -> Outcome[Tensor | None]:
    """x from rank 0 to rank 1."""

    async def program(port: Port) -> Tensor | None:
        if port.rank == 0:
            return await send(port, x, 1, codec, tag, step=step)
        return await recv(port, torch.empty_like(x), 0, codec, tag, step=step)

    outcome = VirtualWorld(CLUSTER, 2).run(program)
    assert outcome.unreceived == 0
    return outcome


@pytest.mark.parametrize(
    ("codec", "num_bytes"),
    [(exact(), 4 * 128), (bf16(), 2 * 128), (fp16(), 2 * 128), (natural(), None), (qsgd(levels=4), None)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_arrives_is_what_the_codec_makes_of_it_and_the_trace_has_its_bytes(
    codec: Codec, num_bytes: int | None
) -> None:
    outcome = passed(ACTIVATIONS, codec, tag=3)
    wire, _ = codec.encode(ACTIVATIONS, None, EncodeContext(rank=0, tensor=3))
    assert torch.equal(outcome.results[1], codec.decode(wire, ACTIVATIONS, EncodeContext(rank=0, tensor=3)))
    assert dict(outcome.trace.bytes_sent) == {0: codec.wire_bytes(ACTIVATIONS), 1: 0}
    assert num_bytes is None or outcome.trace.bytes_sent[0] == num_bytes
    assert num_bytes is not None or outcome.trace.bytes_sent[0] <= 1.2 * 128


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_dtypes_arrive(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.arange(24, dtype=dtype)[: torch.Size(shape).numel()].view(shape)
    arrived = passed(x, bf16()).results[1]
    assert arrived is not None
    assert arrived.dtype == dtype
    assert torch.equal(arrived, x), "small whole numbers are exact in 8 bits"


def test_a_codec_that_draws_draws_anew_at_every_step() -> None:
    first, again, second = (passed(ACTIVATIONS, qsgd(levels=1), step).results[1] for step in (1, 1, 2))
    assert first is not None
    assert second is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_activations_forward_and_gradients_backward() -> None:
    """Two stages of one layer each. The gradients of the function with the codec inside, straight through."""
    torch.manual_seed(0)
    first, second = torch.randn(32, 6, requires_grad=True), torch.randn(6, 2, requires_grad=True)

    async def program(port: Port) -> Tensor:
        if port.rank == 0:
            activations = torch.tanh(ACTIVATIONS @ first)
            await send(port, activations, 1, natural())
            gradient = await recv(port, activations.detach(), 1, bf16(), tag=1)
            return torch.autograd.grad(activations, first, gradient)[0]
        arrived = (await recv(port, torch.empty(4, 6), 0, natural())).requires_grad_()
        mine, back = torch.autograd.grad((arrived @ second).pow(2).sum(), (second, arrived))
        await send(port, back, 0, bf16(), tag=1)
        return mine

    outcome = VirtualWorld(CLUSTER, 2).run(program)
    hidden = torch.tanh(ACTIVATIONS @ first)
    wire, _ = natural().encode(hidden.detach())
    decoded = natural().decode(wire, hidden.detach()).requires_grad_()
    mine, back = torch.autograd.grad((decoded @ second).pow(2).sum(), (second, decoded))
    assert torch.equal(outcome.results[1], mine)
    assert torch.equal(outcome.results[0], torch.autograd.grad(hidden, first, back.to(torch.bfloat16).float())[0])
    assert outcome.trace.bytes_sent[1] == 2 * 4 * 6


def test_two_ranks_that_send_to_each_other_start_first() -> None:
    async def program(port: Port) -> Tensor:
        other = 1 - port.rank
        work = await port.start(send(port, torch.full((3,), float(port.rank)), other, fp16()))
        arrived = await recv(port, torch.empty(3), other, fp16())
        await work
        return arrived

    assert [r.tolist() for r in VirtualWorld(CLUSTER, 2).run(program).results if r is not None] == [
        [1.0] * 3,
        [0.0] * 3,
    ]


def test_a_transposed_tensor_goes_as_what_it_is() -> None:
    assert torch.equal(passed(torch.arange(6.0).view(2, 3).t(), exact()).results[1], torch.arange(6.0).view(2, 3).t())


def test_what_remembers_is_refused_on_both_sides_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"feedback\(bf16\(\)\) remembers .* use a codec without feedback"):
        passed(ACTIVATIONS, feedback(bf16()))


def test_wires_of_varying_length_are_refused() -> None:
    class Varying:
        """Not even asked to encode."""

        facts = Facts("varying()", Law("lossless"), flops=1.0, fixed=False)

        def init(self, like: Tensor) -> None:
            """Nothing."""

    with pytest.raises(ValueError, match=r"varying\(\) wires vary in length, which the receiver must know; use"):
        passed(ACTIVATIONS, Varying())  # type: ignore[arg-type]


def test_a_nan_is_named_with_sender_and_tag() -> None:
    x = ACTIVATIONS.clone()
    x[1, 2] = float("nan")
    with pytest.raises(NotFinite, match=r"element 34 of the tensor from rank 0 to rank 1 \(tag 7\) is nan"):
        passed(x, natural(), tag=7)
