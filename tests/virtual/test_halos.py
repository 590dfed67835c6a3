"""`halos`: the movements of regions of workers move one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polytempo as pt
from polytempo import strategies
from polytempo.cluster import Crash, ethernet, slow_host
from polytempo.core.calls.refusals import Incompatible
from polytempo.spec.result import parameters_sha256

DIGITS = pt.jobs.find("digits")


def test_a_run_that_would_end_with_its_first_model_is_refused() -> None:
    """Forty steps of four workers are sixteen pushes of each of two regions."""
    with pytest.raises(Incompatible, match="PT1211"):
        pt.simulate(DIGITS, strategies.halos(5, 2, 17), 4, steps=40)
    assert pt.simulate(DIGITS, strategies.halos(5, 2, 16), 4, steps=40).samples


def test_a_region_is_held_up_by_no_other() -> None:
    """One of two regions is eight times slower; each batch is trained on once."""
    cluster = replace(ethernet(), stragglers=slow_host(0, 8.0))
    seconds = []
    for strategy in (strategies.halos(5, 2, 4), strategies.diloco(5)):
        result = pt.simulate(DIGITS, strategy, 4, cluster, epochs=2, batch_size=16)
        assert result.samples == 2 * 1437
        seconds.append(result.seconds)
    assert seconds[0] < 0.6 * seconds[1]


@pytest.mark.parametrize("dead", [(1,), (2, 3), (0, 2, 3)])
def test_workers_and_whole_regions_may_die(dead: tuple[int, ...]) -> None:
    cluster = replace(ethernet(), faults=tuple(Crash(rank=rank, step=12 + rank) for rank in dead))
    result = pt.simulate(DIGITS, strategies.halos(3, 2, 5), 4, cluster, epochs=3)
    assert result.samples == 3 * 1437
    assert result.server is not None
    assert [each["worker"] for each in result.server["workers"]] == sorted({0, 1, 2, 3} - set(dead))


def test_workers_pull_their_region_s_weights_and_all_end_with_the_same() -> None:
    models: list[torch.nn.Module] = []
    make = DIGITS.model

    def made() -> torch.nn.Module:
        models.append(make())
        return models[-1]

    pt.simulate(replace(DIGITS, model=made), strategies.halos(5, 2, 2), 4, ethernet(), steps=20)
    final = [torch.nn.utils.parameters_to_vector(each.parameters()) for each in models[1:]]
    assert len(final) > 4
    assert all(torch.equal(each, final[0]) for each in final)
    assert not torch.equal(final[0], torch.nn.utils.parameters_to_vector(make().parameters()))


def test_it_learns_with_the_defaults_of_the_paper() -> None:
    """Four regions of four workers."""
    result = pt.simulate(DIGITS, strategies.halos(), 16, ethernet(), epochs=24, batch_size=8, seed=0)
    assert result.accuracy is not None
    assert result.accuracy > 0.85


def test_shards_of_regions_stay_as_many() -> None:
    with pytest.raises(Incompatible, match="PT1210"):
        pt.simulate(DIGITS, strategies.halos(), 4, steps=4, reshape={1: 2})


def test_no_bucket_has_regions() -> None:
    with pytest.raises(Incompatible, match="PT2901"):
        pt.simulate(DIGITS, "halos()", 4, "bucket()", steps=4)


def test_the_model_in_the_run_s_folder_is_that_of_all_regions(tmp_path: Path) -> None:
    result = pt.simulate(DIGITS, strategies.halos(5, 2, 2), 4, ethernet(), steps=20, out=tmp_path, checkpoint_every=20)
    found = pt.training.checkpoint_model(tmp_path)
    assert parameters_sha256(found.values()) == result.parameters_sha256
