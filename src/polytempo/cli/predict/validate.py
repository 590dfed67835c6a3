"""`polytempo validate`: a real run beside its simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polytempo import jobs
from polytempo.cli.options.measured_hosts import say_beyond_measured
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.cli.predict.prediction_options import ValidateOptions
from polytempo.core import Strategy
from polytempo.core.system.files import RESULT
from polytempo.engines.processes import janitor
from polytempo.planner.bound_price import with_price
from polytempo.report.pages.validation import PredictedTime, Validation, validation
from polytempo.report.runs import as_written, load_run
from polytempo.runs.simulated.asked_device import device_of, here, on_asked_device
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.precision import parse_precision
from polytempo.spec.text.catalogue import parse_cluster, parse_strategy

_SHOWN = 10
_NEEDED = ("job", "workers", "steps", "samples", "batch_size", "seed")


def validate(asked: ValidateOptions) -> None:
    """Simulate the run on the cluster, and compare."""
    run, cluster = asked.run, asked.cluster
    measured = load_run(run)
    result = measured.result
    if measured.simulated:
        raise ValueError(f"{run} is a simulation; name the folder of a run on real processes")
    if not measured.events:
        raise ValueError(f"{run} has no trace.json; name the folder of a run that has finished")
    with as_written(run / RESULT, "facts of the run"):
        precision = None if result.get("precision") is None else parse_precision(str(result["precision"]["dtype"]))
        result = {name: result[name] for name in _NEEDED} | result
    strategy, device = parse_strategy(result["strategy"]), device_of(run)
    described = on_asked_device(parse_cluster(cluster), device)
    _check_even(run, result, strategy)
    say_beyond_measured(cluster, result["workers"])
    with notes_on_stderr(), janitor.private_folder() as folder:
        out = asked.out or folder / "simulated"
        options: dict[str, Any] = {"batch_size": result["batch_size"], "seed": result["seed"], "data": asked.data}
        options["device"] = here(device)
        if precision is not None:
            options["precision"] = precision
        job = _job_of(run, result["job"], asked.job)
        simulate(
            job,
            strategy,
            result["workers"],
            described,
            **(options | {"steps": result["steps"], "epochs": 1_000_000, "threads": 1, "out": out}),
        )
        found = validation(load_run(out).events, measured.events)
        with as_written(run / RESULT, "the bound of the run"):
            result = with_price(result, job, asked.data, described)
            bound = "" if result.get("bound") is None else str(result["bound"]["text"])
    if asked.json:
        show_json(_plain(run, described.name, found) | {"bound": result.get("bound")})
        return
    show_table(("step", "predicted ms", "measured ms", "error"), [_row(each) for each in _some(found.steps)])
    print()
    show_table(("a step", "predicted ms", "measured ms", "difference ms"), [_parts(each) for each in found.components])
    print()
    print(f"the median step: predicted {_ms(found.whole.predicted_s)} ms, measured {_ms(found.whole.measured_s)} ms,")
    print(f"error {found.whole.error:+.0%}; of single steps {found.median_error:.0%} in the median")
    print(_verdict(found))
    if bound:
        print(f"\n{bound}")


def _job_of(run: Path, name: str, given: str | None) -> Job:
    """The job of the run. ValueError where it has to be named, or another one is."""
    if given is None and name not in jobs.names():
        raise ValueError(f"{run} is a run of {name}, a job of your own; give --job, such as --job path/to/file.py:job")
    found = found_job(given or name)
    if found.name != name:
        raise ValueError(f"--job {given}: its name is {found.name}, and {run} is a run of {name}; give that run's job")
    return found


def _check_even(run: Path, result: dict[str, Any], strategy: Strategy) -> None:
    """ValueError for a run with changing workers or batches: its result does not say when."""
    if len(result.get("membership") or ()) > 1:
        raise ValueError(f"{run}: its workers came and went, and a simulation has all of them; name another run")
    most = result["steps"] * result["workers"] // strategy.holders * result["batch_size"]
    if strategy.server is None and strategy.one_copy is None and result["samples"] > most:
        raise ValueError(
            f"{run}: the batch grew in this run, from {result['batch_size']} samples of a worker; name a run without "
            "--batch-growth"
        )


def _verdict(found: Validation) -> str:
    """The component behind most of the error."""
    worst = found.components[0]
    total_s = sum(abs(each.difference_s) for each in found.components)
    if not total_s:
        return "nothing differs"
    share = abs(worst.difference_s) / total_s
    way = "more" if worst.difference_s > 0 else "less"
    return f"most of the error: {worst.name}, predicted {_ms(abs(worst.difference_s))} ms {way} ({share:.0%} of it)"


def _some(steps: list[PredictedTime]) -> list[PredictedTime]:
    """A limited number of steps, at equal distances."""
    if len(steps) <= _SHOWN:
        return steps
    return [steps[round(i * (len(steps) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]


def _row(each: PredictedTime) -> tuple[str, ...]:
    return each.name, _ms(each.predicted_s), _ms(each.measured_s), f"{each.error:+.0%}"


def _parts(each: PredictedTime) -> tuple[str, ...]:
    return each.name, _ms(each.predicted_s), _ms(each.measured_s), f"{1e3 * each.difference_s:+.2f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _plain(run: Path, cluster: str, found: Validation) -> dict[str, object]:
    def rows(compared: list[PredictedTime]) -> list[dict[str, object]]:
        return [each._asdict() | {"error": each.error} for each in compared]

    return {
        "run": str(run),
        "cluster": cluster,
        "step": found.whole._asdict() | {"error": found.whole.error},
        "median_error": found.median_error,
        "components": rows(found.components),
        "steps": rows(found.steps),
        "most_of_the_error": found.components[0].name,
    }
