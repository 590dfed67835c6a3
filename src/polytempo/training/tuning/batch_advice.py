"""`advise_batch`: a batch size, a number of workers and a learning rate for a job, with the evidence.

a run with the job's own rate ──▶ noise scale 𝓑 ──▶ batch B = extra · 𝓑 ──▶ range test at B ──▶ six rates
short runs with each, the better half goes on, again and again ──▶ the rate
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from polytempo.core.errors import JobFailed
from polytempo.data.shard import DataShard
from polytempo.device import HOST, out_of_memory
from polytempo.large_batch.noise_scale import Squares
from polytempo.spec.job import Data, Job
from polytempo.training.job.context import check_length
from polytempo.training.tuning.rate_range import RateRange, growing_rates
from polytempo.training.tuning.trial import Trial, exceeds

_RATES = 6
"""So many learning rates are compared, each so many times the next one:"""
_STEP_BETWEEN_RATES = 2.0
_PARTS = 8
_FEWEST_STEPS = 10
"""An epoch has at least so many, or its batches would be too few to tell runs apart."""
_EFFICIENT = 0.8
"""Part of the most samples a second: a larger batch of one process hardly gets more."""
_WORSE = 0.5
"""Rise over the first loss, as a part of it: the run does not learn."""
_ALIKE = 0.03
"""Difference of two rates' losses, as a part of them, that does not count."""
_PROBED = (1, 2, 4, 8, 16, 32, 64)
"""Batches with timed steps,"""
_PROBES = 3
"""each so often; the least counts."""


class NoiseEvidence(NamedTuple):
    """The noise scale along a run with the job's own rate and batch."""

    first: float
    """The noise scale over the first half of the run, in samples; infinite if noise hides the gradient."""
    second: float
    deviation: float
    """The standard error of `second`, as a part of it, as far as its steps are independent."""
    batch: int
    lr: float
    samples: int


class TriedRate(NamedTuple):
    """A learning rate, and the training loss at the end of its short run."""

    lr: float
    loss: float
    samples: int


Tell = Callable[[TriedRate, int], object]
"""Hears of a rate and its batch."""


class BatchAdvice(NamedTuple):
    """The recommendation, and its evidence."""

    workers: int
    batch_size: int
    global_batch_size: int
    lr: float
    most_workers: int
    """Workers that pay at the noise scale itself: a run then takes twice the fewest steps and twice the fewest samples.
    """
    extra_samples: float
    """Additional samples, as a part of the need of very small batches: B over the noise scale."""
    noise: NoiseEvidence
    range: RangeTest
    tried: list[TriedRate]
    """Each rate at the end of its run, the longest run last."""
    samples_per_s: dict[int, float]
    samples: int
    unsure: list[str]


def advise_batch(
    job: Job,
    data: Data,
    *,
    workers: int | None = None,
    extra: float = 0.1,
    budget: float = 0.75,
    seed: int = 0,
    device: torch.device = HOST,
    tell: Tell = lambda rate, batch: None,
) -> BatchAdvice:
    """Recommend a global batch for `workers`, or also their number (None), and a learning rate for it.

    Up to the noise scale 𝓑 a step on B samples does the work of B small ones, at the price of B / 𝓑 more samples;
    `extra` is that price. The rate is the best of six, halved from each to the next, in short runs. `tell(rate, batch)`
    hears of each of these after each of its parts.

    `device`: the place of all trials, where one model is at a time. A batch that does not fit into its memory is
    computed in parts; a worker's batch fits.

    `budget`: the cost, in runs of the job's own epochs. The noise scale takes a quarter of it at most, the rest goes
    into the runs that tell rates apart: at least three steps a rate, also where that is more than the budget. Errors:
    ValueError where the data have no length, the first loss is not finite, a hundredth of the job's rate diverges, or a
    single sample does not fit into the device's memory.
    Source of the price: S. McCandlish et al., "An empirical model of large-batch training", 2018, section 2.3; of the
    halving: K. Jamieson and A. Talwalkar, 2016.
    """
    length = check_length(DataShard(data.training(), rank=0, size=1, batch_size=1))
    total = int(budget * job.epochs * length)
    speeds, spent, too_large = _speeds(job, data, seed, length, device)
    noise = _noise(job, data, min(length, total // 4), seed, length, device)
    known = noise.second if math.isfinite(noise.second) else float(length)
    chosen_workers, each = _shape(workers, extra * known, speeds, length, max(speeds) if too_large else length)
    batch = chosen_workers * each
    spent += noise.samples
    steps = max(20, min(60, total // 6 // batch))
    parts = _parts(job, data, batch, seed, device)
    ranged = range_test(job, data, batch=batch, steps=steps, seed=seed, parts=parts, device=device)
    spent += ranged.samples
    top = max(ranged.top, noise.lr)  # of few samples a step the range test sees noise: that rate was seen to learn
    rates = [top / _STEP_BETWEEN_RATES**k for k in range(_RATES)]
    trials = [_rested(Trial(job, data, batch=batch, lr=rate, seed=seed, parts=parts, device=device)) for rate in rates]
    tried = _halved(trials, max(_RATES * 3 * batch, total - spent), tell)
    best = tried[-1]
    return BatchAdvice(
        workers=chosen_workers,
        batch_size=each,
        global_batch_size=batch,
        lr=best.lr,
        most_workers=max(1, round(known / _efficient(speeds))),
        extra_samples=batch / known,
        noise=noise,
        range=ranged,
        tried=tried,
        samples_per_s=speeds,
        samples=spent + sum(each.samples for each in tried),
        unsure=[
            *_unsure(job, workers, batch, extra, noise, rates, tried, job.epochs * length),
            *(
                [f"a batch of {too_large} does not fit into the memory of {device}: larger ones were computed in parts"]
                if too_large
                else []
            ),
        ],
    )


def _rested(trial: Trial) -> Trial:
    """The trial, in the host's memory: one at a time is on the device."""
    trial.rest()
    return trial


def _shape(workers: int | None, most: float, speeds: dict[int, float], length: int, fits: int) -> tuple[int, int]:
    """Workers, and the batch of each, at most `fits`."""
    most = min(most, length / _FEWEST_STEPS)
    if workers is None:
        workers = max(1, int(most / _efficient(speeds)))
    return workers, min(fits, max(1, 2 ** int(math.log2(max(1.0, most / workers)))))


def _efficient(speeds: dict[int, float]) -> int:
    """The smallest batch of one process with nearly the highest samples a second."""
    return min(batch for batch, rate in speeds.items() if rate >= _EFFICIENT * max(speeds.values()))


def _speeds(
    job: Job, data: Data, seed: int, length: int, device: torch.device
) -> tuple[dict[int, float], int, int | None]:
    """Samples a second of one process by batch, how many samples it took to find out, and the first batch that does not
    fit into the device's memory."""
    found, spent = dict[int, float](), 0
    for batch in _PROBED:
        if batch > length:
            break
        try:
            trial = Trial(job, data, batch=batch, seed=seed, device=device)
            trial.step()
            found[batch] = batch / min(_step_s(trial) for _ in range(_PROBES))
        except (torch.OutOfMemoryError, JobFailed) as error:
            if not out_of_memory(error):
                raise
            if not found:
                raise _too_small(job, device) from None
            return found, spent, batch
        spent += trial.samples
    return found, spent, None


def _parts(job: Job, data: Data, batch: int, seed: int, device: torch.device, least: int = 1) -> int:
    """The number of parts, from `least` by powers of two, that fit into the device's memory one by one.

    Cost: a step for each try; none on the host.
    """
    while device.type != HOST.type:
        try:
            Trial(job, data, batch=batch, seed=seed, parts=least, device=device).step()
            break
        except (torch.OutOfMemoryError, JobFailed) as error:
            if not out_of_memory(error):
                raise
            if least >= batch:
                raise _too_small(job, device) from None
        least = min(batch, 2 * least)
    return least


def _too_small(job: Job, device: torch.device) -> ValueError:
    return ValueError(
        f"job {job.name}: a step on a single sample does not fit into the memory of {device}; give device=cpu, or a "
        "smaller model"
    )


def _step_s(trial: Trial) -> float:
    begin_s = time.perf_counter()
    trial.step()
    return time.perf_counter() - begin_s


def _noise(job: Job, data: Data, samples: int, seed: int, length: int, device: torch.device) -> NoiseEvidence:
    """The noise scale along a run with the job's rate, or a tenth or a hundredth of it where that diverges."""
    batch = min(job.batch_size, length)
    cost, parts = 0, _parts(job, data, batch, seed, device, _PARTS)
    for lr in (job.lr, job.lr / 10, job.lr / 100):
        trial = Trial(job, data, batch=batch, lr=lr, seed=seed, parts=parts, device=device)
        trial.train(max(samples, 4 * batch))
        cost += trial.samples
        learns = math.isfinite(_loss(trial)) and not exceeds(_loss(trial), trial.losses[0].loss, _WORSE)
        if learns and len(trial.noise) >= 2:
            break
    else:
        raise ValueError(
            f"job {job.name}: training diverges with lr={job.lr:g}, and with a hundredth of it; give the job a "
            "rate that learns"
        )
    half = len(trial.noise) // 2
    second = trial.noise[half:]
    return NoiseEvidence(_scale(trial.noise[:half]), _scale(second), _deviation(second), batch, lr, cost)


def _scale(found: Sequence[Squares]) -> float:
    of_gradient = sum(each.of_gradient for each in found)
    of_noise = sum(each.of_noise for each in found)
    return of_noise / of_gradient if of_gradient > 0 and of_noise > 0 else math.inf


def _deviation(found: Sequence[Squares]) -> float:
    """The relative standard error of the quotient of sums, by its linear part."""
    count = len(found)
    mean = Squares(sum(e.of_gradient for e in found) / count, sum(e.of_noise for e in found) / count)
    if count < 2 or mean.of_gradient <= 0 or mean.of_noise <= 0:
        return math.inf
    parts = [e.of_noise / mean.of_noise - e.of_gradient / mean.of_gradient for e in found]
    return math.sqrt(sum(part * part for part in parts) / (count * (count - 1)))


def _halved(trials: list[Trial], samples: int, tell: Tell) -> list[TriedRate]:
    """All trials, one for each rate; the better half goes on twice as long, until one is left; that is the last."""
    counts = [len(trials)]
    while counts[-1] > 1:
        counts.append((counts[-1] + 1) // 2)
    unit = max(1, samples // sum(count * 2**number for number, count in enumerate(counts[:-1])))
    ended = list[Trial]()
    for number, kept in enumerate(counts[1:]):
        for trial in trials:
            trial.train(unit * 2**number)
            trial.rest()
            tell(TriedRate(trial.lr, _loss(trial), trial.samples), trial.batch)
        trials.sort(key=_loss)
        ended += reversed(trials[kept:])
        trials = trials[:kept]
    return [TriedRate(trial.lr, _loss(trial), trial.samples) for trial in [*ended, *trials]]


def _loss(trial: Trial) -> float:
    return trial.recent_loss(max(trial.batch, trial.samples // 3))


def _unsure(
    job: Job,
    workers: int | None,
    batch: int,
    extra: float,
    noise: NoiseEvidence,
    rates: Sequence[float],
    tried: Sequence[TriedRate],
    run: int,
) -> list[str]:
    """Open questions of the evidence, in sentences."""
    best, said = tried[-1], list[str]()
    if not math.isfinite(noise.second):
        said.append("noise hid the gradient, so the noise scale is a guess; give a larger --budget")
    elif noise.deviation > 0.3:
        said.append(f"the noise scale is known to +-{100 * noise.deviation:.0f} % only; give a larger --budget")
    if math.isfinite(noise.second) and noise.second > 2 * noise.first:
        said.append(
            f"the noise scale rises while the job learns ({noise.first:.0f}, then {noise.second:.0f} samples), and it "
            f"was seen for {noise.samples:,} samples: later a larger batch would do"
        )
    if math.isfinite(noise.second) and batch > 1.5 * extra * noise.second:
        said.append(
            f"{workers} workers need at least {batch} samples a step, which take about "
            f"{100 * batch / noise.second:.0f} % more samples than small batches do"
        )
    if best.lr in (max(rates), min(rates)):
        said.append(f"the best rate {best.lr:.3g} is the {'largest' if best.lr == max(rates) else 'smallest'} tried")
    if len(tried) > 1 and math.isfinite(tried[-2].loss) and not exceeds(tried[-2].loss, best.loss, _ALIKE):
        losses = f"{tried[-2].loss:.4g}, {best.loss:.4g}"
        said.append(f"the rate {tried[-2].lr:.3g} did as well within {100 * _ALIKE:.0f} %: {losses}")
    said.append(
        f"rates were compared after {best.samples:,} samples, {100 * best.samples / run:.0f} % of a run: a "
        "smaller one may win a longer race"
    )
    said.append("synchronous SGD was tried, with one seed; stale or encoded gradients may need a smaller rate")
    return said


_SPAN = 1e3
"""The test goes from the job's rate divided by this to the job's rate times this."""


class RangeTest(NamedTuple):
    """The result: the rates of its steps, their smoothed losses, and the rate of the least loss."""

    rates: list[float]
    losses: list[float]
    top: float
    """Near the largest rate that learns: the runs themselves need one up to some tens of times smaller."""
    samples: int


def range_test(
    job: Job, data: Data, *, batch: int, steps: int, seed: int = 0, parts: int = 1, device: torch.device = HOST
) -> RangeTest:
    """Train with a rate that grows by the same factor in each step, and stop when the loss grows.

    Errors: ValueError where the loss is not finite in the first step. Source: L. N. Smith, "Cyclical learning rates for
    training neural networks", 2017, section 3.3; the exponential growth is later practice.
    """
    trial = Trial(job, data, batch=batch, seed=seed, parts=parts, follows=False, device=device)
    found = RateRange()
    for rate in growing_rates(job.lr / _SPAN, job.lr * _SPAN, steps):
        for group in trial.optimizer.param_groups:
            group["lr"] = rate
        if found.add(rate, trial.step()):
            break
    found.check(job.name)
    return RangeTest(found.rates, found.losses, found.least, trial.samples)
