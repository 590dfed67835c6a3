"""Merges that a minority of wrong or malicious ranks cannot steer.

A merge is a pure function of all ranks' flat buffers. `merged` gathers them and applies it. `vote` looks at signs
alone. Merges of whole buffers look at each stage of a pipeline, and at each fragment of a model, alone: they may choose
other ranks there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Bundle, Cost, Exchange, Port, Promise, State, Transform, call_name, stateless
from polytempo.core.arithmetic.merge import Merge, begins_at_last, check_merge, least_ranks
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.core.cost import gathered, num_bytes, route_name


def merged(merge: Merge) -> Transform:
    """Gather every rank's buffer everywhere and merge them. Samples' shares are not used: a wrong rank could give wrong
    ones.

    Running statistics are merged alike, so that a wrong rank steers them no more than the gradients.
    A merge that begins at its last answer has a state, and statistics are merged by the median beside it.
    Cost: (N-1)·K bytes sent and N·K held by each rank.
    """
    check_merge(merge)
    if begins_at_last(merge):
        return _from_last(merge)

    async def apply(port: Port, bundle: Bundle) -> Bundle:
        return bundle.with_flat(merge(await port.all_gather(bundle.flat)))

    async def beside(port: Port, bundle: Bundle, state: State) -> Bundle:
        return await apply(port, bundle)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return _gathering(merge, parameters, num_ranks)

    promises = Promise.SEPARABLE if getattr(merge, "coordinate_wise", True) else Promise(0)
    return stateless(apply, promises=promises, cost=cost, beside=beside, least_ranks=least_ranks(merge))


class LastAnswer(NamedTuple):
    """A merge's last answer."""

    last: Bundle


def _from_last(merge: Callable[..., Tensor]) -> Transform:
    """`merged` with a merge that begins at its last answer."""

    def init(parameters: Bundle) -> LastAnswer:
        return LastAnswer(parameters.map(lambda flat: flat.new_zeros(flat.shape)))

    async def apply(port: Port, bundle: Bundle, state: LastAnswer) -> tuple[Bundle | None, LastAnswer]:
        if port.size == 1:
            return bundle, state
        answer = bundle.with_flat(merge(await port.all_gather(bundle.flat), state.last.flat))
        return answer, LastAnswer(answer.copy())

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return _gathering(merge, parameters, num_ranks).remembering(num_bytes(parameters))

    beside, least = merged(median).beside, least_ranks(merge)
    return Transform(init, apply, Promise.IDLE_ALONE, cost, beside, least_ranks=least)


def _gathering(merge: Callable[..., Tensor], parameters: Bundle, num_ranks: int) -> Cost:
    return Cost((Exchange(f"merged({route_name(merge)})", gathered(num_bytes(parameters), num_ranks)),))


def median(buffers: Sequence[Tensor]) -> Tensor:
    """The median of each coordinate; the mean of the middle two for an even number of ranks.

    Holds against fewer than N/2 wrong ranks.
    Source: D. Yin et al., "Byzantine-robust distributed learning", 2018, Definition 1.
    """
    ordered = torch.stack(list(buffers)).sort(dim=0).values
    middle = len(buffers) // 2
    return ordered[middle] if len(buffers) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def trimmed_mean(cut: int = 1) -> Merge:
    """The mean of each coordinate without its `cut` largest and `cut` smallest values.

    Holds against `cut` wrong ranks; needs N > 2·cut.
    Source: D. Yin et al., "Byzantine-robust distributed learning", 2018, Definition 2.
    """
    check_whole(cut=cut)
    if cut < 0:
        raise ValueError(f"cut must be >= 0, got {cut}")

    def merge(buffers: Sequence[Tensor]) -> Tensor:
        _check_ranks(merge, len(buffers))
        return torch.stack(list(buffers)).sort(dim=0).values[cut : len(buffers) - cut].mean(dim=0)

    return _known(merge, call_name(trimmed_mean, locals()), 2 * cut + 1)


def krum(wrong: int = 1) -> Merge:
    """The one buffer that is closest to its N - wrong - 2 nearest others, in squared distance.

    Holds against `wrong` wrong ranks; needs N ≥ 2·wrong + 3. Ties go to the lowest rank.
    Source: P. Blanchard et al., "Machine learning with adversaries", 2017, section 4.
    """
    _check_wrong(wrong)

    def merge(buffers: Sequence[Tensor]) -> Tensor:
        _check_ranks(merge, len(buffers))
        return _closest(buffers, wrong, 1).squeeze(0)

    return _whole(merge, call_name(krum, locals()), 2 * wrong + 3)


def multi_krum(wrong: int = 1, kept: int | None = None) -> Merge:
    """The mean of the `kept` buffers that `krum` ranks first; without `kept` of N - wrong - 2.

    kept=1 is `krum`. Holds against `wrong` wrong ranks; needs N ≥ 2·wrong + 3, and kept ≤ N - wrong - 2.
    Source: P. Blanchard et al., 2017, section 5, which proves nothing of it; G. Bareilles, W. Bouaziz, J. Fageot and
    E. M. El Mhamdi, "Byzantine machine learning: MultiKrum and an optimal notion of robustness", 2026, arXiv
    2602.03899, does.
    """
    _check_wrong(wrong)
    _check_kept(kept, "multi_krum")

    def merge(buffers: Sequence[Tensor]) -> Tensor:
        _check_ranks(merge, len(buffers))
        return _closest(buffers, wrong, len(buffers) - wrong - 2 if kept is None else kept).mean(dim=0)

    return _whole(merge, call_name(multi_krum, locals()), max(2 * wrong + 3, (kept or 1) + wrong + 2))


def nearest_to_median(wrong: int = 1, kept: int | None = None) -> Merge:
    """The mean of the `kept` whole buffers that are nearest to the `median` of all; without `kept` of N - wrong.

    A rank's score is ‖xᵢ - median(x)‖; of equal ones the lowest rank counts. Holds against `wrong` wrong ranks; needs
    N ≥ 2·wrong + 1, and kept ≤ N - wrong. Then the answer is as near to the median as the furthest right buffer, or
    nearer, and the median of each coordinate is among the right ones. wrong=0 is the mean. It suits movements of a
    whole round, because their lengths agree; a rank with other data may be left out for good.
    The rule is ours: of the same kind as `multi_krum`, with fewer ranks for as many wrong ones.
    """
    _check_wrong(wrong)
    _check_kept(kept, "nearest_to_median")

    def merge(buffers: Sequence[Tensor]) -> Tensor:
        _check_ranks(merge, len(buffers))
        stacked = torch.stack(list(buffers))
        distances = ((stacked - median(buffers)) ** 2).sum(dim=1).nan_to_num(nan=torch.inf, posinf=torch.inf)
        chosen = distances.argsort(stable=True)[: len(buffers) - wrong if kept is None else kept]
        return stacked.index_select(0, chosen.sort().values).mean(dim=0)

    return _whole(merge, call_name(nearest_to_median, locals()), max(2 * wrong + 1, (kept or 1) + wrong))


def bulyan(wrong: int = 1) -> Merge:
    """The mean of each coordinate's θ - 2·wrong values nearest to the median of θ = N - 2·wrong buffers.

    The θ buffers are chosen one by one, each by `krum` among the rest. A wrong buffer near the others in all
    coordinates but one wins Krum's choice, and carries an error that grows with √(number of parameters); here it is one
    of θ, and its one coordinate is cut off.

    Holds against `wrong` wrong ranks; needs N ≥ 4·wrong + 3. Deviation: where the rest is fewer than Krum needs, it
    looks at the nearest one.
    Source: E. M. El Mhamdi, R. Guerraoui and S. Rouault, "The hidden vulnerability of distributed learning in
    Byzantium", 2018, section 4.
    """
    _check_wrong(wrong)

    def merge(buffers: Sequence[Tensor]) -> Tensor:
        num_ranks = len(buffers)
        _check_ranks(merge, num_ranks)
        stacked = torch.stack(list(buffers))
        distances = _distances(stacked)
        gone = torch.zeros(num_ranks, dtype=torch.bool, device=stacked.device)
        for left in range(num_ranks, 2 * wrong, -1):
            scores = _scores(distances, min(max(1, left - wrong - 2), left - 1))
            best = scores.clamp(max=torch.finfo(scores.dtype).max).masked_fill(gone, torch.inf).argmin().reshape(1)
            gone = gone.index_fill(0, best, True)
            distances = distances.index_fill(0, best, torch.inf).index_fill(1, best, torch.inf)
        chosen = stacked.index_select(0, gone.long().argsort(descending=True, stable=True)[: num_ranks - 2 * wrong])
        nearest = (chosen - median(list(chosen))).abs().argsort(dim=0)[: num_ranks - 4 * wrong]
        return chosen.gather(0, nearest).mean(dim=0)

    return _whole(merge, call_name(bulyan, locals()), 4 * wrong + 3)


def _closest(buffers: Sequence[Tensor], wrong: int, kept: int) -> Tensor:
    """The `kept` buffers with the lowest of Krum's scores, one a row, in the order of ranks where scores are equal."""
    stacked = torch.stack(list(buffers))
    scores = _scores(_distances(stacked), len(buffers) - wrong - 2)
    return stacked.index_select(0, scores.argsort(stable=True)[:kept])


def _distances(stacked: Tensor) -> Tensor:
    """‖xᵢ - xⱼ‖² of all pairs; ∞ of each to itself, and to buffers with NaN."""
    distances = torch.stack([((stacked - each) ** 2).sum(dim=1) for each in stacked]).fill_diagonal_(torch.inf)
    return distances.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _scores(distances: Tensor, num_nearest: int) -> Tensor:
    """The sum of each row's smallest distances."""
    return distances.sort(dim=1).values[:, :num_nearest].sum(dim=1)


def _known(merge: Merge, name: str, least: int = 1) -> Merge:
    """`merge` under that name, with the number of ranks that it needs."""
    merge.__name__ = name
    merge.least_ranks = least  # type: ignore[attr-defined]
    return merge


def _whole(merge: Merge, name: str, least: int = 1) -> Merge:
    """The same, marked as a merge of whole buffers."""
    merge.coordinate_wise = False  # type: ignore[attr-defined]
    return _known(merge, name, least)


def _check_wrong(wrong: int) -> None:
    check_whole(wrong=wrong)
    if wrong < 0:
        raise ValueError(f"wrong must be >= 0, got {wrong}")


def _check_kept(kept: int | None, name: str) -> None:
    check_whole(kept=1 if kept is None else kept)
    if kept is not None and kept < 1:
        raise ValueError(f"{name} keeps at least 1 buffer, got kept={kept}")


def _check_ranks(merge: Merge, num_ranks: int) -> None:
    if num_ranks < (least := least_ranks(merge)):
        raise ValueError(
            f"{route_name(merge)} needs at least {least} ranks, got {num_ranks}; lower its numbers or add workers"
        )


def vote(buffers: Sequence[Tensor]) -> Tensor:
    """sign(Σᵢ sign(xᵢ)) of each coordinate; 0 where as many ranks say up as down.

    Every rank has one vote for any samples and size of numbers, so fewer than half of the ranks cannot turn a
    coordinate that the others agree on. Zero and NaN do not count.

    It looks at one coordinate at a time, but the answer can be a tie, and a code of one bit has no word for it. So it
    says `coordinate_wise = False`: whole buffers are gathered, and no rank encodes the answer again.

    Source: J. Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", 2019,
    Algorithm 1. There the server's answer travels as one bit, so a tie is decided by the sign of zero.
    """
    ayes = buffers[0].sign().to(torch.float32)  # bfloat16 counts to 256 only
    for buffer in buffers[1:]:
        ayes += buffer.sign()
    return ayes.sign_().to(buffers[0].dtype)


vote.coordinate_wise = False  # type: ignore[attr-defined]


def votes_of(size: float) -> Merge:
    """`vote`, times `size`. ValueError unless `size` is above 0."""
    if not 0 < size < inf:
        raise ValueError(f"a vote moves a parameter by a number above 0, got {size}")

    def sized(buffers: Sequence[Tensor]) -> Tensor:
        return vote(buffers).mul_(size)

    return _whole(sized, "vote")
