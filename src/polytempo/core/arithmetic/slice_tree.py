"""A binary tree over the slices of a batch, which fixes the order of additions and the slices of each rank.

    8 slices, 3 ranks          ╭───────┴───────╮
                           ╭───┴───╮       ╭───┴───╮
                         ╭─┴─╮   ╭─┴─╮   ╭─┴─╮   ╭─┴─╮
                slice    0   1   2   3   4   5   6   7
                rank     0   0   1   1   2   2   2   2

Each rank has the slices under one node, and the nodes above are the same rule's tree over ranks. So ranks that add
along their own subtree, and then along the tree over ranks, do the additions of one rank that adds along the whole.

A rank may compute other slices than its node has (`data.speed_shares`). It adds along the `nodes` within these slices,
and hands each sum to the node's rank, which adds the sums by `from_nodes`: the same additions again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def along_tree(count: int, leaf: Callable[[int], T], add: Callable[[T, T], T]) -> T:
    """The sum of `leaf(0)` to `leaf(count - 1)`, called in this order: the first half's sum plus the second half's.

    The first half is the longer one. Memory: at most ⌈log₂count⌉ + 1 values.

    >>> along_tree(5, "abcde".__getitem__, lambda left, right: f"({left}{right})")
    '(((ab)c)(de))'
    """

    def under(first: int, count: int) -> T:
        if count == 1:
            return leaf(first)
        left = (count + 1) // 2
        earlier = under(first, left)
        return add(earlier, under(first + left, count - left))

    return under(0, count)


def subtree(slices: int, size: int, rank: int) -> range:
    """The slices of `rank` of `size` ranks, at least one. `size` is at most `slices`.

    >>> [list(subtree(8, 3, rank)) for rank in range(3)]
    [[0, 1], [2, 3], [4, 5, 6, 7]]
    """
    first, count = 0, slices
    while size > 1:
        left, left_ranks = (count + 1) // 2, (size + 1) // 2
        if rank < left_ranks:
            count, size = left, left_ranks
        else:
            first, count, rank, size = first + left, count - left, rank - left_ranks, size - left_ranks
    return range(first, first + count)


def nodes(tree: range, within: range) -> list[range]:
    """The largest nodes of the tree over the slices `tree` that have slices of `within` alone, in their order.

    >>> nodes(range(0, 8), range(1, 7))
    [range(1, 2), range(2, 4), range(4, 6), range(6, 7)]
    """
    if within.start <= tree.start and tree.stop <= within.stop:
        return [tree]
    if within.stop <= tree.start or tree.stop <= within.start:
        return []
    return [node for half in _halves(tree) for node in nodes(half, within)]


def from_nodes(tree: range, found: dict[range, T], add: Callable[[T, T], T]) -> T:
    """The sum of `along_tree` over the slices `tree`, from the sums of nodes that have each of its slices once.

    The nodes are taken out of `found`, so that each is free once it is added.

    >>> from_nodes(range(4, 7), {range(4, 6): "(ab)", range(6, 7): "c"}, lambda left, right: f"({left}{right})")
    '((ab)c)'
    """
    if tree in found:
        return found.pop(tree)
    left, right = _halves(tree)
    return add(from_nodes(left, found, add), from_nodes(right, found, add))


def _halves(tree: range) -> tuple[range, range]:
    middle = tree.start + (len(tree) + 1) // 2
    return range(tree.start, middle), range(middle, tree.stop)
