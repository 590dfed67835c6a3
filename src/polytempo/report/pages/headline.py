"""The page's first sentences: the finding of a comparison, as far as its runs bear it out, and its failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polytempo.report.pages.summary import EQUAL, EQUALLY, TIMES, baseline_of, finite, human_seconds, percent
from polytempo.report.runs import RunRecord, short_labels

FAR_BELOW = 0.02
"""A run that ends so far below the best is named."""
FALLEN, RISING = 0.05, 0.01
"""A fall from the best test, or a rise in the last fifth, that is worth a sentence."""


class Finish(NamedTuple):
    """Facts of a run that ended well, for the headline."""

    name: str
    samples_per_s: float
    accuracy: float | None
    tests: list[tuple[float, float]]
    """(seconds, accuracy) of every test, in order."""


class Reached(NamedTuple):
    """A run reached a level of accuracy between two tests: at `by_s`, but not yet at `after_s`."""

    finish: Finish
    after_s: float
    by_s: float


def headline(runs: Sequence[RunRecord]) -> str:
    """The finding of a comparison in one sentence, or "" where the runs do not bear one out; of a single run its end.

    The baseline is the one of the speed-ups. The level is the highest whole percentage that it and another run reach.
    Who reaches it sooner is said only where the times between the tests do not overlap; otherwise rates are compared.
    Virtual seconds are never compared with real ones, and one job never with another.
    """
    if len(runs) == 1:
        return _alone(runs[0])
    if len({run.result.get("job") for run in runs}) > 1:
        return ""
    for simulated in (False, True):
        numbers = [number for number, run in enumerate(runs) if run.simulated == simulated]
        if len(numbers) < 2:
            continue
        baseline = baseline_of(runs, simulated)
        ordered = [baseline, *(number for number in numbers if number != baseline)]
        names = [name.replace(" (simulated)", "") for name in short_labels(runs)]
        ended_well = [finish_of(runs[number], names[number]) for number in ordered if not _diverged(runs[number])]
        if len(ended_well) < 2:
            return ""
        sentence = _sooner(ended_well) or _faster(ended_well)
        return ("On the virtual clock, " if simulated and sentence else "") + sentence
    return ""


def _alone(run: RunRecord) -> str:
    """A run's final accuracy, and the time when it had almost got there; its loss if it measures no accuracy."""
    seconds, loss, [name] = finite(run.result.get("seconds")), finite(run.result.get("loss")), short_labels([run])
    if _diverged(run) or seconds is None:
        return ""
    finish = finish_of(run, name.removesuffix(" (simulated)"))
    after = f"after {_time(seconds)}"
    if finish.accuracy is None:
        return "" if loss is None else f"{finish.name} ends with a loss of {loss:.4g} {after}."
    level = math.floor(100 * (finish.accuracy - EQUAL) + 1e-9) / 100
    first = reached(finish, level) if level > 0 else None
    sooner = (
        f"reaches {100 * level:.0f}\u00a0% after {_time(first.by_s)}, and " if first and first.by_s < seconds else ""
    )
    return f"{finish.name} {sooner}ends at {percent(finish.accuracy, 1)} accuracy {after}."


def remarks(runs: Sequence[RunRecord]) -> list[str]:
    """A sentence for every run that diverged, and for every run that ends far below the most accurate."""
    names = short_labels(runs)
    pairs = list(zip(runs, names, strict=True))
    sentences = [f"{name} diverged: {_because(run)}" for run, name in pairs if _diverged(run)]
    sentences += [
        f"{name} was resumed at step {run.result['resumed_at']:,}: what was sent, and the share of communication, are "
        "of the steps after it."
        for run, name in pairs
        if run.result.get("resumed_at") is not None
    ]
    ends = [(accuracy, run, name) for run, name in pairs if (accuracy := _accuracy(run)) is not None]
    ends = [each for each in ends if not _diverged(each[1])]
    best, _, best_name = max(ends, key=lambda each: each[0], default=(0.0, None, ""))
    behind = [each for each in ends if round(best - each[0], 9) > FAR_BELOW]
    if behind:
        told = "; ".join(f"{name} ends at {percent(accuracy, 1)}{_course(run)}" for accuracy, run, name in behind)
        sentences.append(f"Far below the most accurate run ({best_name}, {percent(best, 1)}): {told}.")
    return sentences


def finish_of(run: RunRecord, name: str) -> Finish:
    """The run's numbers for the headline."""
    pairs = ((finite(row.get("seconds")), finite(row.get("accuracy"))) for row in run.rows("test"))
    tests = sorted((seconds, accuracy) for seconds, accuracy in pairs if seconds is not None and accuracy is not None)
    return Finish(name, float(run.result["samples_per_s"]), _accuracy(run), tests)


def reached(finish: Finish, level: float) -> Reached | None:
    """The time of the first test with `level` of accuracy. None without one."""
    before_s = 0.0
    for seconds, accuracy in finish.tests:
        if accuracy >= level:
            return Reached(finish, before_s, seconds)
        before_s = seconds
    return None


def level_of(baseline: Finish, others: Sequence[Finish]) -> float | None:
    """The highest whole percentage that the baseline and another reach; a difference by chance does not count.

    Where no other reaches it, it is half a point below the baseline's best, in whole percent.
    """
    best = _best(baseline)
    levels = (math.floor(100 * best + 1e-9) / 100, math.floor(100 * (best - EQUAL) + 1e-9) / 100)
    if levels[1] <= 0:
        return None
    return levels[0] if any(_best(other) >= levels[0] for other in others) else levels[1]


def _sooner(finishes: Sequence[Finish]) -> str:
    baseline, others = finishes[0], finishes[1:]
    level = level_of(baseline, others)
    if level is None or not any(other.tests for other in others):
        return ""
    first, goal = reached(baseline, level), f"{100 * level:.0f}\u00a0% accuracy"
    there = [each for each in (reached(other, level) for other in others) if each is not None]
    assert first is not None
    if not there:
        nearest = max(others, key=_best)
        return f"{baseline.name} alone reaches {goal}; {nearest.name} comes nearest, with {percent(_best(nearest), 1)}."
    # A run that ends as accurate as the baseline is named before a sooner run that ends worse.
    as_good = [each for each in there if _as_good(each.finish, baseline)]
    soonest = min(as_good or there, key=lambda each: each.by_s)
    if _before(soonest, first):
        winners = [each for each in as_good or there if _level_with(each, soonest) and _before(each, first)]
        factor = _ratio(first.by_s / max(each.by_s for each in winners))
        times = f"{_time(soonest.by_s)} instead of {_time(first.by_s)}"
        verb = "reaches" if len(winners) == 1 else "reach"
        who = _listed([each.finish.name for each in winners])
        return f"{who} {verb} {goal} {factor} sooner than {baseline.name} ({times}){_ending(winners, baseline)}."
    if all(_before(first, each) for each in there):
        factor = _ratio(soonest.by_s / first.by_s)
        times = f"{_time(first.by_s)} instead of {_time(soonest.by_s)}"
        return f"{baseline.name} reaches {goal} first, {factor} sooner than {soonest.finish.name}, the next ({times})."
    if first.after_s > 0 or soonest.after_s > 0:
        return (
            f"{soonest.finish.name} and {baseline.name} reach {goal} at about the same time "
            f"({_time(soonest.by_s)} and {_time(first.by_s)}, tested now and then)."
        )
    return ""  # both had it at their first test, which says nothing about when


def _faster(finishes: Sequence[Finish]) -> str:
    baseline, fastest = finishes[0], max(finishes[1:], key=lambda finish: finish.samples_per_s)
    rates = baseline.samples_per_s, fastest.samples_per_s
    if min(rates) <= 0:
        return ""
    if max(rates) <= EQUALLY * min(rates):
        return f"{fastest.name} and {baseline.name} process about as many samples per second as each other."
    ahead, behind = (fastest, baseline) if rates[1] > rates[0] else (baseline, fastest)
    next_one = ", the next" if ahead is baseline and len(finishes) > 2 else ""
    factor = _ratio(ahead.samples_per_s / behind.samples_per_s)
    ending = _ending([Reached(ahead, 0.0, 0.0)], behind)
    return f"{ahead.name} processes {factor} as many samples per second as {behind.name}{next_one}{ending}."


def _ending(winners: Sequence[Reached], baseline: Finish) -> str:
    """Comparison of the accuracies at the end; a faster way to a worse end must name both."""
    ends = [each.finish.accuracy for each in winners]
    if baseline.accuracy is None or None in ends:
        return ""
    known = [end for end in ends if end is not None]
    differences = [round(end - baseline.accuracy, 9) for end in known]
    shown = _listed([percent(end, 1) for end in known])
    verb = "ends" if len(known) == 1 else "end"
    if all(abs(difference) <= EQUAL for difference in differences):
        return f" and {verb} as accurate ({shown}; {baseline.name} {percent(baseline.accuracy, 1)})"
    if all(difference > EQUAL for difference in differences):
        return f" and {verb} more accurate ({shown}; {baseline.name} {percent(baseline.accuracy, 1)})"
    return f", but {verb} at {shown} where {baseline.name} ends at {percent(baseline.accuracy, 1)}"


def _as_good(finish: Finish, baseline: Finish) -> bool:
    return baseline.accuracy is None or round(baseline.accuracy - (finish.accuracy or 0.0), 9) <= EQUAL


def _level_with(each: Reached, soonest: Reached) -> bool:
    return soonest.by_s <= each.by_s <= soonest.by_s * EQUALLY


def _before(one: Reached, other: Reached) -> bool:
    """True if `one` certainly came first: its test had passed before the other's last failed test."""
    return one.by_s <= other.after_s and other.by_s > EQUALLY * one.by_s


def _course(run: RunRecord) -> str:
    """The reason of a low end, by the tests: the run has fallen, or it was still rising."""
    accuracies = [accuracy for _, accuracy in finish_of(run, "").tests]
    if len(accuracies) < 5:
        return ""
    best, last = max(accuracies), accuracies[-1]
    if best - last >= FALLEN:
        return f", after {percent(best, 1)} at its best: its steps may be too large, so try a smaller --lr"
    earlier = max(accuracies[: -(len(accuracies) // 5)])
    return ", and was still rising: more epochs may help" if last - earlier >= RISING else ""


def _because(run: RunRecord) -> str:
    said = str(run.result.get("diverged") or "its loss is not finite").strip()
    return said if said.endswith(".") else said + "."


def _diverged(run: RunRecord) -> bool:
    loss = run.result.get("loss")
    return bool(run.result.get("diverged")) or (isinstance(loss, float) and not math.isfinite(loss))


def _accuracy(run: RunRecord) -> float | None:
    return finite(run.result.get("accuracy"))


def _best(finish: Finish) -> float:
    return max((accuracy for _, accuracy in finish.tests), default=0.0)


def _time(seconds: float) -> str:
    return human_seconds(seconds).replace(" ", "\u00a0")


def _ratio(value: float) -> str:
    return f"{value:,.0f}{TIMES}" if value >= 10 else f"{value:.1f}{TIMES}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
