"""`SnapshotWriter`: writes a shard's snapshots by a thread, while the shard goes on answering."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, final

from torch import Tensor

from polytempo.core.errors import NotFinite
from polytempo.core.system.url_path import Place
from polytempo.server.snapshots.disk import Disk
from polytempo.server.snapshots.snapshot import SnapshotError, check_finite, write


class WrittenSnapshot(NamedTuple):
    """The outcome of writing snapshot `number`; `error` is "" where it is on the disk."""

    number: int
    error: str = ""
    not_finite: NotFinite | None = None
    """The error where it was left out for a value that is NaN or infinite."""


@final
class SnapshotWriter:
    """One shard's writer. At most one snapshot is under way; the calling process never waits for the disk.

        if writer.begin(12, *shard.dump()): …         # later, now and then:
        saved = writer.poll()                         # None, WrittenSnapshot(12), or with an error

    A snapshot that is begun while another is under way is refused (False): the coordinator asks again after the first
    is reported. The thread ends with the process; it may leave a partial file, never half a snapshot.
    """

    def __init__(self, folder: Place, shard: int, disk: Disk | None = None) -> None:
        self._folder, self._shard, self._disk = folder, shard, disk
        self._thread: threading.Thread | None = None
        self._saved: WrittenSnapshot | None = None

    def begin(self, number: int, state: bytes, tensors: Sequence[Tensor]) -> bool:
        """Write in the background; the tensors must not change any more. False if one is under way or unpolled."""
        if self._thread is not None:
            return False
        self._thread = threading.Thread(
            target=self._write, args=(number, state, tuple(tensors)), name=f"snapshot-{number}", daemon=True
        )
        self._thread.start()
        return True

    def poll(self) -> WrittenSnapshot | None:
        """The outcome of the snapshot that was begun, once; None while it is under way, or none was begun."""
        if self._thread is None or self._thread.is_alive():
            return None
        return self._take()

    def close(self, timeout_s: float) -> WrittenSnapshot | None:
        """Wait until the disk has the one that is under way. As `poll`, but TimeoutError if it takes longer."""
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"shard {self._shard}'s snapshot was not written within {timeout_s:g} s; is the disk slow?"
            )
        return self._take()

    def _take(self) -> WrittenSnapshot | None:
        saved, self._saved, self._thread = self._saved, None, None
        return saved

    def _write(self, number: int, state: bytes, tensors: tuple[Tensor, ...]) -> None:
        try:
            check_finite(self._shard, tensors)  # else it would take the place of a good one
            write(self._folder, number, self._shard, state, tensors, self._disk)
            self._saved = WrittenSnapshot(number)
        except NotFinite as error:
            self._saved = WrittenSnapshot(number, str(error), error)
        except (SnapshotError, ValueError) as error:
            self._saved = WrittenSnapshot(number, str(error))
        except BaseException as error:
            self._saved = WrittenSnapshot(number, f"{type(error).__name__}: {error}")
            raise
