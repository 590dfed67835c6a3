"""`polytempo tune batch`: a batch, a number of workers and a learning rate, with the reasons and open questions."""

from __future__ import annotations

import math
from collections.abc import Callable
from shlex import quote

from polytempo.cli.bench.bench_options import TuneBatchOptions
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.core.system.url_path import without_secrets
from polytempo.data.shard import DataShard
from polytempo.large_batch import speed_up
from polytempo.report.saved_trials import SUFFIX, SavedTrials, TrialsFile
from polytempo.spec.job_calls import data_of
from polytempo.spec.run_options import RunOptions
from polytempo.strategies import sync_sgd
from polytempo.training.job.context import check_length
from polytempo.training.model.run_device import run_device
from polytempo.training.tuning.batch_advice import BatchAdvice, TriedRate, advise_batch


def tune_batch(asked: TuneBatchOptions) -> None:
    """Try the job, and show the recommendation, the evidence, and the open questions."""
    job = found_job(asked.job)
    with notes_on_stderr():
        held = data_of(job, asked.data)
        device = run_device(RunOptions(device=asked.device), sync_sgd(), local=0)
        workers, extra, budget, seed = asked.workers, asked.extra, asked.budget, asked.seed
        trials = _trials(asked, job.name)

        def tell(rate: TriedRate, batch: int) -> None:
            trials.ended({"lr": rate.lr, "global_batch_size": batch}, rate.loss)

        found = advise_batch(
            job, held, workers=workers, extra=extra, budget=budget, seed=seed, device=device, tell=tell
        )
        epochs = found.samples / check_length(DataShard(held.training(), rank=0, size=1, batch_size=1))
    command = _command(asked, found)
    trials.keep(trials.saved.trials[-1], _command(asked, found, without_secrets))
    if asked.json:
        show_json(_plain(found) | {"job": job.name, "epochs": epochs, "command": command})
        return
    print(f"{command}\n")
    show_table(("", ""), _recommended(found), header=False)
    print(f"\nEvidence, for {found.samples:,} samples ({epochs:.1f} epochs, {epochs / job.epochs:.2f} runs):")
    show_table(("", ""), _evidence(found), header=False)
    print("\nTraining loss at the end of short runs on the recommended batch:")
    show_table(("rate", "loss", "samples"), [_tried(*each) for each in reversed(found.tried)])
    print("\nUnsure:")
    for sentence in found.unsure:
        print(f"- {sentence}")


def _trials(asked: TuneBatchOptions, job: str) -> TrialsFile:
    """The file of the rates, in the folder of --out."""
    path = None
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        path = asked.out / f"tune{SUFFIX}"
    told = SavedTrials(title=f"{job}: learning rates of a batch", metric="training loss", better="less", num_trials=0)
    return TrialsFile(path, told)


def _command(asked: TuneBatchOptions, found: BatchAdvice, written: Callable[[str], str] = str) -> str:
    """The command that trains with the advice; `written`: the data's name as it is to stand there."""
    given = "" if asked.data is None else f" --data {quote(written(str(asked.data)))}"
    given += "" if asked.device == "auto" else f" --device {asked.device}"
    batch = f"--workers {found.workers} --global-batch-size {found.global_batch_size}"
    return f"polytempo train {quote(asked.job)}{given} {batch} --lr {found.lr:.3g}"


def _recommended(found: BatchAdvice) -> list[tuple[str, str]]:
    faster = speed_up(found.global_batch_size, found.global_batch_size / found.extra_samples)
    return [
        ("samples in a step", f"{found.global_batch_size:,}: {found.workers} workers x {found.batch_size}"),
        ("learning rate", f"{found.lr:.3g}"),
        ("steps", f"{faster:,.0f} times fewer than with single samples"),
        ("samples", f"{100 * found.extra_samples:.0f} % more than with single samples"),
        ("workers that pay", f"{found.most_workers:,} at most keep busy, at the price of twice the samples"),
    ]


def _evidence(found: BatchAdvice) -> list[tuple[str, str]]:
    noise, top = found.noise, found.range
    speeds = ", ".join(f"{batch}: {rate:,.0f}" for batch, rate in found.samples_per_s.items())
    error = f" +- {100 * noise.deviation:.0f} %" if math.isfinite(noise.deviation) else ""
    measured = f"{_samples(noise.second)}{error}, before {_samples(noise.first)}"
    return [
        ("noise scale", f"{measured} ({noise.samples:,} samples, batch {noise.batch}, rate {noise.lr:.3g})"),
        ("range test", f"the loss is least at {top.top:.3g}, of {len(top.rates)} rates from {top.rates[0]:.3g} on"),
        ("samples/s by batch", speeds),
    ]


def _samples(scale: float) -> str:
    return f"{scale:,.0f} samples" if math.isfinite(scale) else "not seen"


def _tried(lr: float, loss: float, samples: int) -> tuple[str, str, str]:
    return f"{lr:.3g}", f"{loss:.4g}" if math.isfinite(loss) else "diverged", f"{samples:,}"


def _plain(found: BatchAdvice) -> dict[str, object]:
    plain = found._asdict()
    plain |= {"noise": found.noise._asdict(), "range": found.range._asdict()}
    return plain | {"tried": [each._asdict() for each in found.tried]}
