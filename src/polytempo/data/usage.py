"""The uses of each epoch's samples in a run: the account in its `result.json`.

    batches in order       0 ━━━━━━━ consumed ┄┄┄┄┄┄ num_samples     once up to there, the others never
    tickets of a server    ━━━┄┄━━━━━┄━━━┄┄┄┄                        once where every shard has the gradient

Neighbouring epochs with equal counts are one row, so a long run has few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from polytempo.core.arithmetic.ranges import Range, Ranges
from polytempo.data.batches import Batches


class Usage(NamedTuple):
    """Epochs `first_epoch … last_epoch`, counted from 0. The counts are of each of them."""

    first_epoch: int
    last_epoch: int
    samples: int
    """The samples of an epoch: `once`, `twice` and `never` together."""
    once: int
    """Their gradient was used exactly once."""
    twice: int
    never: int
    dropped: int = 0
    """Never used samples with a gradient that some shard did not take (it came too late)."""


def in_order(num_samples: int | None, epoch: int, consumed: int) -> list[dict[str, Any]] | None:
    """The usage of a run in which all workers step together, at sample `consumed` of `epoch`. None for a stream.

    >>> (in_order(10, 2, 4) or [])[1]
    {'first_epoch': 2, 'last_epoch': 2, 'samples': 10, 'once': 4, 'twice': 0, 'never': 6, 'dropped': 0}
    """
    if num_samples is None:
        return None
    rows = [Usage(0, epoch - 1, num_samples, num_samples, 0, 0)] if epoch else []
    if consumed:
        rows.append(Usage(epoch, epoch, num_samples, consumed, 0, num_samples - consumed))
    return list(_merged(rows))


def of_tickets(
    batches: Batches, done: Iterable[Range], applied: Sequence[Iterable[Range]], numbers_per_batch: int = 1
) -> list[dict[str, Any]]:
    """The usage of a run with a parameter server, from its shards' reports: `applied` are the tickets that each has
    used, in `numbers_per_batch` numbers a batch, and the last one closes it; `done` are the pushed batches. A shard
    refuses a ticket that it has.
    """
    finished = Ranges(done)
    if not len(finished):
        return []
    end = max(last for _, last in finished) // len(batches)
    whole = (end + 1) * len(batches)
    lacking = Ranges()
    for shard in applied:
        for gap in _closed(shard, numbers_per_batch).missing(0, whole - 1):
            lacking.add(*gap)
    return list(_merged(_rows(batches, finished, lacking, end)))


def _closed(numbers: Iterable[Range], numbers_per_batch: int) -> Ranges:
    """The batches with a last number that is there."""
    ends = ((first // numbers_per_batch, (last + 1) // numbers_per_batch - 1) for first, last in numbers)
    return Ranges((first, last) for first, last in ends if first <= last)


def _rows(batches: Batches, finished: Ranges, lacking: Ranges, end: int) -> Iterator[Usage]:
    """A row for each epoch that lacks something, and one for those between two of them."""
    each, samples, epoch = len(batches), batches.num_samples, 0
    incomplete = sorted({number for first, last in lacking for number in range(first // each, last // each + 1)})
    for number in incomplete:
        if epoch < number:
            yield Usage(epoch, number - 1, samples, samples, 0, 0)
        gaps = lacking.common(number * each, (number + 1) * each - 1)
        never = sum(_samples(batches, gap) for gap in gaps)
        dropped = sum(_samples(batches, part) for gap in gaps for part in finished.common(*gap))
        yield Usage(number, number, samples, samples - never, 0, never, dropped)
        epoch = number + 1
    if epoch <= end:
        yield Usage(epoch, end, samples, samples, 0, 0)


def _samples(batches: Batches, tickets: Range) -> int:
    return batches.samples_before(tickets[1] + 1) - batches.samples_before(tickets[0])


def _merged(rows: Iterable[Usage]) -> Iterator[dict[str, Any]]:
    """Rows as JSON, neighbours with equal counts as one."""
    last: Usage | None = None
    for row in rows:
        if last is not None and last[2:] == row[2:]:
            last = last._replace(last_epoch=row.last_epoch)
            continue
        if last is not None:
            yield last._asdict()
        last = row
    if last is not None:
        yield last._asdict()
