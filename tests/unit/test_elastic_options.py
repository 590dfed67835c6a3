"""Options of an elastic run, and refusals before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.data.shard import DataShard
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.elastic.elastic_strategies import check_elastic

TAKEN = ["sync_sgd()", "bf16_sgd()", "int8_sgd()", "one_bit_sgd()", "top_k_sgd()", "power_sgd()", "qsgd()", "dgc()"]
REFUSED = {
    "downpour()": "PT1201",
    "shared_memory()": "PT1202",
    "hogwild()": "PT1202",
    "delayed_sgd(delay=1)": "PT1206",
}


@pytest.mark.parametrize("name", TAKEN)
def test_strategies_that_agree_before_each_step_are_taken(name: str) -> None:
    check_elastic(pt.parse_strategy(name))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        check_elastic(pt.parse_strategy(name))


@pytest.mark.parametrize(
    ("workers", "options", "complaint"),
    [
        (2, {"min_workers": 3}, "got 3, 2 and 2"),
        (4, {"max_workers": 3}, "got 1, 4 and 3"),
        (2, {"min_workers": 0}, "min_workers=0: must be a whole number >= 1"),
        (2, {"max_workers": 40, "batch_size": 16}, "global batch of 32 samples"),
        (2, {"min_workers": 1, "scaling": "local", "global_batch_size": 8}, "PT1523"),
        (2, {"min_workers": 1, "scaling": "both"}, "scaling='both': must be one of 'global', 'local'"),
    ],
)
def test_bounds_that_no_run_can_keep_are_refused(workers: int, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        pt.run(pt.jobs.find("digits"), pt.strategies.sync_sgd(), workers, **options)


def test_how_many_workers_there_may_be_is_asked_for_elastic_runs_alone() -> None:
    with pytest.raises(ValueError, match="give min_workers or max_workers"):
        pt.run(pt.jobs.find("digits"), pt.strategies.sync_sgd(), 2, available=lambda: 2)


def test_a_schedule_counts_steps_so_it_needs_the_global_batch() -> None:
    def schedule(optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, steps_per_epoch)

    found = pt.jobs.find("digits")
    job = pt.Job(
        model=found.model, data=found.data, loss=found.loss, optimizer=found.optimizer, schedule=schedule, name="own"
    )
    with pytest.raises(ValueError, match="job own has a schedule"):
        pt.run(job, pt.strategies.sync_sgd(), 2, min_workers=1, scaling="local")


def test_a_run_spec_carries_them() -> None:
    options = RunOptions(min_workers=2, max_workers=5, scaling="local")
    spec = RunSpec.of(pt.jobs.find("digits"), pt.strategies.sync_sgd(), 3, options)
    again = RunSpec.from_json(spec.to_json(), pt.jobs.find).options
    assert (again.min_workers, again.max_workers, again.scaling, again.elastic) == (2, 5, "local", True)
    assert not RunOptions().elastic


@pytest.mark.parametrize("slices", [None, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_places_that_ranks_hand_out_are_those_of_the_global_batch(size: int, slices: int | None) -> None:
    data = TensorDataset(torch.arange(103))
    shards = [
        DataShard(data, rank=rank, size=size, global_batch_size=20, slices=slices, batch_size=None, seed=1)
        for rank in range(size)
    ]
    streams = [iter(shard) for shard in shards]
    for begin in (0, 20, 40, 60, 80):
        for shard, stream in zip(shards, streams, strict=True):
            for _ in shard.own:
                next(stream)
        places = [place for shard in shards for span in shard.spans for place in range(span.start, span.stop)]
        assert places[:20] == list(range(begin, begin + 20))
