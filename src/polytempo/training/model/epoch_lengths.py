"""Numbers of steps that follow from an epoch's length, and from a run's steps where a stream has no length."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core.calls.refusals import refuse
from polytempo.data.shard import DataShard
from polytempo.spec.job_calls import schedule_of
from polytempo.spec.rates.plateau import Plateau
from polytempo.spec.run_spec import RunSpec

ROWS_PER_EPOCH = 10
_STEPS_BETWEEN_ROWS = 100


def row_interval(shard: DataShard, steps: int | None) -> int:
    """Steps between two rows of metrics: ten rows an epoch; of a stream ten in all `steps`, and one in 100 steps."""
    if shard.num_samples is None:
        return max(1, min(_STEPS_BETWEEN_ROWS, (steps or _STEPS_BETWEEN_ROWS) // ROWS_PER_EPOCH))
    return max(1, len(shard) // ROWS_PER_EPOCH)


def epoch_steps(shard: DataShard, steps: int | None) -> int:
    """Steps of an epoch. For a stream without a length these are the steps of ten rows."""
    return ROWS_PER_EPOCH * row_interval(shard, steps) if shard.num_samples is None else len(shard)


def schedule_in_run(spec: RunSpec, optimizer: Optimizer, shard: DataShard) -> LRScheduler | None:
    """The job's schedule. On a stream it takes the run's steps for the steps of an epoch: ValueError where these are
    unknown, but for a plateau."""
    steps = spec.options.steps if shard.num_samples is None else len(shard)
    schedule = schedule_of(spec.job, optimizer, steps or 1)
    if steps is None and schedule is not None and not isinstance(schedule, Plateau):
        raise ValueError(
            f"job {spec.job.name}: its schedule is made for the steps of an epoch, and the length of a stream is "
            "unknown; give the run steps=, which the schedule then takes for them"
        )
    return schedule


def check_stream(spec: RunSpec, shard: DataShard) -> None:
    """Refuse options that need to know a stream's length."""
    if shard.num_samples is None:
        options = spec.options
        asked = {
            "balance": options.balance == "speed",
            "batch_growth": bool(options.batch_growth),
            "elastic": options.elastic,
            "private samples": spec.strategy.sample_privacy is not None,
        }
        if spec.strategy.slices is not None or options.global_batch_size is not None:
            raise ValueError(
                f"{spec.strategy}: a stream without a length has no slices of one global batch, only batch_size "
                "samples a worker; leave out global_batch_size, or count the stream once with pt.data.counted(stream)"
            )
        refuse({"stream"} | {name for name, is_set in asked.items() if is_set})
