"""The tree over slices: any number of ranks does the same additions, and each has the slices under one node."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from polytempo.core.arithmetic.slice_tree import along_tree, from_nodes, nodes, subtree


def written(count: int, leaf: list[str]) -> str:
    """The additions, as they are made."""
    return along_tree(count, leaf.__getitem__, lambda left, right: f"({left}+{right})")


def test_trees_by_table() -> None:
    table = {
        1: "0",
        2: "(0+1)",
        3: "((0+1)+2)",
        5: "(((0+1)+2)+(3+4))",
        8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
    }
    assert {count: written(count, [str(i) for i in range(count)]) for count in table} == table


def test_subtrees_by_table() -> None:
    table = {
        (8, 1): [8],
        (8, 2): [4, 4],
        (8, 3): [2, 2, 4],
        (8, 5): [1, 1, 2, 2, 2],
        (8, 8): [1] * 8,
        (6, 4): [2, 1, 2, 1],
        (7, 3): [2, 2, 3],
    }
    found = {case: [len(subtree(*case, rank)) for rank in range(case[1])] for case in table}
    assert found == table


@pytest.mark.parametrize("slices", range(1, 18))
def test_any_number_of_ranks_does_the_additions_of_one(slices: int) -> None:
    names = [str(i) for i in range(slices)]
    for size in range(1, slices + 1):
        own = [subtree(slices, size, rank) for rank in range(size)]
        assert [number for part in own for number in part] == list(range(slices))
        assert max(map(len, own)) <= -(-slices // (1 << (size.bit_length() - 1)))
        sums = [written(len(part), names[part.start : part.stop]) for part in own]
        assert written(size, sums) == written(slices, names), size


@pytest.mark.parametrize("slices", [1, 5, 8, 11])
def test_parts_of_any_sizes_do_the_additions_of_one(slices: int) -> None:
    """Every cut of the slices into one to three runs, of ranks that own a subtree each."""
    names = [str(i) for i in range(slices)]
    for size in range(1, min(slices, 3) + 1):
        for cuts in combinations(range(1, slices), size - 1):
            runs = [range(*ends) for ends in pairwise([0, *cuts, slices])]
            sums = []
            for own in (subtree(slices, size, rank) for rank in range(size)):
                found = {
                    node: written(len(node), names[node.start : node.stop]) for run in runs for node in nodes(own, run)
                }
                sums.append(from_nodes(own, found, lambda left, right: f"({left}+{right})"))
                assert not found, "added nodes are free"
            assert written(size, sums) == written(slices, names), runs
