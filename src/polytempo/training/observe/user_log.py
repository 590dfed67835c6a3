"""`log`, `log_image`, `log_text`: the user's own numbers, pictures and texts, as records of a run's stream.

    pt.log(perplexity=…)  ──▶ the log of the run that this process trains ──▶ a row of metrics.jsonl
    handle.log(…)         ──▶ the log of `attach(…, out=…)`                ──▶ the same

The value is written as it is: nothing is exchanged, so a call changes no other rank and no virtual time.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.driver import interpreted
from polytempo.core.op import Compute, Op, Program
from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.data.shard import DataShard
from polytempo.data.streams.repeated_reads import repeated_reads
from polytempo.report.status.client_rounds import ROUND
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.records import MOST_NAME, MOST_TEXT, Logged, LoggedImage, LoggedText, StreamRecord, row_of
from polytempo.training.model.ports import STAGE
from polytempo.training.observe.png import png

IMAGES = "images"
"""The folder of pictures in a run's folder."""
_NAME = re.compile(rf"[\w./ ()%:+=@#,-]{{1,{MOST_NAME}}}")
_MOST_VALUES, _MOST_PIXELS, _MOST_NUMBER = 1000, 1 << 24, 1e300
_FILE_NAME = 60

T = TypeVar("T")
Record = Callable[[dict[str, Any]], None]


class UserLog:
    """Checks the user's values, and hands their rows to `record`, if this process writes.

    `record`: None on ranks that write nothing, and in a run without a folder; then values are checked and dropped.
    `step()` is the step of a call without one, such as the step under way. `worker`: with a parameter server.
    `unwritten`: why this process does not write, for a note at the first call.
    """

    def __init__(
        self,
        record: Record | None = None,
        out: Place | None = None,
        step: Callable[[], int] = lambda: 0,
        worker: int | None = None,
        unwritten: str = "",
    ) -> None:
        self._record, self._out, self._step, self._worker = record, out, step, worker
        self._unwritten = unwritten
        self._noted: set[str] = set()

    @property
    def writes(self) -> bool:
        """False where values are checked and dropped."""
        return self._record is not None

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers by name."""
        if len(values) > _MOST_VALUES:
            raise ValueError(f"{len(values):,} values in one call, and at most {_MOST_VALUES:,} are taken; log fewer")
        numbers = {_checked_name(name): _number(name, value) for name, value in values.items()}
        for name in [name for name, number in numbers.items() if not abs(number) < _MOST_NUMBER]:
            self._note_once(name, numbers.pop(name))
        if numbers:
            self._write(Logged(step=self._at(step), values=numbers, worker=self._worker))

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Write a text; its end is left out beyond `MOST_TEXT` characters."""
        if _checked_name(name) == ROUND:
            raise ValueError(f"{name} is the text that the library writes for each round of clients; take another name")
        if not isinstance(text, str):
            raise TypeError(f"{name}: a text is a str, and this is a {type(text).__name__}; write str(…)")
        text = text.encode("utf-8", "replace").decode()
        left_out = len(text) - MOST_TEXT
        shown = text if left_out <= 0 else f"{text[:MOST_TEXT]} … ({left_out:,} more characters)"
        self._write(LoggedText(name=name, step=self._at(step), text=shown, worker=self._worker))

    def note_round(self, text: str, step: int | None = None) -> None:
        """Write the text of a round of clients."""
        self._write(LoggedText(name=ROUND, step=self._at(step), text=text, worker=self._worker))

    def log_image(self, name: str, image: Any, step: int | None = None) -> None:
        """Write a picture as a PNG file in `images/`."""
        _checked_name(name)
        pixels, at = _pixels(name, image), self._at(step)
        if self._record is None or self._out is None:
            return
        of_worker = "" if self._worker is None else f"-worker-{self._worker}"
        path = f"{IMAGES}/{_file_name(name)}-{at}{of_worker}.png"
        try:
            files.made(self._out / IMAGES)
            files.replace(self._out / path, png(pixels))
        except OSError as error:
            self._note(f"{name}: the picture of step {at} is not written: {files.problem(error, self._out / path)}")
            return
        self._write(LoggedImage(name=name, step=at, path=path, worker=self._worker))

    def end(self) -> None:
        """Write nothing from now on."""
        self._record = None
        if _present == [self]:
            set_user_log(None)

    def _at(self, step: int | None) -> int:
        if step is None:
            return self._step()
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            raise ValueError(f"step={step!r}: a step is an int from 0; leave it out to take the run's own")
        return step

    def _write(self, record: StreamRecord) -> None:
        if self._record is not None:
            self._record(row_of(record))
        elif self._unwritten:
            print(f"note: {self._unwritten}", file=sys.stderr)
            self._unwritten = ""

    def _note_once(self, name: str, number: float) -> None:
        if name not in self._noted and len(self._noted) < _MOST_VALUES:
            self._noted.add(name)
            self._note(f"{name} is {number} in step {self._step()}; values that are not finite are left out")

    def _note(self, text: str) -> None:
        if self._record is not None:
            with suppress(OSError):  # the log may be on the same disk
                print(f"note: {text}", file=sys.stderr)


def unwritten_at(port: Port) -> str:
    """The note of a later stage about its values; "" on other ranks."""
    at = {} if port.mesh is None else port.mesh.coordinates(port.rank)
    if [axis for axis, place in at.items() if place] != [STAGE]:
        return ""
    return (
        f"pt.log on stage {at[STAGE]} is not written: rank 0 writes, and it has stage 0, without the loss; give the "
        "job metrics=…, which evaluations compute"
    )


def note_reads(shard: DataShard, metrics: MetricsWriter | None, *, resumed: bool = False) -> None:
    """Say, on standard error and with the first row of metrics, how often the data are read, if that is often.

    `metrics`: None on ranks that say nothing. `resumed`: the run's metrics have the note already.
    """
    note = "" if metrics is None else repeated_reads(shard).note(shard.size)
    if metrics is not None and note:
        print(f"note: {note}", file=sys.stderr)
        if not resumed:
            metrics.write_with_next(row_of(LoggedText(name="data", step=0, text=note)))


_DROPPED = UserLog()
_present: list[UserLog | str] = []
"""The log of the run that this process trains, at most one: `log` has no argument to find it by. Text: a refusal."""


def set_user_log(log: UserLog | None) -> None:
    """Let `pt.log` write to `log` from now on; None: to none."""
    _present[:] = [] if log is None else [log]


async def written_to(log: UserLog | None, program: Program[T]) -> T:
    """Run `program`, and let its calls of `pt.log` write to `log`.

    One process may be many virtual ranks, so each computation writes to the log of its own rank, and so does the
    program where it goes on after others.
    """

    async def perform(op: Op[Any]) -> Any:
        if isinstance(op, Compute):
            op = msgspec.structs.replace(op, work=partial(logged, log, op.work))
        try:
            return await op
        finally:
            set_user_log(log)

    set_user_log(log)
    try:
        return await interpreted(program, perform)
    finally:
        set_user_log(None)


def logged(log: UserLog | None, work: Callable[[], T]) -> T:
    """Run `work`, and let its calls of `pt.log` write to `log`; None: to none."""
    before = list(_present)
    if not any(isinstance(each, str) for each in before):
        set_user_log(log)
    try:
        return work()
    finally:
        _present[:] = before


def user_log() -> UserLog:
    """The log that `pt.log` writes to. Outside of a run's steps it checks values and drops them."""
    found = _present[0] if _present else _DROPPED
    if isinstance(found, str):
        raise ValueError(found)
    return found


@contextmanager
def logs_refused(why: str) -> Iterator[None]:
    """Inside, `pt.log` raises ValueError with the text `why`."""
    before = list(_present)
    _present[:] = [why]
    try:
        yield
    finally:
        _present[:] = before


def log(values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **numbers: Any) -> None:
    """Log numbers of your own in the run that this process trains: `pt.log(perplexity=loss.exp())`.

    They are records `log` of the run's stream (`metrics.jsonl`), and curves on its page, in `polytempo ui` and in
    trackers. In a job's functions, and in a loop around `attach(…, out=…)`. `values`: a dict, for names that are not
    Python's. `step`: by default the number of steps so far; in a job's functions the step under way counts, too,
    as in rows of training, so a resumed run has each once.

    Rank 0's values are written, because ranks do not wait for each other here; take a mean over ranks first where you
    need it. With a parameter server each worker's are, with its number; in a pipeline the first stage's rank writes,
    which computes no loss, and the others say so in a note; `batched` simulations refuse it. A value that is not finite
    is left out, with one note a name. Nothing is written in a run without a folder, and by calls outside of a job's
    training step: evaluations and rehearsals call a job's functions, too.

    Errors: TypeError for a value that is not a number (int, float, or a tensor or array of one element), ValueError
    for a name of more than 200 characters, or of others than letters, digits and ``_./ ()%:+=@#,-``. Cost: a line of
    some 60 bytes; a tensor on an accelerator waits for it.
    """
    user_log().log({**(values or {}), **numbers}, step)


def log_text(name: str, text: str, *, step: int | None = None) -> None:
    """Log a text, such as a sample that the model has written, as `log` does; at most 20,000 characters of it."""
    user_log().log_text(name, text, step)


def log_image(name: str, image: Any, *, step: int | None = None) -> None:
    """Log a picture, as `log` does: a PNG file in the run's folder `images/`.

    `image`: a tensor or array of shape (height, width) or (height, width, 3), of uint8, or of floats from 0 (black) to
    1: others are taken as the nearest of these, NaN as 0. Errors: TypeError for other types, ValueError for other
    shapes and for more than 16,777,216 pixels. Cost: zlib of the pixels, in this thread.
    """
    user_log().log_image(name, image, step)


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r}: a name is a str, and this is a {type(name).__name__}")
    if not _NAME.fullmatch(name):
        shown = ascii(name[:40])
        raise ValueError(
            f"{shown}: a name has 1 to {MOST_NAME} letters, digits and characters of '_./ ()%:+=@#,-'; use others in a "
            "log_text"
        )
    return name


def _number(name: str, value: Any) -> float:
    found = value.detach() if isinstance(value, Tensor) else value
    if not isinstance(found, int | float) and hasattr(found, "item") and hasattr(found, "size"):
        count = found.numel() if isinstance(found, Tensor) else found.size
        if count != 1:
            raise TypeError(f"{name} has {count:,} elements, and one number is logged; write {name}.mean()")
        found = found.item()
    if not isinstance(found, int | float):
        raise TypeError(
            f"{name}: a {type(value).__name__} is not a number; give an int, a float or a tensor of one element, and a "
            "text to log_text"
        )
    try:
        return float(found)
    except OverflowError:  # an int of 400 digits
        return math.inf if found > 0 else -math.inf


def _pixels(name: str, image: Any) -> Tensor:
    """The picture as uint8 of shape (height, width, channels), on the CPU."""
    try:
        pixels = torch.as_tensor(image).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: a {type(image).__name__} is not a picture; give a tensor or an array") from error
    if pixels.dim() == 2:
        pixels = pixels.unsqueeze(-1)
    if pixels.dim() != 3 or pixels.shape[-1] not in (1, 3) or 0 in pixels.shape:
        hint = "; write image.permute(1, 2, 0)" if pixels.dim() == 3 and pixels.shape[0] in (1, 3) else ""
        raise ValueError(f"{name} has shape {tuple(image.shape)}, not (height, width) or (height, width, 3){hint}")
    if pixels.shape[0] * pixels.shape[1] > _MOST_PIXELS:
        raise ValueError(f"{name} has shape {tuple(image.shape)}, more than {_MOST_PIXELS:,} pixels; make it smaller")
    if pixels.is_floating_point():
        return (pixels.float().nan_to_num(0.0, 1.0, 0.0).clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    if pixels.dtype != torch.uint8:
        raise TypeError(f"{name} is of {pixels.dtype}; give uint8 from 0 to 255, or floats from 0 to 1")
    return pixels.cpu()


def _file_name(name: str) -> str:
    """A file name of letters, digits and `-_`, different for each name."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_FILE_NAME]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
