"""`polytempo profile`: costs of a job's step for the processor, operator by operator, and for memory."""

from __future__ import annotations

import torch

from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.cli.predict.prediction_options import ProfileOptions
from polytempo.cluster import Cluster
from polytempo.runs.frame.job_memory import WorkerMemory, estimated, estimated_stage, measured_bytes
from polytempo.runs.simulated.asked_device import on_asked_device, on_suited_device
from polytempo.spec.job_calls import data_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import parse_cluster, parse_strategy
from polytempo.training.job.start import replica_of
from polytempo.training.model.run_device import run_device
from polytempo.training.parts.staged_training import cut_of
from polytempo.training.step.job_profile import JobProfile, OperatorCost, profiled

_REPEATS = 7
_SHOWN = 12


def profile(asked: ProfileOptions) -> None:
    """Profile a batch on a device, or on one thread; estimate the memory of a worker, and measure a process's."""
    described = None if asked.cluster is None else on_asked_device(parse_cluster(asked.cluster), asked.device)
    if described is not None and described.speeds is None:
        raise ValueError(
            f"--cluster {asked.cluster}: it has one speed for everything; give a file of `polytempo calibrate`"
        )
    made = parse_strategy(asked.strategy)
    described = None if described is None else on_suited_device(described, made)
    with notes_on_stderr():
        options = RunOptions(batch_size=asked.batch_size, data=asked.data, threads=1, device=asked.device)
        spec = RunSpec.of(found_job(asked.job), made, asked.workers, options)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            model, _ = replica_of(spec, run_device(options, made))
            held = data_of(spec.job, asked.data)
            taken = measured_bytes(spec)  # first: it forks, and beside a device gradients here keep forks from theirs
            found = profiled(spec.job, model, held, spec.seed, spec.batch_size, _REPEATS)
        finally:
            torch.set_num_threads(threads)
        memory = (
            estimated(spec, found.saved_bytes)
            if made.schedule is None
            else estimated_stage(spec, cut_of(spec, model, held))
        )
    rows = [(which, each) for which in ("forward", "backward") for each in getattr(found, which)]
    if asked.json:
        show_json(_plain(found, rows, described, memory, taken))
        return
    columns = ("pass", "operator", "calls", "bytes", "Mflop", "measured ms", *(["predicted ms"] if described else []))
    rows.sort(key=lambda row: -row[1].seconds)
    show_table(columns, [_row(which, each, described) for which, each in rows[:_SHOWN]])
    predicted = "" if described is None else f", predicted {1e3 * _predicted(rows, described):.3g} ms"
    in_operators = sum(each.seconds for _, each in rows)
    print(
        f"\n{len(rows)} operators, {1e3 * in_operators:.3g} ms in them; "
        f"forward and backward of {found.samples} samples {1e3 * found.seconds:.3g} ms{predicted}\n"
    )
    show_table(("memory of a worker", "bytes"), [*((k, size(v)) for k, v in memory._asdict().items())])
    print(f"in all {size(memory.total)}; a process without exchanges {size(memory.alone)}", end="")
    print("" if taken is None else f", measured {size(taken)}")


def _row(which: str, each: OperatorCost, cluster: Cluster | None) -> tuple[str, ...]:
    use = each.use
    cells = (which, each.operator, f"{use.calls:g}", size(use.num_bytes), f"{use.flops / 1e6:.4g}", _ms(each.seconds))
    return cells if cluster is None else (*cells, _ms(cluster.computing_s(0.0, (use,))))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _predicted(rows: list[tuple[str, OperatorCost]], cluster: Cluster) -> float:
    return cluster.computing_s(0.0, tuple(each.use for _, each in rows))


def _plain(
    found: JobProfile,
    rows: list[tuple[str, OperatorCost]],
    cluster: Cluster | None,
    memory: WorkerMemory,
    taken: int | None,
) -> dict[str, object]:
    return {
        "samples": found.samples,
        "seconds": found.seconds,
        "predicted_s": None if cluster is None else _predicted(rows, cluster),
        "operators": [
            {"pass": which, "operator": each.operator, **each.use._asdict(), "seconds": each.seconds}
            for which, each in rows
        ],
        "memory": {**memory._asdict(), "total": memory.total, "alone": memory.alone, "measured": taken},
    }
