"""`ObjectStore`: immutable objects with hashes, put and read again until a store answers or a deadline has passed.

    object     a safetensors file: tensors by name, and in its header a JSON text and the SHA-256 of both

A put with a lost answer is put again: where the name then holds the same content, the first one has succeeded. An
object that is damaged is read again. Nothing is listed: names are known.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from polytempo.core.calls.refusals import refusal_of, refuse
from polytempo.core.errors import PolytempoError
from polytempo.worlds.object_store.objects import Objects
from polytempo.worlds.trace import OpTotals

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0
"""Pauses between tries and between looks: they double from the first to the longest."""
_UNABLE = (PermissionError, TypeError, NotImplementedError)
"""Errors of a filesystem without conditional puts: no hard links, no argument `mode`."""
_FINAL = (*_UNABLE, IsADirectoryError, NotADirectoryError)
"""Errors that another try does not mend."""


class StoreClock(Protocol):
    """Time, which tests replace."""

    def now(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class StoreFailed(PolytempoError):
    """A store that did not answer, or a run in it that did not, within a deadline. `code`: a row of the refusals."""

    def __init__(self, features: frozenset[str], **values: object) -> None:
        row = refusal_of(features)
        assert row is not None
        self.code = row.code
        super().__init__(f"{row.code}: " + f"{row.why}; {row.remedy}".format(**values))


class Damaged(PolytempoError):
    """An object with other content than its hash says."""


class StoredObject(NamedTuple):
    """An object's content: tensors, and values of JSON."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def packed(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """An object as bytes. Cost: a pass over the tensors for the hash, and a copy."""
    given = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    text = json.dumps(about, sort_keys=True)
    return save(given, {"about": text, "sha256": _digest(given, text)})


def unpacked(content: bytes) -> StoredObject:
    """The content of `packed`. `Damaged` for anything else."""
    try:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])["__metadata__"]
        tensors, text = load(content), header["about"]
        if _digest(tensors, text) == header["sha256"]:
            return StoredObject(tensors, json.loads(text))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"an object of {len(content)} bytes cannot be read: {error}") from error
    raise Damaged(f"an object of {len(content)} bytes does not have the hash that it names")


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class StoreRequests:
    """Requests, bytes and seconds of a worker so far, failed tries included."""

    def __init__(self) -> None:
        self.puts = self.gets = self.sent_bytes = self.received_bytes = 0
        self.seconds = dict.fromkeys(("create", "put", "get", "remove"), 0.0)

    @property
    def totals(self) -> dict[str, OpTotals]:
        """Puts with the sent bytes, gets with the received bytes, in the form of a trace."""
        put_s = self.seconds["create"] + self.seconds["put"]
        found = {
            "put": OpTotals(self.puts, self.sent_bytes, put_s),
            "get": OpTotals(self.gets, self.received_bytes, self.seconds["get"]),
        }
        return {op: each for op, each in found.items() if each.number}


class ObjectStore:
    """The objects of one run. `deadline_s` bounds all tries of one operation; then `StoreFailed` (PT2906)."""

    def __init__(
        self, objects: Objects, url: str, *, deadline_s: float = 60.0, clock: StoreClock | None = None
    ) -> None:
        self._objects, self.url, self._deadline_s = objects, url, deadline_s
        self.clock: StoreClock = SystemClock() if clock is None else clock
        self.requests = StoreRequests()
        self.waits: Callable[[float], object] = lambda seconds: None
        """Called after each pause that waited for another worker."""

    def create(self, name: str, content: bytes, *, final: tuple[type[Exception], ...] = _FINAL) -> bool:
        """Put a new object; False where another content has the name. Idempotent: a lost answer does no harm.

        `final`: errors that are not tried again.
        """

        def attempt() -> bool:
            self._count_put(content)
            try:
                self._objects.create(name, content)
            except FileExistsError:
                self.requests.gets += 1
                return self._objects.get(name) == content
            return True

        return self._tried("create", name, attempt, final)

    def put(self, name: str, content: bytes) -> None:
        """Put an object, in place of another one."""

        def attempt() -> None:
            self._count_put(content)
            self._objects.put(name, content)

        self._tried("put", name, attempt)

    def get(self, name: str) -> StoredObject | None:
        """An object, compared with its hash; None where there is none."""

        def attempt() -> StoredObject | None:
            self.requests.gets += 1
            try:
                content = self._objects.get(name)
            except FileNotFoundError:
                return None
            self.requests.received_bytes += len(content)
            return unpacked(content)

        return self._tried("get", name, attempt)

    def remove(self, name: str) -> None:
        """Remove an object; nothing where there is none."""
        self._tried("remove", name, lambda: self._objects.remove(name))

    def check_conditional(self) -> None:
        """`Incompatible` (PT2902) for a place that lets two create one name, or cannot create at all.

        `StoreFailed` (PT2906) where it does not answer, and immediately for a bucket that does not exist. Cost: two
        puts, a get and a removal of an object of 16 bytes.
        """
        name, error = f"probe-{secrets.token_hex(8)}", "two workers have created one name"
        try:
            self.create(name, b"first of creators", final=(*_FINAL, FileNotFoundError))
            is_kept = not self.create(name, b"other of creators")
            self.remove(name)
        except StoreFailed as failed:
            if not isinstance(failed.__cause__, _UNABLE):
                raise
            is_kept, error = False, f"{type(failed.__cause__).__name__}: {failed.__cause__}"
        if not is_kept:
            refuse({"object store", "no conditional put"}, url=self.url, error=error)

    def _count_put(self, content: bytes) -> None:
        self.requests.puts += 1
        self.requests.sent_bytes += len(content)

    def _tried(self, what: str, name: str, attempt: Callable[[], T], final: tuple[type[Exception], ...] = _FINAL) -> T:
        """The answer of the first try that succeeds. Each filesystem has errors of its own, so all are tried again."""
        began_s, pause_s = self.clock.now(), FIRST_PAUSE_S
        try:
            while True:
                try:
                    return attempt()
                except final as error:
                    self._fail(what, name, error)
                except Exception as error:
                    if self.clock.now() + pause_s > began_s + self._deadline_s:
                        self._fail(what, name, error)
                    self.clock.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self.requests.seconds[what] += self.clock.now() - began_s

    def _fail(self, what: str, name: str, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}"
        values = {"url": self.url, "what": what, "name": name, "seconds": f"{self._deadline_s:g}", "error": said}
        raise StoreFailed(frozenset({"object store", "no answer"}), **values) from error


class PatientLooks:
    """Pauses between looks for an object that another worker puts."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self._pause_s = store, FIRST_PAUSE_S

    def pause(self, until_s: float = float("inf")) -> None:
        """Wait a little, and longer each time; not past `until_s`."""
        began_s = self._store.clock.now()
        self._store.clock.sleep(max(0.001, min(self._pause_s, until_s - began_s)))
        self._store.waits(self._store.clock.now() - began_s)
        self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)
