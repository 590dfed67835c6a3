"""The parts of scheduled model parallelism: sets that do not interfere, borders, groups, and the readers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from polytempo.cluster import one_host
from polytempo.core import Port
from polytempo.data.scheduled import classes, correlated, drawn_documents, drawn_ratings, scenes, table, word_counts
from polytempo.partition.scheduled.design import cut_design
from polytempo.partition.scheduled.lda import apart, rising
from polytempo.partition.scheduled.program import borders
from polytempo.partition.scheduled.scheduler import Scheduler, SetRule, compatible
from polytempo.worlds import VirtualWorld


def test_a_set_is_kept_greedily_in_the_candidates_order() -> None:
    correlations = torch.eye(4, dtype=torch.float64)
    correlations[0, 1] = correlations[1, 0] = 0.1  # not below the bound
    correlations[0, 2] = correlations[2, 0] = -0.3
    correlations[1, 3] = correlations[3, 1] = 0.099
    assert compatible(correlations, 32, 0.1) == [0, 3]
    assert compatible(correlations[[1, 0, 2, 3]][:, [1, 0, 2, 3]], 32, 0.1) == [0, 2, 3]
    assert compatible(correlations, 1, 0.1) == [0]
    assert compatible(correlations, 32, 1.0) == [0, 1, 2, 3]


def test_small_correlations_of_many_do_not_add_up_to_one() -> None:
    """12 columns, all correlated 0.099: 11 together would have a sum of 0.99, 12 a sum of 1.089."""
    same = torch.full((12, 12), 0.099, dtype=torch.float64).fill_diagonal_(1.0)
    assert compatible(same, 32, 0.1) == list(range(11))


def test_the_round_robin_comes_to_each_once_in_a_cycle() -> None:
    scheduler = Scheduler(SetRule("round_robin", at_once=3, bound=None), torch.tensor([True] * 4 + [False]), seed=0)
    sets = [scheduler.kept(scheduler.candidates(), None).tolist() for _ in range(4)]
    assert sets == [[0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3]]  # column 4 is zero


def test_the_round_robin_puts_off_what_interferes() -> None:
    scheduler = Scheduler(SetRule("round_robin", at_once=2, bound=0.5), torch.ones(3, dtype=torch.bool), seed=0)
    twins = torch.eye(3, dtype=torch.float64)
    twins[0, 1] = twins[1, 0] = 0.9
    chosen = []
    for _ in range(3):
        candidates = scheduler.candidates()
        chosen.append(scheduler.kept(candidates, twins[candidates][:, candidates]).tolist())
    assert chosen == [[0, 2], [1, 2], [0, 2]]


def test_priority_comes_to_all_before_it_comes_back_and_then_follows_the_changes() -> None:
    scheduler = Scheduler(SetRule("priority", at_once=4, bound=None), torch.ones(64, dtype=torch.bool), seed=3)
    touched: set[int] = set()
    while len(touched) < 64:
        chosen = scheduler.kept(scheduler.candidates(), None)
        assert not touched & set(chosen.tolist())
        touched |= set(chosen.tolist())
        scheduler.moved(chosen, torch.zeros(len(chosen), dtype=torch.float64), None)
    scheduler.moved(torch.tensor([7]), torch.tensor([-1.0], dtype=torch.float64), None)
    drawn = [each for _ in range(50) for each in scheduler.candidates().tolist()]
    assert drawn.count(7) >= 48  # ten of eleven draws
    assert len(set(drawn)) >= 5  # none is out of reach


def test_priority_is_what_correlated_columns_have_moved_since() -> None:
    correlations = torch.eye(4, dtype=torch.float64)
    correlations[0, 1] = correlations[1, 0] = 0.9
    correlations[0, 2] = correlations[2, 0] = 0.05  # below the bound
    scheduler = Scheduler(SetRule(at_once=2, candidates=2), torch.ones(4, dtype=torch.bool), seed=0)
    scheduler.moved(torch.arange(4), torch.zeros(4, dtype=torch.float64), correlations)
    scheduler.moved(torch.tensor([0]), torch.tensor([-2.0], dtype=torch.float64), correlations[:1])
    drawn = [each for _ in range(40) for each in scheduler.candidates().tolist()]
    assert drawn.count(1) >= 38  # 0.9 · 2, beside a floor of 0.045 for each of the four
    scheduler.moved(torch.tensor([1]), torch.tensor([1.0], dtype=torch.float64), correlations[1:2])
    drawn = [each for _ in range(40) for each in scheduler.candidates().tolist()]
    assert drawn.count(0) >= 38  # 1 has moved by 1, and nothing has moved it since


@pytest.mark.parametrize(
    ("weights", "parts", "places"),
    [
        ([1.0] * 10, 2, [0, 5, 10]),
        ([1.0] * 10, 3, [0, 4, 7, 10]),
        ([8.0, 1.0, 1.0, 1.0, 1.0], 2, [0, 1, 5]),
        ([9.0, 0.1, 0.1], 3, [0, 1, 2, 3]),
        ([0.1, 0.1, 9.0], 3, [0, 1, 2, 3]),
        ([1.0], 3, [0, 0, 0, 1]),
    ],
)
def test_borders(weights: list[float], parts: int, places: list[int]) -> None:
    assert borders(torch.tensor(weights), parts) == places


def test_groups_repeat_neither_document_nor_word() -> None:
    documents, words = [0, 0, 1, 1, 0, 2], [5, 6, 5, 6, 5, 5]
    groups = [group.tolist() for group in apart(documents, words)]
    assert groups == [[0, 3], [1, 2], [4], [5]]
    assert apart([], []) == []


def test_rising() -> None:
    assert torch.allclose(rising(torch.tensor([0, 3]), 0.5).exp(), torch.tensor([1.0, 0.5 * 1.5 * 2.5]).double())


@pytest.mark.parametrize("by", ["rows", "columns"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_cut_design_answers_as_the_whole(by: str, workers: int) -> None:
    x, y = correlated(rows=7, columns=5, block=2, nonzeros=2, seed=1)
    chosen, others, amounts = torch.tensor([3, 0, 4]), torch.tensor([4, 1]), torch.tensor([0.5, 0.0, -2.0]).double()

    async def rank(port: Port) -> list[Tensor]:
        design = cut_design(port, x, by)
        own = design.samples(y)
        pieces = await port.all_gather(await design.products(chosen, own))
        return [
            sum(pieces, torch.zeros(3, dtype=torch.float64)),
            await design.squares(),
            await design.all_products(own),
            await design.gram(chosen, others),
            await design.gram(chosen, None),
            await design.total(own.square().sum()),
            await design.combination(chosen, amounts) - design.samples(x[:, chosen] @ amounts),
        ]

    columns = x[:, chosen]
    expected = [columns.T @ y, x.square().sum(0), x.T @ y, columns.T @ x[:, others], columns.T @ x, y.square().sum()]
    for answers in VirtualWorld(one_host(), workers).run(rank).results:
        assert answers is not None
        assert all(torch.allclose(a, e, atol=1e-12, rtol=0) for a, e in zip(answers, expected, strict=False))
        assert answers[-1].abs().max() <= 1e-12


def test_readers(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n" + "".join(f"{i},{2 * i}\n" for i in range(10)))
    x, y = table(str(tmp_path / "rows.csv"), "b")
    assert x.shape == (8, 1)
    assert torch.allclose(x[:, 0], y)  # both standardised
    (tmp_path / "rows.svm").write_text("+1 1:1 3:2\n-1 2:1\n")
    x, y = classes(str(tmp_path / "rows.svm"))
    assert (x.tolist(), y.tolist()) == ([[1, 0, 2], [0, 1, 0]], [1, -1])


def test_a_play_becomes_documents(tmp_path: Path) -> None:
    """Speakers, rare words and ubiquitous words are left out."""
    play = tmp_path / "play.txt"
    play.write_text("Ann:\nA rose, a rose!\n\nBob:\nA thorn: a rose.\n\nAnn:\nThorn.\n\nBob:\nLeaf and leaf.\n")
    documents = scenes(str(play), speeches=1, least=2)
    assert documents.documents.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 3]
    assert documents.words.tolist() == [0, 2, 0, 2, 0, 3, 0, 2, 3, 1, 1]  # a, leaf, rose, thorn
    assert documents[2:] == (4, 4)
    counts = word_counts(str(play), speeches=2, least=2)
    assert (counts.rows.tolist(), counts.columns.tolist()) == ([0, 0, 1], [0, 2, 1])
    assert counts.values.exp().tolist() == pytest.approx([5.0, 4.0, 3.0])
    with pytest.raises(ValueError, match="no word is there 9 times"):
        scenes(str(play), least=9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: correlated(rows=1), "no such data: rows=1"),
        (lambda: drawn_ratings(entries=10**9), "entries=1000000000"),
        (lambda: drawn_documents(topics=0), "topics=0"),
        (lambda: scenes("missing.txt"), "there is no file missing.txt"),
        (lambda: word_counts("missing.txt"), "there is no file missing.txt"),
        (lambda: classes("missing.svm"), "there is no file missing.svm"),
        (lambda: SetRule("best").checked(), "order must be one of priority, last"),
        (lambda: SetRule(at_once=0).checked(), "at_once=0"),
        (lambda: SetRule(candidates=8).checked(), "candidates=8: a round that updates 32"),
        (lambda: SetRule(bound=1.5).checked(), "bound=1.5"),
        (lambda: Scheduler(SetRule(), torch.zeros(3, dtype=torch.bool), 0), "every column of the data is zero"),
    ],
)
def test_refusals(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
