"""Transforms of a worker: pushes of summed gradients every n steps, pulls of parameters every m, elastic averaging."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from polytempo.core import Bundle, Cost, Exchange, Late, Op, Port, Price, Promise, State, Steps, Transform, Work
from polytempo.core.arithmetic.merge import add_
from polytempo.core.cost import num_bytes
from polytempo.core.state import settled


class Pushing(NamedTuple):
    """Steps so far, the sum that has not been pushed, and the pushes under way, oldest first (None: no push)."""

    step: int
    accrued: Bundle | None
    under_way: tuple[Late | None, ...]


def push(every: int = 1, *, overlap: bool = False, steps_locally: bool = False) -> Transform:
    """Push the sum of the gradients of `every` steps (Downpour's n_push) at steps n, 2n, 3n, …

        every=2      step    1      2      3      4      5      6
        begins to push       -    g1+g2    -    g3+g4    -    g5+g6
        has waited for       -      -    g1+g2    -    g3+g4    -
        ... with overlap     -      -      -      -    g1+g2    -

    A push is only begun here, so that a pull of the same step follows it immediately: both together are one round trip.
    A worker that pulls every step thus waits for the push, too.

    `steps_locally`: the gradient also goes to the worker's own optimizer, unchanged, and a copy is pushed. Otherwise
    the worker's optimizer takes no step.

    Memory: with every=1 the gradient is pushed in place; a local step costs a copy of it, and overlap one more.
    """
    if every < 1:
        raise ValueError(f"push needs a period of at least 1 step, got every={every}")

    def init(parameters: Bundle) -> Pushing:
        return Pushing(0, None, (None,) * (2 if overlap else 1))

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, Pushing]:
        assert isinstance(state, Pushing)
        oldest, *others = state.under_way
        await settled(oldest)
        under_way = (None, *others)
        step = state.step + 1
        sum_so_far = _plus(state.accrued, bundle, steps_locally)
        answer = bundle if steps_locally else None
        if step % every:
            return answer, Pushing(step, sum_so_far, under_way)
        late = await begin(port, port.push(sum_so_far.flat, step), lambda _: None)
        return answer, Pushing(step, None, (*under_way[1:], late))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost((Exchange("push", steps=Steps().every(every), server="push"),))

    return Transform(init, apply, Promise(0), cost)


def _plus(accrued: Bundle | None, bundle: Bundle, copies: bool) -> Bundle:
    """The sum with this step's gradient, in memory that stays as it is until it has been pushed."""
    if accrued is None:
        return bundle.copy() if copies else bundle
    accrued.flat.add_(bundle.flat)
    return accrued


T = TypeVar("T")


class ConvertedWork(Work[tuple[Any]], frozen=True, eq=False):
    """Work under way with the answer `(convert(answer),)`: `Late` takes its value out of a tuple."""

    convert: Callable[[Any], Any]

    def __await__(self) -> Generator[Op[Any], Any, tuple[Any]]:
        answer = yield Work(self.handle)
        return (self.convert(answer),)


async def begin(port: Port, op: Op[T], convert: Callable[[T], Any]) -> Late:
    """Begin `op`; `settled` waits for it and returns `convert` of its answer, as the state that is to be saved."""
    return Late(ConvertedWork((await port.start(op)).handle, convert), 0)


class Pulling(NamedTuple):
    """Steps so far, and the pull that the step before began (None: it began none)."""

    step: int
    due: Late | Bundle | None


def fetched(state: State) -> State:
    """A state of `pull`, settled, of a worker that has just fetched the weights: the step before brought older ones."""
    return state._replace(due=None) if isinstance(state, Pulling) else state


def pull(every: int = 1, *, overlap: bool = False) -> Transform:
    """Continue from the server's parameters after steps m, 2m, 3m, … (m = `every`, Downpour's n_fetch).

    With `overlap` the pull only begins then, and its parameters are used after the step that follows: the message
    travels meanwhile. The worker's own changes of that step are dropped; the server has them by the push. The worker's
    program sets the parameters before the first step.

    The bundle in the answer is lent by the server and read-only. With `overlap` it is the worker's own copy.
    """
    if every < 1:
        raise ValueError(f"pull needs a period of at least 1 step, got every={every}")

    def init(parameters: Bundle) -> Pulling:
        return Pulling(0, None)

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, Pulling]:
        assert isinstance(state, Pulling)
        step = state.step + 1
        arrived: Bundle | None = await settled(state.due)
        if step % every:
            return arrived or bundle, Pulling(step, None)
        if not overlap:
            return bundle.with_flat(await port.pull(step)), Pulling(step, None)

        def own(values: Tensor) -> Bundle:
            return bundle.with_flat(values.clone())

        return arrived or bundle, Pulling(step, await begin(port, port.pull(step), own))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost((Exchange("pull", steps=Steps().every(every), server="pull"),))

    return Transform(init, apply, Promise(0), cost)


class Exchanging(NamedTuple):
    """The state of `exchange`: how many steps it has seen."""

    step: int


def exchange(every: int) -> Transform:
    """Push the worker's own parameters x and continue from x - d, in steps τ, 2τ, 3τ, … (τ = `every`).

    d = α (x - x̃) is the server's answer, x̃ its center, which moves by + d at the same moment (the rule `elastic`).

    Cost: the parameters one way, the difference the other; the worker waits for it.
    """
    if every < 1:
        raise ValueError(f"exchange needs a period of at least 1 step, got every={every}")

    def init(parameters: Bundle) -> Exchanging:
        return Exchanging(0)

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, Exchanging]:
        assert isinstance(state, Exchanging)
        step = state.step + 1
        if step % every:
            return bundle, Exchanging(step)
        difference = await port.push(bundle.flat, step)
        if difference is None:  # the shards had applied this push before
            return bundle, Exchanging(step)
        return bundle.with_flat(add_(bundle.flat, difference, -1.0)), Exchanging(step)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        there = Exchange("push", steps=Steps().every(every), server="push")
        return Cost((there, there._replace(by="its answer", server="pull")))

    return Transform(init, apply, Promise(0), cost)


class Moving(NamedTuple):
    """Steps so far, the parameters that the next movement is counted from, and the server's on their way (or None).

    While these are on their way, `anchor` has the worker's own parameters of the push.
    """

    step: int
    anchor: Bundle
    coming: Late | Bundle | None = None


def push_movement(every: int, delay: int = 0) -> Transform:
    """Push φ - x, the movement of the worker's parameters x from φ, in steps H, 2H, 3H, … (H = `every`).

    φ is the server's parameters of the last time. A pull of the next φ follows the push immediately, so both together
    are one round trip. With τ = `delay` that travels while the worker goes on, and in steps H + τ, 2H + τ, …

        x ← φ + (x - x of τ steps ago)

    so these τ steps are kept, and are a part of the next movement. Each step is in one movement.

    Cost: the parameters there and back; memory for φ, and with a delay for one more.
    """
    if every < 1:
        raise ValueError(f"push_movement needs a period of at least 1 step, got every={every}")
    if not 0 <= delay < every:
        raise ValueError(f"an answer that comes {delay} steps late needs a period of more steps, got {every}")
    takes = Steps(every + delay, every)

    def init(parameters: Bundle) -> Moving:
        return Moving(0, parameters.copy())

    async def apply(port: Port, bundle: Bundle, state: Moving) -> tuple[Bundle | None, Moving]:
        assert isinstance(state, Moving)
        step, (_, anchor, coming) = state.step + 1, state
        if step % every == 0:
            late = await begin(port, port.push(anchor.flat - bundle.flat, step), lambda _: None)
            if delay:
                anchor = bundle.copy()
                coming = await begin(port, port.pull(step), lambda values: anchor.with_flat(values.clone()))
            else:
                anchor = bundle.with_flat(await port.pull(step))
                await settled(late)
                return anchor, Moving(step, anchor.copy())
        elif coming is not None and takes.has(step):  # the push was answered before
            answer = await settled(coming)
            return bundle.with_flat(answer.flat + (bundle.flat - anchor.flat)), Moving(step, answer)
        return bundle, Moving(step, anchor, coming)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        there, back = (Exchange(kind, steps=Steps().every(every), server=kind) for kind in ("push", "pull"))
        return Cost((there, back), num_bytes(parameters) * (2 if delay else 1))

    return Transform(init, apply, Promise(0), cost)


def server_price(num_workers: int, num_bytes: float, latency_s: float, bytes_per_s: float, *, shards: int = 1) -> Price:
    """N·K/S bytes through each of S shards on hosts of their own, there and back; no less than K through a worker.

        2α + 2 · max(N/S, 1) · K/B

    Raises ValueError for fewer than one shard. Source: F. Iandola et al., "FireCaffe", 2016, section 4.
    """
    if shards < 1:
        raise ValueError(f"a parameter server has at least 1 shard, got {shards}")
    if num_workers == 1:
        return Price(0, 0.0, 0.0)
    busiest = max(num_workers / shards, 1.0) * num_bytes
    return Price(2, busiest, 2 * (latency_s + busiest / bytes_per_s))
