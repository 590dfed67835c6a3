"""What an elastic run takes, and what it refuses before anything is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polytempo as pt
from polytempo.data.plan import picks, plan
from polytempo.spec.options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.elastic_strategies import check_elastic

TAKEN = ["sync_sgd()", "bf16_sgd()", "int8_sgd()", "one_bit_sgd()", "top_k_sgd()", "power_sgd()", "qsgd()", "dgc()"]
REFUSED = {
    "downpour()": "has a parameter server",
    "shared_memory()": "one copy of the parameters",
    "hogwild()": "one copy of the parameters",
    "local_sgd(period=4)": "exchanges parameters after",
    "gossip()": "exchanges parameters after",
    "diloco()": "exchanges parameters after",
    "delayed_sgd(delay=1)": "exchanges under way",
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
        (2, {"min_workers": 0}, "min_workers must be positive"),
        (2, {"min_workers": 1, "scaling": "both"}, "scaling is 'global' or 'local'"),
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
    job = pt.Job(**{name: getattr(found, name) for name in ("model", "data", "loss", "optimizer", "correct")})
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


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_global_batches_do_not_depend_on_how_many_ranks_they_are_dealt_to(size: int) -> None:
    planned = plan(103, 0, 4, 5)
    of_ranks = [list(picks(103, 0, size, rank, 5, planned_size=4)) for rank in range(size)]
    for step, batch in enumerate(planned):
        parts = [of_rank[step] for of_rank in of_ranks]
        assert {part.global_samples for part in parts} == {batch}
        places = [place for part in parts for place in range(part.start, part.start + part.local_samples)]
        assert places == list(range(step * 20, step * 20 + batch))
