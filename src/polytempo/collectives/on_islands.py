"""Exchanges within islands of ranks, and between islands.

island 0: 0 ⇄ 1 ⇄ 2        every step: a transform within each island
          ⇅                 every H steps: another one between the first ranks, which then tell their islands
island 1: 3 ⇄ 4 ⇄ 5
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.collectives.islands import Islands, OnIslands, inside, islands_of, leaders
from polytempo.core import Bundle, Cost, Port, Promise, State, Transform, averaging, native
from polytempo.core.cost import Exchange, Sent, at_once, num_bytes, told
from polytempo.core.state import Residual, tuple_like
from polytempo.core.transform import cost_of


def within_islands(transform: Transform, number: Islands) -> Transform:
    """`transform` within each of `number` islands. A rank's share of the whole becomes its share of its island.

    Cost: `transform`'s in each island, at the same time; where batches are uneven, 8 bytes more.
    """
    statistics = transform.beside or averaging(native)

    async def beside(port: Port, bundle: Bundle, state: State) -> Bundle:
        island = inside(port, number)
        return await statistics(island, await _shared(island, bundle), state)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        each = [cost_of(transform, parameters, len(ranks)) for ranks in islands_of(num_ranks, number)]
        columns = zip_longest(*(one.exchanges for one in each))
        return Cost(tuple(_at_once(column, number) for column in columns), max(one.memory_bytes for one in each))

    apply, promises = WithinIslands(transform, number), transform.promises & ~Promise.LINEAR
    islands = number if isinstance(number, int) else len(number)
    least = 1 if transform.least_ranks == 1 else islands * transform.least_ranks
    return Transform(transform.init, apply, promises, cost, beside, least_ranks=least)


@dataclass(frozen=True)
class WithinIslands:
    """The `apply` of `within_islands`."""

    transform: Transform
    number: Islands

    async def __call__(self, port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        island = inside(port, self.number)
        found, state = await self.transform.apply(island, await _shared(island, bundle), state)
        alone = found is bundle and port.size > 1  # ranks have an answer together, or none has
        return (bundle.with_flat(bundle.flat) if alone else found), state


class IslandState(NamedTuple):
    """The state of a transform between islands, and a mark that there are some."""

    inner: State


def between_islands(transform: Transform, number: Islands) -> Transform:
    """`transform` between the first ranks of `number` islands; each hands the answer and the state to its island.

    So every rank can go on alone. A `Residual` stays with the first rank.
    Cost: `transform`'s between the first ranks; then K bytes, and the state's, to all others in the island.
    """
    statistics = transform.beside or averaging(native)

    def init(parameters: Bundle) -> IslandState:
        return IslandState(transform.init(parameters))

    async def beside(port: Port, bundle: Bundle, state: IslandState) -> Bundle:
        island = inside(port, number)
        found = await averaging(native)(island, await _shared(island, bundle), None)
        found.share = None
        if island.rank == 0:
            found = await statistics(leaders(port, number), found, state.inner)
        return bundle.with_flat((await _handed(island, found)).flat)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        islands = islands_of(num_ranks, number)
        between = cost_of(transform, parameters, len(islands))
        found = [each._replace(sums=_routed(each, number, leading=True)) for each in between.exchanges]
        leaves = [*_leaves(parameters), *_leaves(transform.init(parameters))]
        for leaf in leaves if len(islands) < num_ranks else []:
            found.append(Exchange("broadcast", at_once([told(leaf, len(r)) for r in islands if len(r) > 1])))
        return Cost(tuple(found), between.memory_bytes)

    apply, promises = BetweenIslands(transform, number), transform.promises & ~Promise.LINEAR
    return Transform(init, apply, promises, cost, beside, least_ranks=transform.least_ranks)


@dataclass(frozen=True)
class BetweenIslands:
    """The `apply` of `between_islands`."""

    transform: Transform
    number: Islands

    async def __call__(self, port: Port, bundle: Bundle, state: IslandState) -> tuple[Bundle | None, IslandState]:
        island, inner = inside(port, self.number), state.inner
        if island.rank == 0:
            found, inner = await self.transform.apply(leaders(port, self.number), bundle, inner)
            bundle = bundle if found is None else found
        return await _handed(island, bundle), IslandState(await _handed(island, inner))


async def _shared(island: Port, bundle: Bundle) -> Bundle:
    """The bundle with its rank's share of the island."""
    if bundle.share is not None:
        total = float(await island.all_reduce(torch.tensor([bundle.share], dtype=torch.float64)))
        bundle.share = bundle.share / total if total else 0.0
    return bundle


async def _handed(island: Port, given: Any) -> Any:
    """A bundle, or a state, of the island's first rank."""
    if island.size == 1 or isinstance(given, Residual):
        return given
    if isinstance(given, Bundle):
        sent = given.flat.clone() if island.rank == 0 else torch.empty_like(given.flat)
        return given.with_flat(await island.broadcast(sent))
    if isinstance(given, Tensor):
        return await island.broadcast(given.clone())
    if isinstance(given, dict):
        return {key: await _handed(island, value) for key, value in given.items()}
    if isinstance(given, tuple):
        return tuple_like(given, [await _handed(island, value) for value in given])
    if isinstance(given, int | float):
        return type(given)(await island.broadcast(torch.tensor([given], dtype=torch.float64)))
    return given


def _leaves(given: Any) -> Iterator[int]:
    """Bytes of each message of `_handed`."""
    if isinstance(given, Bundle):
        yield num_bytes(given)
    elif isinstance(given, Tensor):
        yield given.numel() * given.element_size()
    elif isinstance(given, dict | tuple) and not isinstance(given, Residual):
        for value in given.values() if isinstance(given, dict) else given:
            yield from _leaves(value)
    elif isinstance(given, int | float):
        yield torch.float64.itemsize


def _at_once(exchanges: tuple[Exchange | None, ...], number: Islands) -> Exchange:
    """The same exchange of all islands; the first island is the largest."""
    first = exchanges[0]
    assert first is not None
    sent = at_once([Sent() if each is None else each.sent for each in exchanges])
    return first._replace(sent=sent, sums=_routed(first, number, leading=False))


def _routed(exchange: Exchange, number: Islands, *, leading: bool) -> tuple[Any, ...]:
    return tuple(each._replace(route=OnIslands(each.route, number, leading)) for each in exchange.sums)
