"""`shard`: this rank's part of a data set, and its position."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from polytempo.core import Port
from polytempo.core.calls.refusals import refuse
from polytempo.data.shard import DataShard
from polytempo.data.streams.repeated_reads import repeated_reads
from polytempo.spec.batch_weight import BatchWeight, weight_of
from polytempo.training.hooks.speed_balance import SpeedBalance
from polytempo.training.model.ports import Ports, ports_of
from polytempo.training.observe.user_log import user_log
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld, current

_BALANCES = ("equal", "speed")


class WorldShard:
    """A `DataShard` that notes each batch's share of the global batch in its world, so uneven batches weigh right.

    Batches may be taken before their turn, by a loader that looks ahead: an attached model recognises its inputs by
    their tensors or, after a move (`x.to(device)`), as the oldest unused batch with tensors of their shapes. Other
    inputs, and a compiled model's, have the share of the last batch.

    Other attributes (`dataset`, `sampler`, `num_workers`, `collate_fn`, …) are the given loader's. Three are the
    shard's: `batch_size` (per rank), `len` (steps of a whole epoch, the same on all ranks) and `set_epoch`. `dataset`
    and `sampler` belong to the whole data, not to this rank's part.
    """

    def __init__(
        self,
        world: ProcessWorld,
        inner: DataShard,
        ranks: tuple[int, ...],
        weigh: BatchWeight | None = None,
        balance: Literal["equal", "speed"] = "equal",
        note: str = "",
    ) -> None:
        """`ranks`: the ranks with batches of their own. `weigh`: the weight of a batch; None: its samples. `note`: a
        text for the run's stream."""
        self._world, self._ranks, self._weigh = world, ranks, weigh
        self._by_speed = balance == "speed"
        self._balance: SpeedBalance | None = None
        self._note = note
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        source = self._world.epoch_source
        if source is not None and source.takes(self.inner):
            if self._weigh is not None:
                refuse({"own loop", "server", "weight"})
            if self._by_speed:
                refuse({"server", "balance"}, strategy="the attached strategy")
            yield from source.epoch(self.inner)
            return
        if self._ends():
            return
        if self._by_speed:
            self._world.dealing = self
        if self._note:
            user_log().log_text("data", self._note)
            self._note = ""
        begun = self._world.shares.begin(self._ranks)
        try:
            self._rewound()
            going_on = True
            while going_on:
                going_on = False
                for batch in self.inner:
                    self._world.shares.give(begun, batch, self.inner.share, self._weight_of(batch))
                    yield batch
                    if self._ends():
                        return
                    if self._rewound():
                        going_on = True
                        break
        finally:
            self._world.shares.end(begun)

    def _rewound(self) -> bool:
        """True if the position has changed, because other workers have gone on without this one."""
        follows = self._world.follows
        return follows is not None and follows.rewound(self.inner)

    def after_step(self, replica: Replica, ports: Ports) -> None:
        """A replica has finished a step. The first one's speeds count where a loop trains several."""
        if self._balance is None:
            self._balance = SpeedBalance(self.inner, replica)
        elif self._balance.replica is replica:
            self._world.drive(self._balance.after_step(ports))

    def _ends(self) -> bool:
        """True if a callback has asked for the end of the training."""
        watch = self._world.loop_watch
        return watch is not None and watch.ends(self.inner)

    def _weight_of(self, batch: Any) -> float | None:
        if self._weigh is None:
            return None
        return weight_of(self._weigh, batch) if self.inner.local_samples else 0.0

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the given loader; for a data set, of a plain loader of it."""
        if (
            name.startswith("_") or name == "inner"
        ):  # a copy asks before it has any; a loader's private parts are its own
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self.inner.given_loader, name)
        except AttributeError:
            raise AttributeError(
                f"neither pt.shard(…) nor the {type(self.inner.given_loader).__name__} in it has an attribute {name!r}"
            ) from None

    @property
    def batch_size(self) -> int:
        """Samples per rank and step."""
        return self.inner.batch_size

    def grow(self, batch_size: int) -> None:
        """Let steps have so many samples per rank from the next iteration on; all ranks call it.

        The rest of an epoch is dealt again, each sample once; a resumed loop calls it again. ValueError where a server
        deals the batches.
        """
        source = self._world.epoch_source
        if source is not None and source.takes(self.inner):
            raise ValueError(
                "a parameter server deals the batches, and their size stays; begin with a larger batch_size"
            )
        self.inner.grow(batch_size * self.inner.size)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, on all ranks alike; where it is the current one, its position stays."""
        self.inner.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """Epochs that are behind us."""
        return self.inner.epoch

    def state_dict(self) -> dict[str, int | None]:
        """The position, the same on all ranks; save it after the step on the last batch.

        Where a parameter server deals the batches, between epochs: ValueError within one, where no rank knows which
        samples the others have had.
        """
        source = self._world.epoch_source
        if source is not None and source.is_within(self.inner):
            raise ValueError("a parameter server deals the batches, in no order; save the position between epochs")
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on from a saved position, also with another number of ranks."""
        self.inner.load_state_dict(state)


def shard(
    source: Dataset[Any] | DataLoader[Any],
    *,
    batch_size: int | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    weight: BatchWeight | None = None,
    balance: Literal["equal", "speed"] = "equal",
    world: ProcessWorld | None = None,
) -> WorldShard:
    """This rank's batches of `source`, an epoch for every iteration.

    All ranks follow one permutation that depends on (seed, epoch) alone, so every sample is used once an epoch for any
    number of workers; see `polytempo.data.DataShard` for the remainder and for resuming. `batch_size` is per rank; a
    DataLoader brings its own, and its collate function and workers. Where `pt.init(mesh=…)` has laid out the ranks, the
    batches are dealt along "data": ranks that hold parts of one model get the same ones. `pt.pipeline` takes batches of
    `pt.init(mesh={"data": …, "stage": …})`, and refuses others.

    `weight(batch)`: a batch's weight, such as its tokens that count; None: its samples. The gradient of a step is then
    Σ wᵢ gᵢ / Σ wᵢ over all ranks and all micro-batches (`no_sync`), of losses that are means over wᵢ; do not divide
    them by the number of micro-batches. `.grad` is that mean after the last backward pass. Cost: 8 bytes a rank in each
    step, before its first exchange, and a pass over `.grad` for each further micro-batch.

    `balance="speed"`: the global batch stays, and ranks' parts of it follow their measured speeds, from half to twice
    the equal part; the gradients' mean stays exact. A loop that takes batches ahead takes equally many on all ranks.
    `Incompatible` (PT15xx) for streams, and at the first step for strategies without such a mean.

    A stream (`IterableDataset`) with `num_shards` and `shard(num_shards=, index=)`, as of Hugging Face, is read in
    parts, each shard by one rank; ranks must take batches equally often. Of another stream each rank reads all, which a
    note says.

    Where a model is attached with a parameter server, the first shard that is iterated in training mode is dealt by
    tickets: a rank that is free gets the next batch, so ranks may have different numbers of them, and an epoch ends
    for all when the server has every batch. A batch is then read when it is asked for, in this process.

    Where a callback of `attach(…, callbacks=…)` has asked for the end, a shard ends after the same step on all ranks,
    and later epochs are empty; in the mode of evaluation batches go on.
    """
    world = world or current()
    data = ports_of(world.port).data

    def agree(row: Sequence[int]) -> list[list[int]]:
        return world.drive(_gathered(data, row))

    inner = DataShard(
        source, rank=data.rank, size=data.size, batch_size=batch_size, seed=seed, shuffle=shuffle, agree=agree
    )
    if balance not in _BALANCES:
        raise ValueError(f"balance={balance!r}: must be one of {', '.join(map(repr, _BALANCES))}")
    if balance == "speed" and inner.num_samples is None:
        refuse({"balance", "stream"})
    note = repeated_reads(inner).note(data.size) if data.rank == 0 else ""
    if note:
        print(f"note: {note}", file=sys.stderr)
    return WorldShard(world, inner, data.members, weight, balance, note)


async def _gathered(data: Port, row: Sequence[int]) -> list[list[int]]:
    return [each.tolist() for each in await data.all_gather(torch.tensor(row))]
