"""Scores and checkpoints of ranks that never wait for each other: copies, which threads work on beside training.

rank 0   ── step k ── k + 1 ── k + 2 ──▶      training
              │ copy
thread        └──▶ score ──▶ row              another thread writes checkpoints
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core import Mesh, Port, Work
from polytempo.core.state import Scalar
from polytempo.core.system.files import made, read, replace
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.spec.run_options import RunOptions
from polytempo.training.checkpoint.background import Background
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError, partial_folder
from polytempo.training.job.context import Moment, TrainingContext
from polytempo.training.job.evaluate import Evaluation, Score, meets, tensors_of
from polytempo.training.model.ports import mesh_of
from polytempo.training.observe.checkpoint_writer import about, complete, part_of, saved_row, written_part
from polytempo.training.observe.collective_observer import CollectiveObserver
from polytempo.worlds import ProcessWorld

_MOST_WAITING = 2
"""Copies of the model that may wait for a thread, in addition to the copy in work."""
_LOOK_S = 0.02
_LOOK_AT_URL_S = 1.0
"""A look under a URL is a request to another host."""
_HASH_BYTES = 64


class _Parts(NamedTuple):
    """A checkpoint under way: its place, the number of its ranks, and its manifest's notes."""

    root: Place
    size: int
    notes: Mapping[str, Scalar]
    mesh: Mesh
    seconds: float
    """Time spent training until then."""


class BackgroundObserver:
    """The observer of real ranks that write to one copy of the parameters on their own. See `training.Observer`.

    Rank 0 scores its view of the parameters when it has finished the step, with its own buffers; each rank writes its
    own part of a checkpoint. Threads do both, of copies, so they may be late. If scores take longer than epochs, some
    are left out for lack of room (`_MOST_WAITING`). A checkpoint is written by all ranks or by none: if the disk is
    slower than `checkpoint_every`, training waits for room. The final model is scored by all ranks together, when
    training is over.

    With `until`, all ranks learn at the end of an epoch rank 0's decision of the epoch before, so that they end at one
    step. It is then that a rank waits, if another is more than an epoch behind.

    A test set that draws from torch's generator draws between the draws of rank 0's training.
    """

    off_s, off_bytes = 0.0, 0

    def __init__(self, world: ProcessWorld, evaluation: Evaluation | None, token: str) -> None:
        """All ranks need the `evaluation`, at the end; and a `token` of this run, the same on all."""
        self._world, self._evaluation, self._token = world, evaluation, token
        self._scorer: Background | None = None
        self._writer: Background | None = None
        self._scores_room = threading.Semaphore(_MOST_WAITING + 1)
        self._saves_room = threading.Semaphore(_MOST_WAITING + 1)
        self._rows: deque[dict[str, Any]] = deque(maxlen=4 * _MOST_WAITING + 4)
        self._record: Callable[[dict[str, Any]], None] = lambda row: None
        self._error: BaseException | None = None
        self._reached = False
        self._stops = False
        self._told: Work[Tensor] | None = None
        """Rank 0's decision at the end of the last epoch, on its way."""
        self._uncommitted: dict[int, _Parts] = {}
        self._looks = False
        self._look_s = 0.0

    def begins(self, rank: int, step: int) -> None:
        """Record new scores on rank 0; now and then have a thread complete checkpoints with all parts."""
        self._record_rows()
        if self._uncommitted and not self._looks and time.monotonic() >= self._look_s:
            self._looks = True
            self._write(self._look)

    def over(self, step: int) -> bool:
        """True once all ranks have heard that a score has reached the goal."""
        return self._stops

    async def score(self, port: Port, context: TrainingContext, moment: Moment) -> None:
        """Have a copy of the model scored, on rank 0."""
        self._raise()
        self._record = context.record
        if port.rank == 0 and self._scores_room.acquire(blocking=False):
            tensors = {name: tensor.clone() for name, tensor in tensors_of(context.replica.model).items()}
            self._scorer = self._scorer or Background("polytempo-scorer", lambda: None)
            work = partial(self._score, context.options, moment, tensors)
            self._scorer.do(partial(self._kept, work, self._scores_room.release))
        if context.options.until:
            await self._hear()
            self._told = await port.start(port.broadcast(torch.tensor([float(self._reached)])))

    async def agreed_score(self, port: Port, context: TrainingContext, step: int) -> Score:
        """Ranks that do not wait for each other have none."""
        raise AssertionError("a plateau of ranks that do not wait for each other is refused before the first step")

    async def save(self, port: Port, context: TrainingContext, moment: Moment) -> None:
        """Have this rank's part written, and on rank 0 all parts be made a checkpoint."""
        self._raise()
        out = context.options.out
        assert out is not None
        if not self._saves_room.acquire(timeout=context.options.timeout_s):
            self._raise()
            raise TimeoutError(
                f"step {moment.step}: no checkpoint could be written for {context.options.timeout_s:g} s"
            )
        self._record, root, notes = context.record, out / "checkpoint", about(port, context)
        part, parts = part_of(port, context), _Parts(root, port.size, notes, mesh_of(port), moment.seconds)
        write = partial(written_part, context, parts.root, moment.step, port.rank, part)
        self._write(partial(self._write_part, parts, moment.step, port.rank, write), self._saves_room.release)

    async def leave(self, port: Port) -> None:
        """Wait for the threads, and complete their checkpoints."""
        await self._hear()
        for thread in (self._scorer, self._writer):
            if thread is not None:
                thread.close()
        self._record_rows()
        self._raise()
        await port.barrier()  # all threads are done
        if not self._commit():
            raise CheckpointError(f"the parts of the checkpoints {sorted(self._uncommitted)} are not all in one folder")
        self._record_rows()

    async def finish(
        self, port: Port, context: TrainingContext, moment: Moment, final: Mapping[str, Tensor]
    ) -> tuple[Score | None, bool | None]:
        """Wait for the threads, and score the final model with all ranks."""
        await self.leave(port)
        together = CollectiveObserver(self._world, self._evaluation)
        score, reached = await together.finish(port, context, moment, final)
        self.off_bytes = together.off_bytes
        return score, None if reached is None else reached or self._stops

    def _record_rows(self) -> None:
        while self._rows:
            self._record(self._rows.popleft())

    def _write(self, work: Callable[[], None], last: Callable[[], None] = lambda: None) -> None:
        self._writer = self._writer or Background("polytempo-writer", lambda: None)
        self._writer.do(partial(self._kept, work, last))

    # ------------------------------------------------------------------ in a thread

    def _kept(self, work: Callable[[], None], last: Callable[[], None]) -> None:
        """Do `work`, then `last`; the first error is kept, and raised where training looks next."""
        try:
            if self._error is None:
                work()
        except BaseException as error:
            self._error = error
        finally:
            last()

    def _score(self, options: RunOptions, moment: Moment, tensors: Mapping[str, Tensor]) -> None:
        assert self._evaluation is not None
        score = self._evaluation.score(tensors)
        self._rows.append(moment.row("test") | score.row())
        self._reached = self._reached or bool(meets(score, options))

    def _write_part(self, parts: _Parts, step: int, rank: int, write: Callable[[], str]) -> None:
        sha256 = write()
        said = self._hash_file(parts.root, step, rank)
        made(said.parent)  # which a part that was left out has not made
        replace(said, sha256)
        if rank == 0:
            self._uncommitted[step] = parts
            self._commit()

    def _look(self) -> None:
        at_url = any(isinstance(parts.root, UrlPath) for parts in self._uncommitted.values())
        self._commit()
        self._look_s = time.monotonic() + (_LOOK_AT_URL_S if at_url else _LOOK_S)
        self._looks = False

    def _commit(self) -> bool:
        """Complete the checkpoints with all parts, oldest first. Returns True if these were all."""
        for step, parts in sorted(self._uncommitted.items(), key=lambda item: item[0]):
            files = [self._hash_file(parts.root, step, rank) for rank in range(parts.size)]
            if not all(file.exists() for file in files):
                return False
            hashes = [read(file, _HASH_BYTES).decode("ascii") for file in files]
            if complete(parts.root, step, hashes, parts.notes, parts.mesh):
                self._rows.append(saved_row(parts.root, step, parts.seconds))
            del self._uncommitted[step]
        return True

    async def _hear(self) -> None:
        """Receive rank 0's decision at the end of the last epoch."""
        if self._told is not None:
            self._stops = bool(await self._told)
            self._told = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _hash_file(self, root: Place, step: int, rank: int) -> Place:
        """The file that says that a rank's part is written; the token tells it from an earlier run's."""
        return partial_folder(root, step) / f"rank-{rank}.{self._token}.sha256"
