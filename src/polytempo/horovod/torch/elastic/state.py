"""`State`, `ObjectState`: values that all processes of an elastic training share and go back to; `run` trains on them.

commit ── the processes make sure that all are here ── save ── others want to join: HostsUpdatedInterrupt
   ╰── steps ─╳ a process is lost: HorovodInternalError ── restore ── the next group ── sync, from its rank 0 ── on
"""

from __future__ import annotations

import copy
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from polytempo.horovod.runtime.operation import HorovodInternalError
from polytempo.horovod.torch.basics import init, rank, shutdown
from polytempo.horovod.torch.collectives import Sum, allreduce_async_
from polytempo.horovod.torch.functions import broadcast_object
from polytempo.horovod.torch.handles import synchronize
from polytempo.horovod.torch.process_state import PROCESS

Broadcast = Callable[..., Any]


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or are to go: a new group is to be made. The state stays as it is.

    `skip_sync` is Horovod's; here the new group synchronizes in any case, for others may come meanwhile.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have been updated")
        self.skip_sync = skip_sync


class State(ABC):
    """The values that training goes on from. A subclass says how it is saved, restored and given to all processes."""

    def __init__(self, bcast_object: Broadcast = broadcast_object, get_rank: Callable[[], int] = rank) -> None:
        self._broadcast, self._get_rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these in each new group, before the state is synchronized: to adapt learning rates, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """There is a new group."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, once all processes have come to this place, and look whether hosts were updated.

        All call it at the same place of the loop. Either all save this state or none, so that all go back to the same.
        Cost: an all-reduce of 12 bytes, and `save`. Errors: HostsUpdatedInterrupt on all processes alike.
        """
        place = PROCESS.place
        if place is None:
            self.save()
            return
        place.begins_commit()
        stops, leaves, with_news = self._agreed(news=self._has_news())
        if with_news:
            place.drops_commit()  # the others' news are missing
            self._share_news()
            place.begins_commit()
            stops, leaves, _ = self._agreed(news=False)
        self.save()
        place.has_committed()
        self._interrupt(stops, leaves)

    def check_host_updates(self) -> None:
        """Look whether hosts were updated, without saving. All call it at the same place of the loop.

        Errors: HostsUpdatedInterrupt on all processes alike.
        """
        if PROCESS.place is not None:
            stops, leaves, _ = self._agreed(news=False)
            self._interrupt(stops, leaves)

    def _agreed(self, *, news: bool) -> tuple[int, int, int]:
        """The number of processes that have heard of others that want to join, that are to leave, and that have
        news."""
        place = PROCESS.place
        assert place is not None
        numbers = torch.tensor([*place.wishes(), news], dtype=torch.int32)
        synchronize(allreduce_async_(numbers, name="elastic.commit", op=Sum))
        stops, leaves, with_news = numbers.tolist()
        return stops, leaves, with_news

    def _interrupt(self, stops: int, leaves: int) -> None:
        if stops or leaves:
            raise HostsUpdatedInterrupt

    def _has_news(self) -> bool:
        """True if this process has facts that the others need before a commit."""
        return False

    def _share_news(self) -> None:  # noqa: B027 - a state without news has none to share
        """Tell the others, in a commit; all processes call it."""

    @abstractmethod
    def save(self) -> None:
        """Keep a copy in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy."""

    @abstractmethod
    def sync(self) -> None:
        """Give all processes the state of rank 0, and keep a copy once all of it is here.

        If a process is lost meanwhile, the copy of the last commit stays: `restore` finds no mixture.
        """

    def reset(self) -> None:  # noqa: B027 - most states do not depend on the group
        """There is a new group, of another size perhaps."""


class ObjectState(State):
    """Values that are attributes: `ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)` has `state.epoch`.

    Values have the types of `hvd.broadcast_object`.
    """

    def __init__(
        self, bcast_object: Broadcast = broadcast_object, get_rank: Callable[[], int] = rank, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        ObjectState.save(self)

    def __getattr__(self, name: str) -> Any:
        """One of the values."""
        raise AttributeError(f"this state has no value {name!r}; name it when the state is made")

    def save(self) -> None:
        """Keep copies of the values."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """The values become the copies."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """The values become rank 0's."""
        if self._names:
            mine = {name: getattr(self, name) for name in self._names}
            for name, value in self._broadcast(mine, root_rank=0, name="elastic.values").items():
                setattr(self, name, value)
        self.save()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `func(state, …)`, which trains from where `state` is.

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                ...
                state.commit()

    Before each call rank 0's state is everywhere (`state.sync()`). After a `HorovodInternalError`, a process being
    lost, it goes back to its last commit (`state.restore()`); after a `HostsUpdatedInterrupt` it stays as it is. Then
    the remaining processes and the new ones form a group, callbacks of the state are called, and `func` again. A
    process that is no longer needed ends (SystemExit(0)).

    Without an elastic launcher (`polytempo horovodrun --min-np …`) `func` is called once, and errors are raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        place = PROCESS.place
        if place is None:
            state.sync()
            return func(state, *args, **kwargs)
        place.keep = state.save
        resets = goes_back = False
        while True:
            try:
                if resets:
                    _reset(state, goes_back)
                state.sync()
                place.has_synchronized()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                print(f"polytempo: back to the last commit: {error}", file=sys.stderr)
                goes_back = True
            except HostsUpdatedInterrupt:
                goes_back = False
            resets = True

    return wrapper


def _reset(state: State, goes_back: bool) -> None:
    """Join the next group. A process may be lost in callbacks of the state, too: they may use collectives."""
    shutdown()
    init()
    if goes_back:
        state.restore()
    state.on_reset()
