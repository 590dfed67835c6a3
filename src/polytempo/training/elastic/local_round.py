"""`LocalRound`: the steps of one rank since ranks met last, in a strategy that exchanges parameters once in a while.

commit point ── step ── step ── step ── exchange ── commit point          a calm round
commit point ── step ── step ─╳ a rank is lost
                          ╰── the others stop after the step in hand, form a group, and meet immediately: their moves
                              count; the places of lost ranks are dealt again

After such a meeting all ranks count the steps of the rank that has made most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.collectives import tree
from polytempo.core import Bundle, Port, averaging
from polytempo.data.sample_account import Counted, counted_by_epoch
from polytempo.data.spans import PlaceSpan, between, joined, without
from polytempo.training.checkpoint.fingerprint import fingerprint
from polytempo.training.model.agree import gather_json
from polytempo.training.step.replica import Replica

Place = Mapping[str, Any]
"""A position in the data, as `DataShard.state_dict` has it."""


@dataclass
class LocalRound:
    """One rank's steps since the last commit point. `place`: its position in the data after them."""

    steps: int = 0
    spans: list[PlaceSpan] = field(default_factory=list)
    place: Place | None = None
    counts: bool = True
    """False where another rank of the island counts the same samples."""

    def stepped(self, spans: Iterable[PlaceSpan], place: Place) -> None:
        """One more step, on the samples at `spans`."""
        self.steps, self.place = self.steps + 1, place
        self.spans += spans

    def counted(self, before: Place, after: Place) -> dict[int, Counted]:
        """The samples by epoch; all epochs between the two positions are there, so that ranks' answers are alike."""
        epochs = {epoch for epoch, *_ in before.get("left", [])} | set(range(before["epoch"], after["epoch"] + 1))
        return counted_by_epoch(self._own, epochs)

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"steps": self.steps, "spans": [list(span) for span in joined(self._own)], "place": self.place}

    @property
    def _own(self) -> list[PlaceSpan]:
        return self.spans if self.counts else []


class Met(NamedTuple):
    """The common state of ranks that have met within a round."""

    steps: int
    place: dict[str, Any]
    """The position in the data: the places of lost ranks are left."""


def met(before: Place, rounds: Sequence[Mapping[str, Any]]) -> Met:
    """The common state of the present ranks, from their rounds since `before` (`LocalRound.to_plain`).

    >>> begin = {"epoch": 0, "consumed": 0, "num_samples": 9}
    >>> end = begin | {"consumed": 4}
    >>> met(begin, [{"steps": 2, "spans": [[0, 0, 1], [0, 2, 3]], "place": end}])
    Met(steps=2, place={'epoch': 0, 'consumed': 4, 'num_samples': 9, 'left': [[0, 1, 2], [0, 3, 4]]})
    """
    furthest = max(rounds, key=lambda each: each["steps"])
    if not furthest["steps"]:
        return Met(0, dict(before))
    place = {key: value for key, value in furthest["place"].items() if key != "left"}
    begin, end = ((each["epoch"], each["consumed"]) for each in (before, place))
    dealt = [*_spans(before.get("left", [])), *between(begin, end, place["num_samples"])]
    left = without(dealt, (span for each in rounds for span in _spans(each["spans"])))
    return Met(furthest["steps"], place | ({"left": [list(span) for span in left]} if left else {}))


def _spans(plain: Iterable[Sequence[int]]) -> list[PlaceSpan]:
    return [PlaceSpan(*numbers) for numbers in plain]


# ---------------------------------------------------------------------- models that differ


async def models_differ(port: Port, groups: Sequence[Mapping[str, Tensor]], ranks: int) -> bool:
    """True if the first `ranks` of the group have models with other bits. Cost: reads them, and a short text each."""
    told = await gather_json(port, [fingerprint(group.values()) for group in groups])
    return any(each != told[0] for each in told[:ranks])


async def check_alike(port: Port, replica: Replica) -> None:
    """ValueError for models that differ between ranks: others could not go on from a copy of one."""
    if await models_differ(port, [replica.trainable], port.size):
        raise ValueError(
            f"commit() after step {replica.step}, where workers' models differ: {replica.strategy} brings them "
            "together on some steps, or never; commit on those steps alone, or use pt.run"
        )


@torch.no_grad()
async def give_mean(
    port: Port, groups: Sequence[Mapping[str, Tensor]], ranks: int, islands: Sequence[int] | None = None
) -> None:
    """Give all ranks but the first `ranks` the mean of the first ones. Cost: an all-reduce of it.

    `islands`: the number of each rank's island. Islands count the same. An island with one of the first ranks keeps its
    model.
    """
    islands = range(port.size) if islands is None else islands
    weights = equal_weights(islands[:ranks])
    for group in groups:
        mean = await _mean(port, group, weights[port.rank] if port.rank < ranks else 0.0)
        if islands[port.rank] not in islands[:ranks]:
            torch._foreach_copy_(list(group.values()), list(mean.views.values()))


@torch.no_grad()
async def keep_mean(
    port: Port, groups: Sequence[Mapping[str, Tensor]], *, leaves: bool, islands: Sequence[int] | None = None
) -> None:
    """Some ranks leave: the others move, all alike, so that their mean becomes the former mean. All ranks call it.

    `islands`: see `give_mean`. Cost: two all-reduces if models differ.
    """
    islands = range(port.size) if islands is None else islands
    staying = [not each for each in await gather_json(port, leaves)]
    if all(staying) or not any(staying) or not await models_differ(port, groups, port.size):
        return
    for group in groups:
        of_all = await _mean(port, group, equal_weights(islands)[port.rank])
        stays = equal_weights([island for island, stay in zip(islands, staying, strict=True) if stay])
        of_staying = await _mean(port, group, 0.0 if leaves else stays[sum(staying[: port.rank])])
        moves = of_all.map(lambda flat, others=of_staying: flat - others.flat)  # type: ignore[misc]
        if not leaves:
            torch._foreach_add_(list(group.values()), list(moves.views.values()))


def equal_weights(islands: Sequence[int]) -> list[float]:
    """The weight of each rank in a mean of all `islands`, which count the same.

    >>> equal_weights([0, 0, 1])
    [0.25, 0.25, 0.5]
    """
    sizes = Counter(islands)
    return [1 / len(sizes) / sizes[island] for island in islands]


async def _mean(port: Port, group: Mapping[str, Tensor], weight: float) -> Bundle:
    return await averaging(tree)(port, Bundle(group, weight).copy(), None)
