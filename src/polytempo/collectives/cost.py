"""Messages of a sum over all ranks, by its route: to the byte, whether its numbers divide evenly or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from polytempo.collectives.halving import halving_doubling
from polytempo.collectives.hierarchy import Hierarchical
from polytempo.collectives.invariant import Invariant
from polytempo.collectives.islands import OnIslands
from polytempo.collectives.ring import ring, ring_price
from polytempo.collectives.tree import num_pieces, star, tree
from polytempo.core import Route, Sent, native
from polytempo.core.cost import at_once, route_name


def sum_cost(route: Route, hosts: Sequence[int], numel: int, itemsize: int) -> Sent:
    """The messages of a sum of `numel` numbers of `itemsize` bytes; rank r is on host `hosts[r]`.

    All routes but `native` send 2(N-1) · K bytes together; they differ in messages, rounds, and the busiest rank.
    Errors: ValueError for a route that is none of `polytempo.collectives`.
    """
    if len(hosts) == 1:
        return Sent()
    if isinstance(route, Hierarchical):
        return _hierarchical(route, hosts, numel, itemsize)
    if isinstance(route, OnIslands):
        return at_once([sum_cost(route.route, group, numel, itemsize) for group in route.groups(hosts)])
    if isinstance(route, Invariant):
        route.check(len(hosts))
        return _invariant(len(hosts), numel, itemsize)
    if route not in _COSTS:
        known = ", ".join(sorted(route_name(each) for each in _COSTS))
        raise ValueError(
            f"the messages of route={route_name(route)} are not known; known are {known}, hierarchical and invariant"
        )
    return _COSTS[route](len(hosts), numel, itemsize)


def _native(num_ranks: int, numel: int, itemsize: int) -> Sent:
    """A ring's, as a virtual world counts it: one message a rank."""
    each = round(ring_price(num_ranks, numel * itemsize, 0.0, 1.0).busiest_bytes)
    return Sent(num_ranks, num_ranks * each, busiest_bytes=each, rounds=2 * (num_ranks - 1))


def _ring(num_ranks: int, numel: int, itemsize: int) -> Sent:
    smallest, longer = divmod(numel, num_ranks)
    kept = min(2 * smallest + (i < longer) + ((i + 1) % num_ranks < longer) for i in range(num_ranks))
    rounds = 2 * (num_ranks - 1)
    return Sent(
        num_ranks * rounds, rounds * numel * itemsize, busiest_bytes=(2 * numel - kept) * itemsize, rounds=rounds
    )


def _invariant(num_ranks: int, numel: int, itemsize: int) -> Sent:
    longest, others = -(-numel // num_ranks), num_ranks - 1
    busiest = numel + (others - 1) * longest  # all stripes but its own, and that one to each of the others
    return Sent(
        2 * num_ranks * others, 2 * others * numel * itemsize, busiest_bytes=busiest * itemsize, rounds=2 * others
    )


def _tree(num_ranks: int, numel: int, itemsize: int) -> Sent:
    others, levels, each = num_ranks - 1, (num_ranks - 1).bit_length(), numel * itemsize
    messages = others * (1 + num_pieces(numel, itemsize))
    return Sent(messages, 2 * others * each, busiest_bytes=levels * each, rounds=2 * levels)


def _halving_doubling(num_ranks: int, numel: int, itemsize: int) -> Sent:
    power = 1 << (num_ranks.bit_length() - 1)
    levels, extra, held, swapped = power.bit_length() - 1, num_ranks - power, numel, 0
    for _ in range(levels):  # rank 0 keeps the longer half
        swapped, held = swapped + held, -(-held // 2)
    return Sent(
        2 * (power * levels + extra),
        2 * (num_ranks - 1) * numel * itemsize,
        busiest_bytes=(swapped + (numel if extra else 0)) * itemsize,
        rounds=2 * levels + 2 * (extra > 0),
    )


def _star(num_ranks: int, numel: int, itemsize: int) -> Sent:
    others, each = num_ranks - 1, numel * itemsize
    return Sent(2 * others, 2 * others * each, busiest_bytes=others * each, rounds=2)


def _hierarchical(route: Hierarchical, hosts: Sequence[int], numel: int, itemsize: int) -> Sent:
    ranks_of = Counter(hosts)
    inside = at_once([_tree(num_ranks, numel, itemsize) for num_ranks in ranks_of.values() if num_ranks > 1])
    return inside.plus(sum_cost(route.between, list(ranks_of), numel, itemsize))


_COSTS: dict[Route, Callable[[int, int, int], Sent]] = {
    native: _native,
    ring: _ring,
    tree: _tree,
    halving_doubling: _halving_doubling,
    star: _star,
}
