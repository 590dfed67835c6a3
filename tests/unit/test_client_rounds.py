"""Turns of clients in rounds, from a run's stream: the records, their table, and the pages that show it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from random import Random

import numpy as np
import pytest

import polytempo as pt
from laws.test_federated import SEED, data, job
from polytempo import federated as fed
from polytempo.federated.clients import Cohorts
from polytempo.report.pages.clients import accuracy_bands, rounds_in, said_of, turns_picture
from polytempo.report.pages.page import page
from polytempo.report.runs import load_run
from polytempo.report.status.client_rounds import (
    MOST_CLIENTS,
    MOST_COLUMNS,
    MOST_ROWS,
    ROUND,
    ClientRounds,
    round_text,
)
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.records import MOST_TEXT, LoggedText
from polytempo.ui.of_run.run_columns import RunColumns


def test_a_small_run_has_a_cell_for_each_client_and_round() -> None:
    found = ClientRounds()
    assert found.plain() is None
    found.add(round_text(0, 3, {2: 0, 0: 1}))
    found.add(round_text(1, 3, {}))
    found.add(round_text(2, 3, {2: 0}))
    for other in ("round 3: client-1", "round 3 of 0 clients: client-1", "round 3 of 99999999999 clients: client-1"):
        found.add(other)
    assert round_text(0, 3, {2: 0, 0: 1}) == "round 0 of 3 clients: client-2 client-0 (age 1)"
    assert found.plain() == {
        "clients": 3,
        "rounds": 3,
        "width": 1,
        "parts": [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]],
        "undrawn": 0,
        "a_round": 1.0,
        "took_part": 2,
        "least": 0,
        "median": 1.0,
        "most": 2,
    }


@pytest.mark.parametrize(("clients", "rounds"), [(10_000, 700), (51, 64), (50, 65), (7, 129)])
def test_a_large_run_has_a_table_of_the_same_size(clients: int, rounds: int) -> None:
    random, found = Random(5), ClientRounds()
    turns = np.zeros((clients, rounds))
    for number in range(rounds):
        chosen = random.sample(range(clients), min(5, clients))
        turns[chosen, number] = 1
        found.add(round_text(number, clients, dict.fromkeys(chosen, 0)))
    told = found.plain()
    assert told is not None
    rows, columns = len(told["parts"]), len(told["parts"][0])
    assert rows == min(clients, MOST_ROWS)
    assert MOST_COLUMNS / 2 <= columns <= MOST_COLUMNS
    assert told["took_part"] == (turns.sum(1) > 0).sum()
    assert (told["least"], told["most"]) == (turns.sum(1).min(), turns.sum(1).max())
    own = np.arange(clients) * rows // clients
    for row in range(rows):
        for column in range(columns):
            cell = turns[own == row, column * told["width"] : (column + 1) * told["width"]]
            assert told["parts"][row][column] == pytest.approx(cell.mean(), abs=1e-4)
    assert turns_picture(told).count("<rect") == sum(part > 0 for line in told["parts"] for part in line)


@pytest.mark.parametrize("aged", [False, True])
@pytest.mark.parametrize(("size", "clients"), [(101, 900), (1500, 30_000), (5000, 100_000), (5000, 10_000_000)])
def test_a_large_cohort_is_counted_whole(size: int, clients: int, aged: bool) -> None:
    chosen = Random(size).sample(range(clients), size)
    text = round_text(0, clients, {each: each % 3 if aged else 0 for each in chosen})
    found = ClientRounds()
    found.add(text)
    told = found.plain()
    assert told is not None
    assert len(text) <= MOST_TEXT
    assert told["a_round"] == size
    if told["undrawn"]:
        assert text == f"round 0 of {clients} clients: {size} took part"
        assert (clients, told["took_part"], told["parts"]) == (10_000_000, None, [[0.0]] * MOST_ROWS)
        assert said_of(told).startswith(f"{size:,} of {clients:,} clients took part in each of 1 rounds, in the mean")
        return
    cells = np.bincount(np.array(chosen) * MOST_ROWS // clients, minlength=MOST_ROWS)
    assert [line[0] for line in told["parts"]] == pytest.approx((cells * MOST_ROWS / clients).tolist(), rel=1e-3)
    assert (told["took_part"], told["most"]) == (size, 1)


@pytest.mark.parametrize("text", [round_text(0, 3, {2: 0, 0: 1}), round_text(0, 900, dict.fromkeys(range(7, 707), 0))])
def test_no_cut_text_is_counted_as_whole(text: str) -> None:
    whole, begins = ClientRounds(), text.index(": ") + 2
    whole.add(text)
    assert (whole.plain() or {})["undrawn"] == 0
    for end in range(begins, len(text) - 1):
        cut = ClientRounds()
        cut.add(f"{text[:end]} … ({len(text) - end:,} more characters)")
        told = cut.plain()
        assert told is not None
        assert (told["undrawn"], told["took_part"], told["a_round"]) == (1, None, None)
        assert said_of(told).startswith("? of")
        assert "<title>" not in turns_picture(told)


def test_rounds_that_are_not_drawn_make_no_part_smaller() -> None:
    found = ClientRounds()
    for number in range(MOST_COLUMNS + 2):
        found.add(round_text(number, 2, {1: 0}) if number % 2 else f"round {number} of 2 clients: 1 took part")
    told = found.plain()
    assert told is not None
    assert (told["width"], told["undrawn"], told["a_round"]) == (2, MOST_COLUMNS // 2 + 1, 1.0)
    assert told["parts"] == [[0.0] * 33, [1.0] * 33]


def test_a_round_counts_once() -> None:
    found = ClientRounds()
    for number in (0, 1, 1, 0, 2):
        found.add(round_text(number, 3, {1: 0}))
    told = found.plain()
    assert told is not None
    assert (told["parts"], told["most"]) == ([[0.0] * 3, [1.0] * 3, [0.0] * 3], 3)
    assert found.plain() is told  # until the next round
    found.add(round_text(3, 3, {1: 0}))
    assert (found.plain() or {})["most"] == 4


def test_a_small_part_is_not_nothing() -> None:
    found = ClientRounds()
    found.add(round_text(0, 1_000_000, {3: 0}))
    told = found.plain()
    assert told is not None
    assert told["parts"][0] == [5e-5]
    assert "clients 0 to 19,999, round 0: 0.005%" in turns_picture(told)


def test_the_memory_of_a_text_is_bounded() -> None:
    tracemalloc.start()
    try:
        found = ClientRounds()
        found.add(f"round 0 of {MOST_CLIENTS} clients: client-1")
        told = found.plain()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert told is not None
    assert (told["took_part"], told["a_round"], told["parts"][0]) == (None, 1.0, [5e-6])


def test_a_round_after_a_kill_and_a_resume_is_there_once(tmp_path: Path) -> None:
    pt.simulate(job(), fed.fed_avg(2, 1, 4), 2, clients="by_size(6, sigma=0.7)", seed=SEED, steps=4, out=tmp_path)
    texts = [each for each in load_run(tmp_path).logged if isinstance(each, LoggedText) and each.name == ROUND]
    assert [each.step for each in texts] == [1, 2, 3, 4]  # a resume at step 2 keeps rows up to it
    MetricsWriter(tmp_path, resumed_at=2).close()
    assert (rounds_in(load_run(tmp_path)) or {})["rounds"] == 2


@pytest.mark.parametrize("tested", [True, False])
def test_pages_show_the_turns_of_a_run(tested: bool, tmp_path: Path) -> None:
    own = job(correct=lambda output, target: output.argmax(1) == target)
    held_out = {"client_test": 0.4} if tested else {}
    pt.simulate(
        own, fed.fed_avg(2, 1, 4), 2, clients="by_size(6, sigma=0.7)", seed=SEED, steps=5, out=tmp_path, **held_out
    )
    run = load_run(tmp_path)
    told = rounds_in(run)
    assert told is not None
    draw = Cohorts(fed.clients(data(), fed.by_size(6, sigma=0.7), SEED), 2, SEED)
    drawn = [set(draw.order(number).tolist()) for number in range(5)]
    assert told["parts"] == [[float(client in each) for each in drawn] for client in range(6)]
    text = page([run], title="clients")
    assert ">Who took part<" in text
    assert (">Accuracy of clients<" in text) is tested
    figure = accuracy_bands([run])
    assert (figure is not None) is tested
    assert figure is None or len(figure.data) == 5
    columns = RunColumns(tmp_path)
    columns.look()
    assert columns.client_rounds.plain() == told
    assert columns.logged == []
