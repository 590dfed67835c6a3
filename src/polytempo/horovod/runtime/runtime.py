"""`Runtime`: one process's part of the negotiation, driven: it listens, decides (on rank 0), and performs.

program    submit ─▶ names wait a cycle, or until the program waits for one ─▶ rank 0
           wait   ─▶ the program itself listens and performs, as a thread would have to be woken first
thread     listens and performs while the program does something else
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from polytempo.horovod.negotiation.autotuner import Autotuner, TunedSettings
from polytempo.horovod.negotiation.coordinator import NegotiationCoordinator
from polytempo.horovod.negotiation.matching import num_bytes
from polytempo.horovod.negotiation.member import NegotiationMember, ToDo, ToEnd, ToFail, ToPerform, ToTune
from polytempo.horovod.negotiation.message import Agreement, Farewell, Refuse, Verdicts, Word
from polytempo.horovod.runtime.link import RankLink
from polytempo.horovod.runtime.operation import HorovodInternalError, Operation
from polytempo.horovod.runtime.settings import LEVELS
from polytempo.horovod.runtime.timeline import TimelineFile
from polytempo.worlds.process.threads import close_at_exit, ended

_LOG = logging.getLogger("polytempo.horovod")
_HEADER = "hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score\n"


class Tuning:
    """`log`: where a line for each score goes, as Horovod writes it: the threshold in MiB, the score in bytes a
    microsecond, the best setting last. `facts`: the columns before, for settings that Horovod tunes and this library
    does not. Errors: OSError where the file cannot be made."""

    def __init__(self, tuner: Autotuner, log: str, facts: Sequence[bool]) -> None:
        self._tuner, self._log = tuner, Path(log) if log else None
        self._facts = ",".join(str(int(fact)) for fact in facts)
        if self._log is not None:
            self._log.write_text(_HEADER, encoding="utf-8")

    def performed(self, agreements: Sequence[Agreement], now_s: float) -> TunedSettings | None:
        """The new settings, if they change."""
        requests = [agreed.request for agreed in agreements if agreed.request.shapes]
        tuned = self._tuner.performed([each.name for each in requests], sum(map(num_bytes, requests)), now_s)
        rows, self._tuner.rows = self._tuner.rows, []
        for place, (settings, score) in enumerate(rows):
            best = self._tuner.done and place == len(rows) - 1
            self._line(settings, score, "best parameters" if best else "measured")
        return tuned

    def _line(self, settings: TunedSettings, score: float, what: str) -> None:
        line = f"{self._facts},{1000 * settings.cycle_s:g},{settings.fusion_bytes / (1 << 20):g},{score:g}"
        _LOG.info("autotuner: %s: %s", what, line)
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


_GRACE_S = 0.002
"""The thread begins to listen so long after the program's last wait."""
_REST_S = 0.01
"""The thread rests for so long before it looks again whether the program still waits."""
_SLICE_S = 0.1
_TICK_S = 0.25
_TRACE = LEVELS["trace"]
_MARGIN_S = 10.0
"""`close` waits for so long for another thread that performs something."""

Perform = Callable[[Sequence[Agreement], Sequence[Operation | None]], None]

_encode = msgspec.msgpack.Encoder().encode
_WORDS: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)
_VERDICTS: msgspec.msgpack.Decoder[Verdicts] = msgspec.msgpack.Decoder(Verdicts)


class Runtime:
    """`coordinator` is rank 0's, None elsewhere. `perform` gets this process's operations; None where it has none.

    `cycle_s`: how long names may wait for others before they are submitted together. `limit_s`: how long a program
    waits for one operation; 0: for ever. `tuning`: rank 0's, where it changes the settings.
    """

    def __init__(
        self,
        member: NegotiationMember,
        coordinator: NegotiationCoordinator | None,
        link: RankLink,
        perform: Perform,
        *,
        cycle_s: float,
        limit_s: float,
        tuning: Tuning | None = None,
    ) -> None:
        self.member, self._coordinator, self._link, self._perform = member, coordinator, link, perform
        self._cycle_s, self._limit_s, self._tuning = cycle_s, limit_s, tuning
        self._operations: dict[tuple[int, str], Operation] = {}
        self._todo: deque[ToDo] = deque()
        self._lock = threading.Lock()
        """The machines and their connections: see the module. No thread waits while it holds it."""
        self._pump = threading.Lock()
        """The state of the thread that listens and performs."""
        self.timeline: TimelineFile | None = None
        """Rank 0's, where one is written; see `watch`."""
        self._waiting = 0
        self._helped_s = self._first_s = self._ticked_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="polytempo-horovod", daemon=True)
        self._thread.start()
        close_at_exit(self)

    # ------------------------------------------------------------------ the program

    def submit(self, operation: Operation) -> None:
        """Ask for it. Errors: ValueError for a name that is under way, HorovodInternalError where all is over."""
        with self._lock:
            if self.member.closed:
                raise HorovodInternalError(self.member.closed)
            first = not self.member.has_to_say
            self.member.submit(operation.request)
            self._operations[operation.request.key] = operation
            if first:
                self._first_s = time.monotonic()
        if first and self._first_s - self._helped_s > _GRACE_S:
            self._link.interrupt()

    def wait(self, operation: Operation) -> None:
        """Until it is done. Raises the operation's error."""
        self._waiting += 1
        until_s = time.monotonic() + self._limit_s if self._limit_s else float("inf")
        try:
            while not operation.done:
                if not self._pump.acquire(blocking=False):
                    self._link.interrupt()
                    self._pump.acquire()
                try:
                    while not operation.done:
                        self._turn(_SLICE_S, flush=True, spin=True)
                        if time.monotonic() > until_s:
                            self._end(f"rank {self.member.rank} has heard nothing from rank 0 for {self._limit_s:g} s")
                finally:
                    self._helped_s = time.monotonic()
                    self._pump.release()
        finally:
            self._waiting -= 1
        operation.result()

    def done(self, operation: Operation) -> bool:
        """True once it is done, well or not."""
        if not operation.done and self._pump.acquire(blocking=False):
            try:
                self._turn(0.0, flush=True)
            finally:
                self._pump.release()
        elif not operation.done:
            self._link.interrupt()
        return operation.done

    def close(self, reason: str = "") -> None:
        """Perform the agreed operations, tell the others, and end the thread. Remaining requests are errors."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._link.interrupt()
        ended(self._thread)
        if not self._pump.acquire(timeout=_MARGIN_S):
            return  # another thread performs an endless operation: it ends with the process
        try:
            self._turn(0.0, flush=True)
            self._leave(reason)
            self._end("Horovod has been shut down")
            self._link.close()
            self.watch(None)
        finally:
            self._pump.release()

    def _leave(self, reason: str) -> None:
        """Tell the others that this rank performs nothing any more."""
        with self._lock:
            if self.member.closed:
                return
            farewell = Farewell(reason)
            if self._coordinator is None:
                self._link.send(0, _encode(farewell))
            else:
                self._receive(self._coordinator, 0, farewell)

    def watch(self, timeline: TimelineFile | None) -> None:
        """Report events to `timeline` from now on; the timeline before it is closed. On ranks but 0 it has no use."""
        with self._lock:
            before, self.timeline = self.timeline, timeline
        if before is not None:
            before.close()

    def phase(self, name: str) -> None:
        """A phase of the current operation begins."""
        if self.timeline is not None:
            self.timeline.phase(name)

    # ------------------------------------------------------------------ listening and performing

    def _serve(self) -> None:
        while not self._closed.is_set():
            if self._waiting or time.monotonic() - self._helped_s < _GRACE_S:
                self._closed.wait(_REST_S if self._waiting else _GRACE_S)
                continue
            with self._pump:
                left_s = self._first_s + self._cycle_s - time.monotonic() if self.member.has_to_say else _SLICE_S
                self._turn(max(left_s, 0.0), flush=left_s <= 0)

    def _turn(self, timeout_s: float, *, flush: bool, spin: bool = False) -> None:
        """Send requests, receive verdicts until the time is over, and perform the agreed operations."""
        if flush:
            self._flush()
        if not self._todo:
            for rank, message in self._link.wait(timeout_s, spin=spin):
                with self._lock:
                    self._heard(rank, message)
        if self._coordinator is not None:
            self._tick(self._coordinator)
        while self._todo:
            self._do(self._todo.popleft())

    def _flush(self) -> None:
        with self._lock:
            word = self.member.flush()
            if word is None:
                return
            if self._coordinator is None:
                self._link.send(0, _encode(word))
            else:
                if self.timeline is not None:
                    self.timeline.cycle()
                self._receive(self._coordinator, 0, word)

    def _heard(self, rank: int, message: bytes | None) -> None:
        try:
            if self._coordinator is None:
                if message is None:
                    self._todo.append(ToEnd("rank 0 is lost (its process has ended)"))
                elif not self.member.closed:
                    self._todo.extend(self.member.receive(_VERDICTS.decode(message)))
            elif message is None:
                self._decided(self._coordinator.lost(rank, "its process has ended"))
            else:
                self._receive(self._coordinator, rank, _WORDS.decode(message))
        except msgspec.MsgspecError as error:
            self._todo.append(ToEnd(f"rank {rank} has sent a message that no rank of this version sends: {error}"))

    def _receive(self, coordinator: NegotiationCoordinator, rank: int, word: Word) -> None:
        if self.timeline is not None:
            self.timeline.ready(rank, coordinator.asked(rank, word))
        self._decided(coordinator.receive(rank, word))

    def _decided(self, told: Verdicts | None) -> None:
        """Tell all ranks, this one included."""
        if told is None:
            return
        data = _encode(told)
        for rank in range(1, self._link.size):
            self._link.send(rank, data)
        if self.member.closed:
            return
        todo = self.member.receive(told)
        self._todo.extend(todo)
        if self.timeline is not None:
            self._show(self.timeline, told, todo)

    def _show(self, timeline: TimelineFile, told: Verdicts, todo: Sequence[ToDo]) -> None:
        for each in todo:
            if isinstance(each, ToPerform):
                timeline.agreed(agreed.request for agreed in each.agreements)
        for verdict in told.verdicts:
            if isinstance(verdict, Refuse):
                timeline.refused((verdict.process_set, verdict.name))

    def _tick(self, coordinator: NegotiationCoordinator) -> None:
        now_s = time.monotonic()
        if now_s - self._ticked_s < _TICK_S:
            return
        self._ticked_s = now_s
        with self._lock:
            self._decided(coordinator.tick(now_s))
            warnings, coordinator.warnings = coordinator.warnings, []
        for warning in warnings:
            _LOG.warning("%s", warning)

    def _do(self, todo: ToDo) -> None:
        match todo:
            case ToPerform(agreements):
                self._perform_together(agreements)
            case ToFail(key, reason):
                self._over([key], reason)
            case ToTune(cycle_s):
                self._cycle_s = cycle_s
                _LOG.debug("a cycle is %g ms now", 1000 * cycle_s)
            case ToEnd(reason):
                self._end(reason)

    def _perform_together(self, agreements: Sequence[Agreement]) -> None:
        keys = [agreed.request.key for agreed in agreements]
        operations = [self._operations.get(key) for key in keys]
        timeline = self.timeline
        if timeline is not None:
            timeline.begins(agreements)
        try:
            self._perform(agreements, operations)
        except Exception as error:
            for key in keys:
                self._over([key], f"{key[1]!r} could not be performed: {error}")
            self._leave(f"{keys[0][1]!r} could not be performed: {error}")
            self._end(f"{keys[0][1]!r} could not be performed: {error}")
            return
        if timeline is not None:
            timeline.ends(agreements)
        if _LOG.isEnabledFor(_TRACE):
            _LOG.log(_TRACE, "performed %s", ", ".join(name for _, name in keys))
        self._over(keys)
        if self._tuning is not None and self._coordinator is not None:
            self._tune(self._tuning, self._coordinator, agreements)

    def _tune(self, tuning: Tuning, coordinator: NegotiationCoordinator, agreements: Sequence[Agreement]) -> None:
        tuned = tuning.performed(agreements, time.monotonic())
        if tuned is not None:
            with self._lock:
                self._decided(coordinator.retune(*tuned))

    def _over(self, keys: Sequence[tuple[int, str]], error: str = "") -> None:
        with self._lock:
            self.member.finish(keys)
            operations = [self._operations.pop(key, None) for key in keys]
        for operation in operations:
            if operation is not None:
                if error:
                    operation.tensors, operation.outputs = [], []  # its handle may be kept for ever, these need not
                operation.error = error
                operation.done = True

    def _end(self, reason: str) -> None:
        """All that is asked for, now and later, is an error."""
        with self._lock:
            self.member.closed = self.member.closed or reason
            keys = list(self._operations)
        self._todo.clear()
        self._over(keys, self.member.closed)
