"""`polytempo tune rate`: a range test of the learning rate, as a table and a picture."""

from __future__ import annotations

from dataclasses import asdict
from shlex import quote

from polytempo.cli.bench.bench_options import TuneRateOptions
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.planner.rate_finder import FoundRate, find_rate

_MOST_ROWS = 20


def tune_rate(asked: TuneRateOptions) -> None:
    """Test the rates, and show the suggestion and the losses."""
    with notes_on_stderr():
        found = find_rate(
            found_job(asked.job),
            asked.strategy,
            asked.workers,
            steps=asked.steps,
            lowest=asked.lowest,
            highest=asked.highest,
            batch_size=asked.batch_size,
            global_batch_size=asked.global_batch_size,
            seed=asked.seed,
            data=asked.data,
        )
        if asked.picture is not None:
            found.draw(str(asked.picture))
    command = _command(asked, found)
    if asked.json:
        show_json(asdict(found) | {"command": command})
        return
    print(f"{command}\n\n{found}\n")
    show_table(("rate", "loss", ""), _rows(found))


def _rows(found: FoundRate) -> list[tuple[str, str, str]]:
    """Show 20 rates at most, and the named rates."""
    names = {found.least: "least", found.steepest: "steepest fall"}
    every = -(-len(found.rates) // _MOST_ROWS)
    return [
        (f"{rate:.3g}", f"{loss:.4g}", names.get(rate, ""))
        for number, (rate, loss) in enumerate(zip(found.rates, found.losses, strict=True))
        if number % every == 0 or rate in names
    ]


def _command(asked: TuneRateOptions, found: FoundRate) -> str:
    batch = {"batch-size": asked.batch_size, "global-batch-size": asked.global_batch_size, "data": asked.data}
    more = "".join(f" --{flag} {quote(str(value))}" for flag, value in batch.items() if value is not None)
    call = f"--strategy '{asked.strategy}' --workers {asked.workers}"
    return f"polytempo train {quote(str(asked.job))} {call}{more} --lr {found.suggested:.3g}"
