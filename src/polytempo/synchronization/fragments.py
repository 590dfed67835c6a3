"""Fragments of a model with clocks of their own, each exchanged behind the steps after its turn.

Source: A. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from polytempo.core import Bundle, Late, Port, Promise, State, Steps, Transform
from polytempo.core.cost import Cost, num_bytes
from polytempo.core.state import duplicate, settled
from polytempo.core.transform import cost_of, divided

Blend = float | Literal["keep"]
"""The part of present values that stays when an answer arrives; "keep": all the movement since it was asked for."""


def fragments(num: int, period: int, make: Callable[[int, int], Transform]) -> Transform:
    """Cut a model into P = `num` fragments; fragment p, from 0, goes through `make(p, first)`, with turns of its own.

        step       H/P     2H/P    3H/P    …    H + H/P          H = `period`
        turn of    0       1       2            0                `first` = (p + 1) H/P

    Fragments are of whole tensors, in their order, with sizes as equal as these allow. A model with fewer tensors has
    fewer fragments; the clocks of the others stay. ValueError for more fragments than steps in a period.
    """
    if not 1 <= num <= period:
        raise ValueError(f"{num} fragments cannot take turns in {period} steps; give from 1 to {period} fragments")
    branches = {_name(p): make(p, period * (p + 1) // num) for p in range(num)}
    return divided(lambda bundle: cut(bundle, num), branches)


def cut(bundle: Bundle, num: int) -> dict[str, list[str]]:
    """Names of each fragment's tensors. A tensor belongs to the fragment that holds its middle element."""
    total = sum(tensor.numel() for tensor in bundle.tensors.values())
    found: dict[str, list[str]] = {_name(p): [] for p in range(num)}
    before = 0
    for name, tensor in bundle.tensors.items():
        middle = before + tensor.numel() // 2
        found[_name(min(num - 1, middle * num // max(1, total)))].append(name)
        before += tensor.numel()
    return found


def _name(p: int) -> str:
    return f"fragment {p}"


def check_blend(blend: Blend) -> None:
    """Raise ValueError unless it is a part, or "keep"."""
    if blend != "keep" and not (isinstance(blend, int | float) and 0 <= blend <= 1):
        raise ValueError(f"blend is the part of the present values that stays, from 0 to 1, or 'keep'; got {blend!r}")


def blended(blend: float, transform: Transform) -> Transform:
    """θ ← a θ + (1 - a) t(θ), a = `blend`."""
    check_blend(blend)
    if blend == 0:
        return transform

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        answer, after = await transform.apply(port, bundle.copy(), state)
        return (bundle if answer is None else bundle.with_flat(answer.flat.lerp(bundle.flat, blend))), after

    return transform._replace(apply=apply, promises=transform.promises & ~Promise.LINEAR)


class BehindState(NamedTuple):
    """Steps so far, the last answer or the one on its way (None: neither), its input, and the inner state."""

    step: int
    coming: Late | Bundle | None
    asked: Bundle | None
    """None where a blend needs none."""
    inner: Late | State


def behind(
    delay: int, transform: Transform, period: int, first: int, blend: Blend = 0.0, number: int = 0, of: int = 1
) -> Transform:
    """Begin `transform` at steps f, f + H, … (f = `first`, H = `period`); merge its answer τ = `delay` steps later.

        θ' = t(θ asked), of τ steps ago
        blend = a          θ ← a θ + (1 - a) θ'              0: overwritten, 1: unheard
        blend = "keep"     θ ← θ' + (θ - θ asked)            the movement of these τ steps is kept whole

    With `from_anchor` the next movement is counted from θ', so the part that stays of the movement meanwhile is sent
    then, once; a blend loses the other part. `number` < `of`: of several at a time, each has messages of its own.
    Memory: the answer, and with "keep" one more copy.
    """
    check_blend(blend)
    if not 1 <= delay < period:
        raise ValueError(f"an answer that comes {delay} steps late needs a period of more steps, got {period}")
    asks, takes = Steps(first, period), Steps(first + delay, period)

    def init(parameters: Bundle) -> BehindState:
        return BehindState(0, None, None, transform.init(parameters))

    async def begin(port: Port, bundle: Bundle, inner: State) -> tuple[Bundle | None, State]:
        return await transform.apply(port, bundle, duplicate(inner))

    async def apply(port: Port, bundle: Bundle, state: BehindState) -> tuple[Bundle | None, BehindState]:
        step, out = state.step + 1, bundle
        coming, asked, inner = state.coming, state.asked, state.inner
        if coming is not None and takes.has(step):
            answer, inner = await settled(coming), await settled(inner)
            if answer is not None:
                out = bundle.with_flat(_merged(bundle.flat, answer.flat, asked, blend))
            coming = answer
        if asks.has(step):
            asked = out.copy() if blend == "keep" else None
            work = await port.start(begin(port.on_channel_of_series(number, of), out.copy(), inner))
            coming, inner = Late(work, 0), Late(work, 1)
        return out, BehindState(step, coming, asked, inner)

    async def beside(port: Port, bundle: Bundle, state: BehindState) -> Bundle:
        assert transform.beside is not None
        return await transform.beside(port, bundle, await settled(state.inner))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        copies = 2 if blend == "keep" else 1
        found = cost_of(transform, parameters, num_ranks).at(lambda steps: steps.every(period).after(first - period))
        return found.remembering(copies * num_bytes(parameters))

    promises = transform.promises & ~(Promise.LINEAR | Promise.IDLE_ALONE)
    statistics = None if transform.beside is None else beside
    return Transform(init, apply, promises, cost, statistics, least_ranks=transform.least_ranks)


def _merged(present: Tensor, answer: Tensor, asked: Bundle | None, blend: Blend) -> Tensor:
    if blend == "keep":
        assert asked is not None
        return answer + (present - asked.flat)
    return answer.lerp(present, blend) if blend else answer.clone()
