"""Every pair of features: as plain torch, as in the other world, as if never saved or broken off; or refused.

Rows are chosen by `combinations`. `make test` looks at some of them, `make test-all` at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.combination_runs import (
    GLOBAL_BATCH,
    STEPS,
    distance,
    job_of,
    looked_at,
    loss_of,
    mesh_of,
    options_of,
    own_loop,
    plain,
    strategy_of,
    uncompared,
    watching_of,
    workers_of,
)
from laws.combinations import (
    AUTOCAST,
    FACTORS,
    IDLE_LAYERS,
    IN_ANY_ORDER,
    OWN,
    QUANTISED,
    SERVED,
    Combination,
    Pair,
    comparable,
    covering,
    pairs_shown,
    possible,
    refusal,
    shown_pairs,
)
from polytempo.core import PolytempoError
from polytempo.runs.frame import run_page
from polytempo.spec.result import Result
from polytempo.strategies import sync_sgd
from polytempo.worlds import ProcessWorld
from process.crew import together
from some_cases import some_of

ROWS = covering()
VIRTUAL = [row for row in ROWS if row.world == "virtual"]
JOBS = [row for row in ROWS if row.world == "processes" and row.loop not in OWN]
LOOPS = [row for row in ROWS if row.loop in OWN]
BROKEN_OFF_AT = 4
"""The step is in the middle of the second epoch, and of a round of local steps."""


def named_rows(world: str) -> list[Combination]:
    """Rows that the covering does not choose."""
    return [row for row in IDLE_LAYERS + IN_ANY_ORDER + AUTOCAST if row.world == world]


@contextmanager
def refused_or_not(row: Combination) -> Iterator[None]:
    """The code inside is refused if the table says so, else it ends well."""
    words = refusal(row._asdict())
    if words is None:
        yield
    else:
        with pytest.raises((ValueError, PolytempoError), match=words):
            yield


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "write_report", lambda *_, **__: None)


def of_model(row: Combination, tolerance_16: float) -> float:
    """The tolerance of parameters against plain torch's. In 16 bits partial sums are rounded that torch does not
    have. A weight that a last bit takes to another level moves others by little."""
    few = dict.fromkeys(QUANTISED, 1e-3)
    return {"float64": 1e-9, "float32": 2e-4, "bf16": tolerance_16, "autocast": tolerance_16, **few}[row.precision]


def test_every_pair_of_values_is_in_a_row() -> None:
    covered = {pair for row in ROWS for pair in combinations(row._asdict().items(), 2)}
    wanted = [
        ((a, x), (b, y)) for (a, some), (b, others) in combinations(FACTORS.items(), 2) for x in some for y in others
    ]
    assert [pair for pair in wanted if pair not in covered and possible(dict(pair))] == []
    assert 150 < len(ROWS) < 340
    assert sum(refusal(row._asdict()) is None for row in ROWS) > 0.7 * len(ROWS)
    shown = set[Pair]().union(*(pairs_shown(row) for row in ROWS))
    assert [pair for pair in shown_pairs() if pair not in shown] == []


@pytest.mark.parametrize("row", some_of(VIRTUAL, 0, of=3) + named_rows("virtual"), ids=str)
def test_under_the_virtual_clock(row: Combination, tmp_path: Path) -> None:
    """Saving and watching change no bit, no operation and no time; the saved model is plain torch's."""
    with refused_or_not(row):
        start = other_run(row, tmp_path)
        with uncompared(row):
            alone = simulated(row._replace(shown="unseen"), start)
        saved = alone
        with looked_at(row, tmp_path):
            if row.family not in SERVED:
                saved = simulated(row, start, out=tmp_path, checkpoint_every=2, **watching_of(row))
            elif row.loop == "watched" or row.shown != "unseen":
                saved = simulated(row, start, out=tmp_path, **watching_of(row))
        assert seen(saved) == seen(alone)
        check_plain(row, alone, None if row.family in SERVED else tmp_path, start)


@pytest.mark.process
@pytest.mark.parametrize("row", some_of(JOBS, 0, of=8) + named_rows("processes"), ids=str)
def test_a_job_on_processes(row: Combination, tmp_path: Path) -> None:
    """The bits of the virtual world, also where it is saved, or broken off and resumed."""
    with refused_or_not(row), looked_at(row, tmp_path):
        strategy, workers, start = strategy_of(row), workers_of(row), other_run(row, tmp_path)
        if row.saving == "resumed":
            first = options_of(row, BROKEN_OFF_AT) | watching_of(row)
            pt.run(job_of(row), strategy, workers, **first, out=tmp_path, start_from=start)
        watching = watching_of(row)
        found = pt.run(
            *(job_of(row), strategy, workers),
            **(options_of(row) | watching),
            out=tmp_path,
            checkpoint_every=2,
            resume=row.saving == "resumed",
            start_from=None if row.saving == "resumed" else start,  # a resumed run has it in its folder
        )
        assert found.steps == STEPS
        assert all(tracker.ended == "finished" for tracker in watching.get("trackers", ()))
        if row.family == "downpour" or (row.layout == "hogwild" and row.replicas > 1):  # workers come in another order
            assert math.isfinite(found.loss or math.nan)
            return
        with uncompared(row):
            virtual = simulated(row._replace(shown="unseen"), start)
        rounds = row.layout == "one_copy"  # its update is one pass, where the virtual world's is torch's
        alike = 1e-5 if row.family in SERVED else of_model(row, 2e-2) if rounds else 1e-12
        assert found.loss == pytest.approx(virtual.loss, rel=alike)
        assert row.family in SERVED or rounds or found.parameters_sha256 == virtual.parameters_sha256
        check_plain(row, found, None if row.family in SERVED else tmp_path, start)


@pytest.mark.process
@pytest.mark.parametrize("row", some_of(LOOPS, 0, of=8), ids=str)
def test_a_loop_of_a_user(row: Combination, tmp_path: Path) -> None:
    """The model is the job's, and plain torch's; a loop that is saved, made again, and goes on has the same bits."""

    def work(world: ProcessWorld) -> Any:
        if (mesh := mesh_of(row)) is not None:
            pt.init(mesh=mesh)
        stops = [None, BROKEN_OFF_AT] if row.saving == "resumed" else [None]
        models = [own_loop(row, world, stop, out=tmp_path / str(stop)) for stop in stops]
        return [{name: t.tolist() for name, t in model.items()} for model in models]

    with refused_or_not(row), looked_at(row, tmp_path):
        straight, *resumed = together(workers_of(row), work, timeout_s=120)[0]
        assert all(each == straight for each in resumed)
        model = {name: torch.tensor(values, dtype=torch.float64) for name, values in straight.items()}
        if comparable(row._asdict()):
            assert distance(model, plain(row).saved) < of_model(row, 2e-2)
        if row.loop == "own":
            assert loss_of(row, model) == pytest.approx(simulated(row).loss, rel=of_model(row, 2e-2))


def simulated(row: Combination, start: str | None = None, **options: Any) -> Result:
    options |= options_of(row) | {"start_from": start}
    return pt.simulate(job_of(row), strategy_of(row), workers_of(row), **options)


def other_run(row: Combination, folder: Path) -> str | None:
    """A run of the job by another strategy on one worker; None for rows that begin with the job's own weights."""
    if row.start == "own":
        return None
    first = folder / "first"
    pt.simulate(job_of(row), sync_sgd(), 1, steps=2, batch_size=GLOBAL_BATCH, out=first, checkpoint_every=2, threads=1)
    return str(first)


def seen(result: Result) -> tuple[Any, ...]:
    return result.parameters_sha256, result.trace_hash, result.seconds, result.loss, result.train_loss


def check_plain(row: Combination, found: Result, folder: Path | None, start: str | None) -> None:
    """The saved model is plain torch's, and so is the score; without a folder, the score is."""
    if not comparable(row._asdict()):
        return
    expected = plain(row, None if start is None else pt.training.checkpoint_model(start))
    if row.loop != "sometimes":  # workers score parts of the test set, which start with other numbers
        assert found.loss == pytest.approx(loss_of(row, expected.scored), rel=of_model(row, 2e-2))
    if folder is not None:
        saved: dict[str, Tensor] = pt.training.checkpoint_model(folder)
        assert distance(saved, expected.saved) < of_model(row, 2e-2)
