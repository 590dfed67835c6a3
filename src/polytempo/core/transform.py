"""`Transform`: changes of gradients before a step, or of parameters after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Flag, auto
from functools import reduce
from operator import and_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core.bundle import Bundle
from polytempo.core.cost import Cost, CostOf
from polytempo.core.op import Program
from polytempo.core.port import Port
from polytempo.core.route import Route

State = Any
"""A tree of tuples, NamedTuples, dicts, Bundles, tensors, numbers and None (see `core.state`)."""

Applied = Program[tuple[Bundle | None, State]]

Beside = Callable[[Port, Bundle, State], Program[Bundle]]
"""`await beside(port, bundle, state)`: the mean of other tensors than gradients and parameters, with the ranks that a
transform in `state` talks to, by the route of its own messages."""


class Promise(Flag):
    """Properties of a transform that callers may rely on. A composition keeps the promises that all its parts make."""

    SEPARABLE = auto()
    """Applying it to parts of a model one by one equals applying it to the whole, so a part may be exchanged while the
    rest is still being computed."""
    IDLE_ALONE = auto()
    """One rank alone does nothing."""
    WEIGHS = auto()
    """An update with share 0 counts nothing, so a rank without work can take part unheard (`Handle.join`)."""
    LINEAR = auto()
    """All ranks get Σ wᵢ xᵢ, with Σ wᵢ = 1, of this exchange alone. So gradients of a second backward pass may be added
    to an answer and exchanged together with it, and a common factor comes out again (a loss scale)."""


class Transform(NamedTuple):
    """A pair of functions, after optax: `init(parameters) -> state`, and
    `await apply(port, bundle, state) -> (bundle, state)`.

    `apply` may communicate. It owns its bundle and may overwrite it. It returns the same object if it did nothing, and
    None if this step must have no update.

    A step may need several exchanges, and only the last one counts. So `apply` may be called again from the same state,
    with the same result. It overwrites only `Residual` leaves of the state, and its caller does not overwrite an answer
    that the state still holds; a caller that applies twice passes a `duplicate`.

    `promises`: properties that hold in every step and with any number of ranks.
    `cost`: messages, computations and memory, computed from shapes (`polytempo.explain`). None: unknown.
    `beside`: exchanges running statistics in a step with an exchange; `state` is the state that `apply` received in
    that step. None: the transform talks to no rank itself, or to all, and `averaging(native)` will do.
    `least_ranks`: the number of ranks that its merges need, unless a rank is alone.
    `name`: the call that makes it, where it is an argument of a strategy.
    `at_server`: the same step of an outer optimizer inside a parameter server (a `core.rule.UpdateRule`). None: there
    is none.
    """

    init: Callable[[Bundle], State]
    apply: Callable[[Port, Bundle, State], Applied]
    promises: Promise = Promise.SEPARABLE
    cost: CostOf | None = None
    beside: Beside | None = None
    name: str = ""
    at_server: object | None = None
    least_ranks: int = 1


def cost_of(transform: Transform, parameters: Bundle, num_ranks: int) -> Cost:
    """The cost that `transform` declares; no cost, where it is left out with so many ranks. ValueError without one."""
    if is_idle(transform, num_ranks):
        return Cost()
    if transform.cost is None:
        name = getattr(transform.apply, "__qualname__", "?")
        raise ValueError(f"{name} does not say its cost; give its transform cost=…, a function that returns a Cost")
    return transform.cost(parameters, num_ranks)


def averaging(route: Route) -> Beside:
    """Σᵢ shareᵢ · xᵢ over all ranks i by `route`; shareᵢ is 1/N where the bundle does not say."""

    async def average(port: Port, bundle: Bundle, state: State) -> Bundle:
        share = 1 / port.size if bundle.share is None else bundle.share
        return bundle.with_flat(await route(port, bundle.scaled(share) if share else torch.zeros_like(bundle.flat)))

    return average


def beside_of(transforms: Mapping[Any, Transform]) -> Beside | None:
    """The `beside` of the first that has one, where each one's state stands under its key."""
    for key, transform in transforms.items():
        if transform.beside is not None:
            return inside(transform.beside, itemgetter(key))
    return None


def inside(beside: Beside | None, inner: Callable[[State], State]) -> Beside | None:
    """The `beside` of a transform around another one with the state `inner(state)`."""
    if beside is None:
        return None
    return lambda port, bundle, state: beside(port, bundle, inner(state))


def stateless(
    apply: Callable[[Port, Bundle], Program[Bundle]],
    *,
    promises: Promise = Promise.SEPARABLE,
    cost: CostOf | None = None,
    beside: Beside | None = None,
    least_ranks: int = 1,
) -> Transform:
    """A transform that remembers nothing and, with one rank, does nothing."""

    async def with_state(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        return (bundle if port.size == 1 else await apply(port, bundle)), state

    promises |= Promise.IDLE_ALONE
    return Transform(lambda parameters: None, with_state, promises, cost, beside, least_ranks=least_ranks)


def identity() -> Transform:
    """Nothing happens: the one transform that is always idle."""
    return _IDENTITY


async def _nothing(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
    return bundle, state


_IDENTITY = Transform(lambda parameters: None, _nothing, ~Promise(0), lambda parameters, num_ranks: Cost())


def is_idle(transform: Transform, num_ranks: int) -> bool:
    """True if `transform` can be left out in a world of `num_ranks`."""
    return transform.apply is _nothing or (num_ranks == 1 and Promise.IDLE_ALONE in transform.promises)


def _kept(parts: Iterable[Transform]) -> Promise:
    return reduce(and_, (part.promises for part in parts), ~Promise(0))


def _most(parts: Iterable[Transform]) -> int:
    """The number of ranks that the merges of all parts need."""
    return max((part.least_ranks for part in parts), default=1)


def chain(*transforms: Transform) -> Transform:
    """One after the other. A step without an update (None) ends the chain for that step."""

    def init(parameters: Bundle) -> State:
        return tuple(t.init(parameters) for t in transforms)

    async def apply(port: Port, bundle: Bundle | None, state: State) -> tuple[Bundle | None, State]:
        states = list(state)
        for i, transform in enumerate(transforms):
            if bundle is None:
                break
            bundle, states[i] = await transform.apply(port, bundle, states[i])
        return bundle, tuple(states)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return reduce(Cost.plus, (cost_of(t, parameters, num_ranks) for t in transforms), Cost())

    beside = beside_of(dict(enumerate(transforms)))
    return Transform(init, apply, _kept(transforms), cost, beside, least_ranks=_most(transforms))


def split(label: Callable[[str, Tensor], str], branches: Mapping[str, Transform]) -> Transform:
    """Each tensor goes through the branch that `label(name, tensor)` names, in the branches' order.

    Branches must update on the same steps: a None from one of them drops the step of its tensors
    only if every branch returns None.
    """

    def parts(bundle: Bundle) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {branch: [] for branch in branches}
        for name, tensor in bundle.tensors.items():
            branch = label(name, tensor)
            if branch not in found:
                raise ValueError(f"split sends {name!r} to branch {branch!r}, but there are only {sorted(found)}")
            found[branch].append(name)
        return found

    return divided(parts, branches)


def only(chosen: Callable[[str], bool], transform: Transform) -> Transform:
    """Tensors with a `chosen` name go through `transform`, which remembers nothing; others stay as they are.

    It takes tensors that come later, too, as an optimizer's, which exist after its first step.
    """

    def names(bundle: Bundle) -> list[str]:
        return [name for name in bundle.names if chosen(name)]

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        if not (found := names(bundle)):
            return bundle, state
        given = bundle.select(found)
        piece, _ = await transform.apply(port, given, None)
        if piece is given:
            return bundle, state
        assert piece is not None, "a transform of some tensors answers in every step"
        present = bundle.views if bundle.packed else bundle.tensors
        return Bundle({name: piece.views.get(name, tensor) for name, tensor in present.items()}, bundle.share), state

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        found = names(parameters)
        return cost_of(transform, parameters.select(found), num_ranks) if found else Cost()

    def init(parameters: Bundle) -> State:
        return None

    promises, least = transform.promises, transform.least_ranks
    return Transform(init, apply, promises, cost, transform.beside, least_ranks=least)


def divided(parts: Callable[[Bundle], Mapping[str, list[str]]], branches: Mapping[str, Transform]) -> Transform:
    """The tensors that `parts(bundle)` names for a branch go through it; see `split`. Each has a branch.

    `parts` looks at names, shapes and dtypes alone. Branches without tensors are left out.
    """

    def present(bundle: Bundle) -> dict[str, list[str]]:
        return {branch: names for branch, names in parts(bundle).items() if names}

    def init(parameters: Bundle) -> State:
        return {
            branch: branches[branch].init(parameters.select(names)) for branch, names in present(parameters).items()
        }

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        pieces: dict[str, Tensor] = {}
        states: dict[str, State] = {}
        untouched = True
        for branch, names in present(bundle).items():
            given = bundle.select(names)
            piece, states[branch] = await branches[branch].apply(port, given, state[branch])
            untouched = untouched and piece is given
            if piece is not None:
                pieces.update(piece.views if piece.packed else piece.tensors)
        if untouched:
            return bundle, states
        if not pieces:
            return None, states
        if len(pieces) != len(bundle.tensors):
            raise ValueError("the branches of a split must update on the same steps; use the same period in each")
        return Bundle({name: pieces[name] for name in bundle.names}, bundle.share), states

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        total = Cost()
        for branch, names in present(parameters).items():
            of = cost_of(branches[branch], parameters.select(names), num_ranks)
            exchanges = [each._replace(tensors=f"{branch} {each.tensors}".strip()) for each in of.exchanges]
            total = total.plus(Cost(tuple(exchanges), of.memory_bytes))
        return total

    besides = {branch: each.beside for branch, each in branches.items() if each.beside is not None}

    async def beside(port: Port, bundle: Bundle, state: State) -> Bundle:
        branch = next(branch for branch in besides if branch in state)
        return await besides[branch](port, bundle, state[branch])

    parts_beside = beside if besides else None
    return Transform(init, apply, _kept(branches.values()), cost, parts_beside, least_ranks=_most(branches.values()))
