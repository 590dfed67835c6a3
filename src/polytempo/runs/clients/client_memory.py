"""`ClientMemory`: the tensors that a client keeps between its rounds, in memory, and in files where a folder is given.

round        3      7      9          the states after the client's last rounds, `MOST_STATES` at most
server       took   took   late       so its next round begins with the state after round 7

A server that goes on from a checkpoint may have forgotten a client's last rounds, too.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO, final

from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.runs.clients.client_messages import packed, unpacked
from polytempo.training.federated.remote_rounds import NO_ROUND

MOST_STATES = 8
_ENDING = ".safetensors"


class LostClientState(PolytempoError):
    """A client has no longer the tensors that the server counts on."""


def locked_folder(folder: Path) -> TextIO:
    """Make a client's folder, and lock it for this process until the file is closed. `PolytempoError` where another one
    has it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise PolytempoError(f"another process is the client of {folder}; end it, or give another") from error
    return lock


@final
class ClientMemory:
    """The states of one client in one run, by their rounds. In files they take no memory.

    Cost: `MOST_STATES` states, of a model or its head each.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder`: a folder for files of this client and this run alone, which is made; only their owner can read
        them. None: in memory. `PolytempoError` where another process uses the folder."""
        self._folder, self._states = folder, dict[int, bytes | None]()
        if folder is not None:
            self._lock = locked_folder(folder)
            names = (
                path.name.removeprefix("round-").removesuffix(_ENDING) for path in folder.glob(f"round-*{_ENDING}")
            )
            self._states |= {int(each): None for each in names if each.isdecimal()}

    def close(self) -> None:
        """Let another process use the folder."""
        if self._folder is not None:
            self._lock.close()

    def after(self, taken: int) -> dict[str, Tensor] | None:
        """The state after round `taken`: no tensors for `NO_ROUND`, None where it is lost."""
        if taken == NO_ROUND:
            return {}
        if taken not in self._states:
            return None
        content = self._states[taken]
        return unpacked(self._path(taken).read_bytes() if content is None else content)

    def put(self, number: int, state: Mapping[str, Tensor], taken: int) -> None:
        """Keep the state after round `number`, which began with the one after `taken`, this one, and the newest before.

        States of later rounds are forgotten: the server has gone back, or started again.
        """
        content = packed(state)
        if self._folder is None:
            self._states[number] = content
        else:
            aside = self._folder / "next"
            aside.unlink(missing_ok=True)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            aside.replace(self._path(number))
            self._states[number] = None
        earlier = sorted(each for each in self._states if each < number and each != taken)
        later = [each for each in self._states if each > number]
        for each in later + earlier[: max(0, len(self._states) - len(later) - MOST_STATES)]:
            del self._states[each]
            if self._folder is not None:
                self._path(each).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"round-{number}{_ENDING}"
