"""Merges that a minority of wrong or malicious ranks cannot steer.

A merge is a pure function of all ranks' flat buffers. `merged` gathers them and applies it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polytempo.core import Bundle, Cost, Exchange, Port, State, Transform, call_name, stateless
from polytempo.core.cost import gathered, num_bytes, route_name
from polytempo.core.merge import Merge, check_merge


def merged(merge: Merge) -> Transform:
    """Gather every rank's buffer everywhere and merge them. Samples' shares are not used: a liar would lie about them.

    Running statistics are merged alike, so that a wrong rank steers them no more than the gradients.
    Cost: (N-1)·K bytes sent and N·K held by each rank.
    """
    check_merge(merge)

    async def apply(port: Port, bundle: Bundle) -> Bundle:
        return bundle.with_flat(merge(await port.all_gather(bundle.flat)))

    async def beside(port: Port, bundle: Bundle, state: State) -> Bundle:
        return await apply(port, bundle)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        return Cost((Exchange(f"merged({route_name(merge)})", gathered(num_bytes(parameters), num_ranks)),))

    return stateless(apply, separable=getattr(merge, "coordinate_wise", True), cost=cost, beside=beside)


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
    if cut < 0:
        raise ValueError(f"cut must be >= 0, got {cut}")

    def merge(buffers: Sequence[Tensor]) -> Tensor:
        if len(buffers) <= 2 * cut:
            raise ValueError(
                f"trimmed_mean(cut={cut}) needs more than {2 * cut} ranks, got {len(buffers)}; lower cut or add workers"
            )
        return torch.stack(list(buffers)).sort(dim=0).values[cut : len(buffers) - cut].mean(dim=0)

    merge.__name__ = call_name(trimmed_mean, locals())
    return merge


def krum(wrong: int = 1) -> Merge:
    """The one buffer that is closest to its N - wrong - 2 nearest others, in squared distance.

    Holds against `wrong` wrong ranks; needs N ≥ 2·wrong + 3. Ties go to the lowest rank.
    Source: P. Blanchard et al., "Machine learning with adversaries", 2017, section 4.
    """
    if wrong < 0:
        raise ValueError(f"wrong must be >= 0, got {wrong}")

    def merge(buffers: Sequence[Tensor]) -> Tensor:
        num_ranks = len(buffers)
        if num_ranks < 2 * wrong + 3:
            raise ValueError(
                f"krum(wrong={wrong}) needs at least {2 * wrong + 3} ranks, got {num_ranks}; lower wrong or add workers"
            )
        stacked = torch.stack(list(buffers))
        distances = torch.stack([((stacked - each) ** 2).sum(dim=1) for each in stacked]).fill_diagonal_(torch.inf)
        distances = distances.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a rank that sends NaN is far from all
        nearest = distances.sort(dim=1).values[:, : num_ranks - wrong - 2]
        return stacked.index_select(0, nearest.sum(dim=1).argmin().reshape(1)).squeeze(0)

    merge.__name__ = call_name(krum, locals())
    merge.coordinate_wise = False  # type: ignore[attr-defined]
    return merge
