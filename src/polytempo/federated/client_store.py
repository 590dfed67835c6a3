"""`ClientStore`: tensors that clients keep between their rounds, in memory up to a bound, and beyond it in files.

    memory    client 17 (last used), 4, 230      up to `most_bytes`
    files     the others                         one safetensors file each, in a private folder; its hash is in memory

A client that was never stored costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import final

from safetensors.torch import load, save
from torch import Tensor

from polytempo.core.system.scratch_folder import ScratchFolder

MOST_BYTES = 1 << 30
"""Bytes that the clients of a worker have in its memory. Others are in the system's temporary folder."""


class DamagedState(ValueError):
    """A client's file is not as it was written."""


@final
class ClientStore:
    """Named tensors of clients, by their numbers."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """`most_bytes`: the bound of tensors in memory; one client's are always there."""
        self._most, self._bytes = most_bytes, 0
        self._near: dict[int, dict[str, Tensor]] = {}  # the least recently used first
        self._far: dict[int, str] = {}
        self._folder: ScratchFolder | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._near, *self._far}))

    def __contains__(self, client: int) -> bool:
        return client in self._near or client in self._far

    def put(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep these tensors, in the place of the client's earlier ones. They may not change afterwards."""
        self.drop(client)
        self._near[client] = dict(tensors)
        self._bytes += _num_bytes(tensors)
        while self._bytes > self._most and len(self._near) > 1:
            oldest = next(iter(self._near))
            self._bytes -= _num_bytes(self._near[oldest])
            self._write(oldest, self._near.pop(oldest))

    def get(self, client: int) -> dict[str, Tensor]:
        """The client's tensors; none for a client that was never stored. DamagedState for a file that has changed."""
        if client in self._near:
            self._near[client] = self._near.pop(client)
            return self._near[client]
        return self._read(client) if client in self._far else {}

    def drop(self, client: int) -> None:
        """Forget a client's tensors, if there are any."""
        self._bytes -= _num_bytes(self._near.pop(client, {}))
        if self._far.pop(client, None) is not None and self._folder is not None:
            (self._folder.path / _name(client)).unlink(missing_ok=True)

    def _write(self, client: int, tensors: Mapping[str, Tensor]) -> None:
        self._folder = self._folder or ScratchFolder()
        content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        (self._folder.path / _name(client)).write_bytes(content)
        self._far[client] = hashlib.sha256(content).hexdigest()

    def _read(self, client: int) -> dict[str, Tensor]:
        assert self._folder is not None
        path = self._folder.path / _name(client)
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self._far[client]:
            raise DamagedState(f"{path} has changed since client {client} was stored; resume from the last checkpoint")
        return load(content)


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _name(client: int) -> str:
    return f"client-{client}.safetensors"
