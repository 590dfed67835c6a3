"""`ClientMemory`: the tensors that a client keeps between its rounds, in memory, and in files where a folder is given.

round        3      7      9          the states after the client's last rounds, `MOST_STATES` at most
server       took   took   late       so its next round begins with the state after round 7

A server that goes on from a checkpoint may have forgotten a client's last rounds, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.runs.clients.client_messages import packed, unpacked
from polytempo.training.federated.remote_rounds import NO_ROUND

MOST_STATES = 8
_ENDING = ".safetensors"


class LostClientState(PolytempoError):
    """A client has no longer the tensors that the server counts on."""


@final
class ClientMemory:
    """The states of one client by their rounds."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: a folder for files, which is made; only their owner can read them. None: in memory alone."""
        self._folder, self._states = folder, dict[int, bytes]()
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in folder.glob(f"round-*{_ENDING}"):
                self._states[int(path.name.removeprefix("round-").removesuffix(_ENDING))] = path.read_bytes()

    def after(self, taken: int) -> dict[str, Tensor] | None:
        """The state after round `taken`: no tensors for `NO_ROUND`, None where it is lost."""
        if taken == NO_ROUND:
            return {}
        return unpacked(self._states[taken]) if taken in self._states else None

    def put(self, number: int, state: Mapping[str, Tensor], taken: int) -> None:
        """Keep the state after round `number`, which began with the one after `taken`, and forget others than these
        and the newest before."""
        self._states[number] = packed(state)
        if self._folder is not None:
            path = self._folder / _name(number)
            aside = path.with_suffix(".new")
            aside.unlink(missing_ok=True)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(self._states[number])
            aside.replace(path)
        others = sorted(each for each in self._states if each not in (number, taken))
        for each in others[: max(0, len(self._states) - MOST_STATES)]:
            del self._states[each]
            if self._folder is not None:
                (self._folder / _name(each)).unlink(missing_ok=True)


def _name(number: int) -> str:
    return f"round-{number}{_ENDING}"
