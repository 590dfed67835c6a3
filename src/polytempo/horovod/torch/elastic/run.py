"""`run`: calls a training function again, in the same process, whenever the group has changed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from polytempo.horovod.elastic_place import elastic_place
from polytempo.horovod.runtime.operation import HorovodInternalError
from polytempo.horovod.torch.basics import init, shutdown
from polytempo.horovod.torch.elastic.state import HostsUpdatedInterrupt, State


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `func(state, …)`, which trains from where `state` is.

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                ...
                state.commit()

    Before each call the state is that of rank 0 (`state.sync()`). After a `HorovodInternalError`, a process being lost,
    it goes back to its last commit (`state.restore()`); after a `HostsUpdatedInterrupt` it stays as it is. Then the
    processes that are left form a new group with those that have come, callbacks of the state are called, and `func`
    again. A process that is no longer needed ends (SystemExit(0)).

    Without an elastic launcher (`polytempo horovodrun --min-np …`) `func` is called once, and errors are raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        place = elastic_place()
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
