"""The samples of each batch: pure arithmetic, the same on every rank.

    the epoch's order   0 1 2 3 4 5 6 7 8 9 10          11 samples, 2 ranks, batch_size 2
    global batches     [0 1 2 3][4 5 6 7][8 9 10]
    rank 0              0 1      4 5      8 9
    rank 1                  2 3      6 7      10

The remainder rule. A global batch has `size * batch_size` samples. The rest of an epoch forms one last, smaller global
batch, spread as evenly as possible (sizes differ by at most one, the lower ranks have more). If fewer samples than
ranks are left they join the batch before instead, so that every rank has at least one sample in every step and all
ranks make the same number of steps.

If a strategy computes a global batch in slices (`core.arithmetic.slice_tree`), "ranks" above are slices: slices, and an
epoch's last batches, do not depend on the number of ranks.

With gradient accumulation each part above is cut into micro-batches. The parts, and so the steps, stay as they are.

    rank 0              0 | 1    4 | 5    8 9           2 micro-batches, or 1 where some rank has only one sample
    rank 1              2 | 3    6 | 7    10

Where parts follow the ranks' speeds (`data.speed_shares`), a global batch is cut in proportion to whole numbers, the
shares: 7 samples by (3, 1) are 5 and 2. Sizes and the order of global batches stay as they are.

One case remains: a run that goes on with more ranks than its epoch has samples left. Then each of those samples goes to
one rank, and every other rank gets a copy of the first one that counts nothing (`Pick.local_samples` is 0, so its share
of the step is 0).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Shares = tuple[int, ...]
"""The proportion of the parts of each global batch, by rank or by part."""
Deals = Literal["freely", "evenly"]
"""The assignment of a parameter server's batches: to any worker that is free, or in each step one to each worker."""


class Pick(NamedTuple):
    """One rank's part of one step: the places `start` to `stop` (exclusive) of the epoch's order."""

    start: int
    stop: int
    local_samples: int
    """Samples that count on this rank: `stop - start`, or 0 for a stand-in."""
    global_samples: int
    """Samples of the step over all ranks."""
    following: int = 0
    """Micro-batches of the same part that follow this one."""

    @property
    def num_samples(self) -> int:
        """Samples in the rank's batch, a stand-in too, which counts nothing."""
        return self.stop - self.start


def plan(num_samples: int, consumed: int, size: int, batch_size: int) -> list[int]:
    """Sizes of the global batches of the rest of an epoch with `consumed` used samples.

    >>> plan(11, 0, size=2, batch_size=2)
    [4, 4, 3]
    >>> plan(9, 0, size=2, batch_size=2)
    [4, 5]
    """
    return global_batches(num_samples - consumed, size * batch_size, size)


def global_batches(num_samples: int, global_batch_size: int, parts: int) -> list[int]:
    """Sizes of the global batches of so many samples, each dealt to `parts` ranks or slices.

    >>> global_batches(17, 8, parts=3)
    [8, 9]
    """
    full, remainder = divmod(num_samples, global_batch_size)
    batches = [global_batch_size] * full
    if remainder == 0:
        return batches
    if remainder < parts and batches:
        batches[-1] += remainder
        return batches
    return [*batches, remainder]


@lru_cache(maxsize=256)
def apportioned(num_samples: int, shares: Shares) -> Shares:
    """Samples of each part in proportion to `shares`, rounded by largest remainders; equal parts if one would be empty.

    Of equal remainders lower ranks are first.

    >>> apportioned(7, (3, 1)), apportioned(7, (1, 1, 1)), apportioned(4, (9, 1, 1, 1))
    ((5, 2), (3, 2, 2), (1, 1, 1, 1))
    """
    total = sum(shares)
    each = [num_samples * share // total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: -(num_samples * shares[rank] % total))
    for rank in by_remainder[: num_samples - sum(each)]:
        each[rank] += 1
    return tuple(each) if min(each) else tuple(end - begin for begin, end in slices(num_samples, len(shares)))


def part(num_samples: int, size: int, rank: int, shares: Shares | None = None) -> tuple[int, int]:
    """Begin and end (exclusive) of `rank`'s slice of a global batch of `num_samples`. None: equal slices."""
    if shares is not None:
        sizes = apportioned(num_samples, shares)
        return sum(sizes[:rank]), sum(sizes[: rank + 1])
    each, extra = divmod(num_samples, size)
    start = rank * each + min(rank, extra)
    return start, start + each + (rank < extra)


def alike(num_samples: int, global_batch_size: int, size: int) -> list[range]:
    """Ranks in their order, together where they get equally many samples as each other in every step of an epoch.

    >>> alike(11, 4, size=2), alike(12, 4, size=2)
    ([range(0, 1), range(1, 2)], [range(0, 2)])
    """
    with_more = {each % size for each in global_batches(num_samples, global_batch_size, size)}
    return [range(begin, end) for begin, end in pairwise(sorted(with_more | {0, size}))]


def slices(num_samples: int, size: int) -> list[tuple[int, int]]:
    """Every rank's `part` of a global batch, in the order of ranks.

    >>> slices(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    return [part(num_samples, size, rank) for rank in range(size)]


def pick(start: int, global_samples: int, size: int, rank: int, shares: Shares | None = None) -> Pick:
    """`rank`'s part of the global batch of `global_samples` that begins at `start` of the epoch's order."""
    first, last = part(global_samples, size, rank, shares)
    if first == last:
        return Pick(start, start + 1, 0, global_samples)
    return Pick(start + first, start + last, last - first, global_samples)


def picks(num_samples: int, consumed: int, size: int, rank: int, batch_size: int) -> Iterator[Pick]:
    """`rank`'s part of every step of the rest of an epoch."""
    return own_picks(consumed, plan(num_samples, consumed, size, batch_size), size, [rank])


def own_picks(
    start: int,
    batches: Sequence[int],
    parts: int,
    own: Sequence[int],
    cuts: int = 1,
    shares: Shares | None = None,
) -> Iterator[Pick]:
    """The parts numbered `own` in every step, of global batches from `start` on, each in `cuts` micro-batches.

    Every part of a step has equally many: fewer than `cuts` if a part of the step has fewer samples.
    """
    for global_samples in batches:
        times = micro_batches(cuts, global_samples, parts, shares)
        for number in own:
            yield from cut(pick(start, global_samples, parts, number, shares), times)
        start += global_samples


def micro_batches(most: int, global_samples: int, parts: int, shares: Shares | None = None) -> int:
    """The number of micro-batches of each part, at most `most`: every part has a sample in each."""
    fewest = global_samples // parts if shares is None else min(apportioned(global_samples, shares))
    return max(1, min(most, fewest))


def cut(whole: Pick, cuts: int) -> Iterator[Pick]:
    """A part in micro-batches."""
    for number in range(cuts):
        begin, end = part(whole.num_samples, cuts, number)
        counts = end - begin if whole.local_samples else 0
        yield Pick(whole.start + begin, whole.start + end, counts, whole.global_samples, cuts - 1 - number)


def num_batches(num_samples: int, size: int, batch_size: int, deals: Deals) -> int:
    """The number of batches of an epoch that are dealt one by one: see `dealt`.

    >>> num_batches(11, size=2, batch_size=2, deals="freely")
    6
    >>> num_batches(9, size=2, batch_size=2, deals="evenly")
    4
    """
    if deals == "freely":
        return -(-num_samples // batch_size)
    return size * len(plan(num_samples, 0, size, batch_size))


def dealt(num_samples: int, size: int, batch_size: int, deals: Deals, batch: int) -> Pick:
    """Batch `batch` of an epoch with batches that are dealt one by one to `size` workers.

    "freely": the next `batch_size` places of the epoch's order; the last batch may be smaller. "evenly": batch `step *
    size + rank` is the pick of `rank` in `step` (see `picks`).

    >>> dealt(11, size=2, batch_size=2, deals="freely", batch=5)
    Pick(start=10, stop=11, local_samples=1, global_samples=1, following=0)
    >>> dealt(9, size=2, batch_size=2, deals="evenly", batch=2)
    Pick(start=4, stop=7, local_samples=3, global_samples=5, following=0)
    """
    count = num_batches(num_samples, size, batch_size, deals)
    if not 0 <= batch < count:
        raise ValueError(f"an epoch of {num_samples} samples has the batches 0 to {count - 1}, not {batch}")
    if deals == "freely":
        start, stop = batch * batch_size, min((batch + 1) * batch_size, num_samples)
        return Pick(start, stop, stop - start, stop - start)
    step, rank = divmod(batch, size)
    sizes = plan(num_samples, 0, size, batch_size)
    return pick(sum(sizes[:step]), sizes[step], size, rank)


@lru_cache(maxsize=4)
def permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch's samples, shape (num_samples,), int64: a function of its arguments alone.

    Kept for the last few epochs, so that many ranks in one process share it. Do not write to it.
    """
    digest = hashlib.sha256(f"polytempo,{seed},{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randperm(num_samples, generator=generator)


def check_enough(num_samples: int, size: int, what: str = "workers") -> None:
    """Refuses data with fewer samples than there are workers, or slices of a global batch."""
    if num_samples < size:
        raise ValueError(f"{num_samples} samples cannot be dealt to {size} {what}; use at most {num_samples} {what}")


def check_global_batch(global_batch_size: int, parts: int, what: str) -> None:
    """Refuses a global batch with fewer samples than `parts`, which are "workers" or "slices"."""
    if global_batch_size < parts:
        raise ValueError(
            f"a global batch of {global_batch_size} samples cannot be dealt to {parts} {what}; use a global batch of "
            f"at least {parts}, or fewer {what}"
        )
