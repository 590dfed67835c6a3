"""`encoded`: a transform with pushes of encoded vectors, and the codec's residuals in its state.

    push_movement(10) ──Push(movement)──▶ encoded ──Push(message)──▶ a log of an object store
                                          residual ◀── movement + residual - message

A parameter server's client encodes for several shards; this is for one shard without a client. The residual is in the
transform's state, so a worker saves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from polytempo.core import Bundle, Codec, CodecState, Op, Port, State, Transform
from polytempo.core.driver import interpreted
from polytempo.core.op import Push, Start
from polytempo.core.state import duplicate
from polytempo.server.encoding import Coding, check_finite
from polytempo.server.layout import Parameter, Span


class EncodedPushes(NamedTuple):
    """The transform's state, and the codec's of each range of parameters."""

    inner: State
    codec: dict[str, CodecState]


def inner_state(state: State) -> State:
    """The transform's own state, of `encoded` or not."""
    return state.inner if isinstance(state, EncodedPushes) else state


def coding_of(parameters: Bundle, codec: Codec) -> Coding:
    """The layout of a message with all parameters, on the host."""
    named = [(name, t.numel(), tuple(t.shape)) for name, t in parameters.tensors.items()]
    known = [Parameter(name, numel, shape=shape) for name, numel, shape in named]
    span = Span(0, sum(parameter.numel for parameter in known))
    return Coding(known, (span,), codec, next(iter(parameters.tensors.values())).dtype, own=False)


def encoded(transform: Transform, codec: Codec | None, number: Callable[[int], int]) -> Transform:
    """`transform` with pushes encoded by `codec`; for None, as it is.

    `number(rank)`: the worker's next push, from 1 on. A push is answered True where the message counts, and False where
    it does not: the residual stays as it was then. A begun push has the answer as its handle.

    Cost: a copy of the residuals for each push. NotFinite where a movement has NaN or an infinity.
    """
    if codec is None:
        return transform
    known: list[Coding] = []

    def coding(parameters: Bundle) -> Coding:
        known[:] = known or [coding_of(parameters, codec)]
        return known[0]

    def init(parameters: Bundle) -> EncodedPushes:
        return EncodedPushes(transform.init(parameters), coding(parameters).states)

    async def apply(port: Port, bundle: Bundle, state: EncodedPushes) -> tuple[Bundle | None, EncodedPushes]:
        layout, states = coding(bundle), state.codec

        async def performed(op: Op[Any]) -> Any:
            nonlocal states
            push = op.what if isinstance(op, Start) else op
            if not isinstance(push, Push):
                return await op
            flat, rank = push.gradient.detach(), port.world_rank
            flat = flat if flat.is_meta else flat.to("cpu")
            check_finite(flat, [layout], rank)
            message, after = await port.compute(
                lambda: layout.encode(flat, duplicate(states), number(rank), rank), layout.packing.flops / 2
            )
            coded = replace(push, gradient=message)
            work = await Start(coded) if isinstance(op, Start) else None
            if work.handle if work is not None else await coded:
                states = after
            return work

        answer, inner = await interpreted(transform.apply(port, bundle, state.inner), performed, (Push, Start))
        return answer, EncodedPushes(inner, states)

    return transform._replace(init=init, apply=apply)


def movement_bytes(parameters: Bundle, codec: Codec | None) -> int:
    """Bytes of a movement on its way; the most, where the codec's wires vary."""
    if codec is None:
        return sum(t.numel() * t.element_size() for t in parameters.tensors.values())
    return coding_of(parameters, codec).packing.num_bytes
