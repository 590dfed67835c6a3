"""`StoreLog`: one order of entries for workers that see an object store alone, by conditional puts of numbered names.

    RUN/log/00000012           entry 12: its worker, samples, position in the data, its movement's name; kept for ever
    RUN/moved/2-3fa85f…-7      the movement of an entry, under a name that no other movement has
    RUN/states/00000040        the state after 40 entries
    RUN/newest                 the number of the last state that was put

A worker with an entry reads the log to its end and creates the next name; where another worker was first, it reads that
entry and tries the next name. So all workers have one log, and each applies it to a copy of its own.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.worlds.object_store.object_store import ObjectStore, StoredObject, packed

_KEPT = 4
"""States with objects before them that their creators have not removed yet."""


class Fallen(PolytempoError):
    """A worker reads so slowly that others have removed the next entry's movement: it needs a newer state."""


class LogEntry(NamedTuple):
    """An entry, and its movement where it has one."""

    about: dict[str, Any]
    movement: Tensor | None


class StoreLog:
    """A worker's way to the log. `apply` gets each entry in order; `state` gives the state after them.

    Every `save_every` entries the creator of the last of them puts the state.
    """

    def __init__(
        self, store: ObjectStore, apply: Callable[[LogEntry], None], state: Callable[[], bytes], *, save_every: int
    ) -> None:
        self.store, self._apply, self._state, self._save_every = store, apply, state, save_every
        self.next = 0
        """The number of entries that are applied."""
        self._created: deque[tuple[int, str]] = deque()
        self._collected = 0
        """The number of states when old objects were removed last."""

    def newest(self) -> StoredObject | None:
        """The newest state, with its number as the next entry's; None where none is saved.

        The object of that name may be a slow worker's, so states after it are looked for, too.
        """
        pointer, found = self.store.get("newest"), None
        number = 0 if pointer is None else int(pointer.about["next"])
        while True:
            if number and (state := self.store.get(f"states/{number:08d}")) is not None:
                found, self.next = state, number
            number += self._save_every
            if self.store.get(_name(number - 1)) is None:
                return found

    def catch_up(self) -> bool:
        """Apply all entries that are there; True if there was one. Raises `Fallen`."""
        before = self.next
        while (found := self.store.get(_name(self.next))) is not None:
            movement = None
            if (name := found.about.get("movement")) is not None:
                moved = self.store.get(name)
                if moved is None:
                    raise Fallen(f"{name} of entry {self.next} has been removed")
                movement = moved.tensors["movement"]
            self._take(LogEntry(found.about, movement))
        return self.next > before

    def append(
        self, make: Callable[[], dict[str, Any] | None], movement: Tensor | None = None, name: str | None = None
    ) -> bool:
        """Append `make()`, which is asked after the entries so far. False where it answers None.

        `name`: the movement's, if another worker is to know it; otherwise it is drawn.
        """
        if movement is not None:
            name = name or f"moved/{secrets.token_hex(12)}"
            self.store.put(name, packed({"movement": movement}, {}))
        while True:
            self.catch_up()
            if (about := make()) is None:
                if name is not None:
                    self.store.remove(name)
                return False
            about = about if name is None else about | {"movement": name}
            if self.store.create(_name(self.next), packed({}, about)):
                break
        if name is not None:
            self._created.append((self.next, name))
        self._take(LogEntry(about, movement))
        if self.next % self._save_every == 0:
            self._save()
        self._collect()
        return True

    def _take(self, entry: LogEntry) -> None:
        self._apply(entry)
        self.next += 1

    def _save(self) -> None:
        name = f"states/{self.next:08d}"
        self.store.put(name, self._state())
        self.store.put("newest", packed({}, {"next": self.next}))
        self._created.append((self.next, name))

    def _collect(self) -> None:
        """Remove own objects from before the last few states that are there; once in `save_every` entries."""
        if self.next // self._save_every == self._collected:
            return
        self._collected = self.next // self._save_every
        pointer = self.store.get("newest")
        saved = 0 if pointer is None else int(pointer.about["next"])
        while self._created and self._created[0][0] < saved - _KEPT * self._save_every:
            self.store.remove(self._created.popleft()[1])


def logged(store: ObjectStore) -> Iterator[dict[str, Any]]:
    """All entries of a run so far, in order."""
    number = 0
    while (found := store.get(_name(number))) is not None:
        yield found.about
        number += 1


def _name(number: int) -> str:
    return f"log/{number:08d}"
