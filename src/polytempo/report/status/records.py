"""The records of a run's stream: one type for each kind of thing that happens, and their lines of JSON.

start ─ train, exchange, test, log, text, image, checkpoint, fault, group, diagnosis … ─ finish
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

import msgspec

from polytempo.core.system.first_failure import FirstFailure
from polytempo.report.status.rows import check_row, parsed_row

VERSION = 1
"""Version of the records. It grows when an entry gets another meaning; new entries and new kinds do not change it."""
MOST_NAME, MOST_TEXT = 200, 20_000
"""Characters of a name, and of a logged text."""
RunState = Literal["running", "finished", "preempted", "failed"]
Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
_Texts = Annotated[dict[_Name, Annotated[str, msgspec.Meta(max_length=MOST_NAME * 6)]], msgspec.Meta(max_length=100)]
_Inside = Annotated[str, msgspec.Meta(pattern=r"^(?!.*\.\.)[\w.-]+(/[\w.-]+)*$", max_length=4 * MOST_NAME)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    pass


class RunStarted(_Record, frozen=True, kw_only=True, tag="start"):
    """The run's facts. First in a stream, except without a launcher: then they are known at its end."""

    version: int = VERSION
    job: str
    strategy: str
    world: str
    """"process", or "virtual" for a simulation."""
    workers: int
    began_s: Number | None = None
    """Seconds since 1970; None for a run without a launcher."""
    steps: int | None = None
    """Steps until its end; None: epochs decide."""
    epochs: Number | None = None
    host: str | None = None
    """The name of the host of the launcher."""
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """The process of the launcher, or of rank 0 without one: the run has ended if this process has."""
    resumed: bool | None = None
    """True for a run that goes on with the run that was in the folder."""
    origin: str | None = None
    """The name of the job for `pt.jobs.find`: digits, my_module:job, /path/to/file.py:job, /path/to/job.toml."""
    settings: _Texts = {}
    """The options that differ from the defaults, as the command line reads them; learning rate, batch and seed always.

    A simulation has its `cluster`, too.
    """
    environment: _Texts = {}
    """Versions of polytempo, torch and Python, `platform`, and `device`: cpu, cuda, …."""


class _Row(_Record, frozen=True, kw_only=True, gc=False):
    step: _Count
    """Steps so far, over all workers and earlier parts of the run."""
    loss: Number | None
    """None: it was not finite."""
    epoch: Number | None = None
    samples: _Count | None = None
    seconds: Number | None = None
    """Time spent training so far; virtual in a simulation."""
    more: dict[str, Any] = {}
    """Further entries of the row, such as `noise_scale` and `delays`."""


class TrainRow(_Row, frozen=True, kw_only=True, tag="train"):
    """A row of training: the mean loss and the rate since the row before."""

    samples_per_s: Number | None = None
    lr: Number | None = None
    """The learning rate of the next step under a schedule; with a parameter server of the worker's last batch."""
    worker: _Count | None = None
    """The row's own worker, with a parameter server."""
    idle_share: Number | None = None
    """Part of this worker's time that it waited for the server, 0 to 1."""
    staleness: Number | None = None
    """Updates between reading weights and applying a gradient: the mean since the row before."""


class TestRow(_Row, frozen=True, kw_only=True, tag="test"):
    """An evaluation of the model on the test set."""

    __test__ = False  # pytest takes classes of this name for tests
    accuracy: Number | None = None


class ExchangedOp(msgspec.Struct, frozen=True):
    """The messages, or the collectives, of one kind."""

    count: _Count
    bytes: _Count
    """Bytes that the row's rank has sent in them; of a bucket's `get` received."""
    seconds: Number
    """The sum of their durations: they overlap with computing, and with each other."""


class ExchangeRow(_Record, frozen=True, kw_only=True, tag="exchange"):
    """The exchanges of one rank between two rows: of rank 0, of the worker of a parameter server, or of the rank that
    writes the folder of a loop. Scores and checkpoints exchange, too."""

    step: _Count
    since_step: _Count
    """The steps of the row before, or of the run's beginning."""
    waited_s: Number
    """Seconds that the rank waited for other ranks meanwhile."""
    ops: Annotated[dict[_Name, ExchangedOp], msgspec.Meta(max_length=100)]
    """Totals by operation, as the trace names them: `all_reduce`, `send`; with a server `post` and `take`, in a bucket
    `put` and `get`."""
    worker: _Count | None = None


class CheckpointSaved(_Record, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint is complete."""

    step: _Count
    at_s: Number | None = None
    """Time spent training until then; virtual in a simulation."""
    path: str
    """Relative to the run's folder: the checkpoint's folder, or the launcher's part of a snapshot of shards."""


class Logged(_Record, frozen=True, kw_only=True, tag="log"):
    """Numbers of the user."""

    step: _Count
    values: Annotated[dict[_Name, Number], msgspec.Meta(max_length=1000)]
    worker: _Count | None = None


class LoggedText(_Record, frozen=True, kw_only=True, tag="text"):
    """A text of the user."""

    name: _Name
    step: _Count
    text: Annotated[str, msgspec.Meta(max_length=2 * MOST_TEXT)]
    worker: _Count | None = None


class LoggedImage(_Record, frozen=True, kw_only=True, tag="image"):
    """A picture of the user."""

    name: _Name
    step: _Count
    path: _Inside
    """The PNG file, relative to the run's folder."""
    worker: _Count | None = None


class Diagnosis(_Record, frozen=True, kw_only=True, tag="diagnosis"):
    """The cause of a slow step, of the run's rate, or of its death."""

    at_s: Number
    """Seconds since the run's start."""
    step: _Count | None = None
    about: _Name
    """"slow rank", "bound" or "death"."""
    who: str
    """The culprit's name in logs and events, such as `rank-3`."""
    rank: _Count | None = None
    host: str | None = None
    text: Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
    """One sentence."""
    values: dict[str, Number] = {}
    """The figures that it rests on."""


def diagnosis_of(death: FirstFailure, at_s: float, step: int | None = None) -> Diagnosis:
    """The record of a run's first failure."""
    host, text = death.host or None, str(death)[:MOST_TEXT]
    return Diagnosis(at_s=at_s, step=step, about="death", who=death.who, rank=death.rank, host=host, text=text)


class ProcessEvent(msgspec.Struct, frozen=True, tag_field="kind", tag="fault"):
    """An event of a process, such as its death or silence: its name, the event, the time, and the consequence."""

    who: str
    how: str
    at_s: Number
    """Seconds since the run's start."""
    then: str
    step: _Count | None = None
    """The step of the run's last row of training then; None: no row had come, or an earlier version wrote it."""


class GroupStatus(msgspec.Struct, frozen=True, tag_field="kind", tag="group"):
    """Workers of an elastic run that train together."""

    generation: int
    """Number of groups up to this one."""
    step: int
    """Number of steps before it."""
    workers: int


class RunFinished(_Record, frozen=True, kw_only=True, tag="finish"):
    """The end of the run, the last record."""

    state: RunState
    """"finished", "preempted" or "failed"."""
    why: str = ""
    """Of a run that failed or was preempted: the first line of its error."""


StreamRecord = (
    RunStarted
    | TrainRow
    | TestRow
    | ExchangeRow
    | CheckpointSaved
    | Logged
    | LoggedText
    | LoggedImage
    | Diagnosis
    | ProcessEvent
    | GroupStatus
    | RunFinished
)
_KINDS: dict[str, type[StreamRecord]] = {str(each.__struct_config__.tag): each for each in get_args(StreamRecord)}
_AT_ONCE = msgspec.json.Decoder(StreamRecord)
_EXCHANGED, _WORKER = b'{"kind": "exchange",', b'"worker": '
_ENTRIES = {kind: frozenset(_KINDS[kind].__struct_fields__) - {"more"} for kind in ("train", "test")}


def record_of(row: dict[str, Any]) -> StreamRecord | None:
    """The record of a line; None for a kind that this version does not know. ValueError if it is broken."""
    check_row(row)
    kind = row.get("kind")
    if not isinstance(kind, str):
        raise ValueError("it has no kind")
    if kind not in _KINDS:
        return None
    if kind in _ENTRIES:
        known = {name: row[name] for name in row.keys() & (_ENTRIES[kind] | {"kind"})}
        row = known | {"more": {name: value for name, value in row.items() if name not in known}}
    return msgspec.convert(row, _KINDS[kind])


def records_in(lines: list[bytes], *, brief: bool = False) -> list[StreamRecord]:
    """The records of lines; a kind that this version does not know is left out. ValueError for a broken line.

    brief: `more` is filled only in the last row of each kind and in rows with a noise scale, and of the records of a
    worker's exchanges the last one is there.
    """
    if brief:
        exchanged = [number for number, line in enumerate(lines) if line.startswith(_EXCHANGED)]
        last = {lines[number][lines[number].rfind(_WORKER) :]: number for number in exchanged}
        left_out = {*exchanged}.difference(last.values())
        lines = [line for number, line in enumerate(lines) if number not in left_out]
    try:
        records: list[StreamRecord] = _AT_ONCE.decode_lines(content := b"\n".join(lines))
    except msgspec.MsgspecError:
        records = []
    if len(records) != len(lines):  # another kind, or an error that is to be named
        return [found for line in lines if (found := record_of(parsed_row(line))) is not None]
    rows = [number for number, record in enumerate(records) if isinstance(record, _Row)]
    lasts = {type(records[number]): number for number in rows}
    for number in list(lasts.values()) if brief and b'"noise_scale"' not in content else rows:
        if not brief or number in lasts.values() or b'"noise_scale"' in lines[number]:
            _fill(records[number], lines[number])
    return records


def _fill(record: StreamRecord, line: bytes) -> None:
    entries = _ENTRIES[str(record.__struct_config__.tag)]
    more = {name: value for name, value in msgspec.json.decode(line).items() if name not in entries}
    del more["kind"]
    check_row(more)
    msgspec.structs.force_setattr(record, "more", more)


def row_of(record: StreamRecord) -> dict[str, Any]:
    """The entries of the record's line. Nulls are left out."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    plain |= plain.pop("more", {})
    return {name: value for name, value in plain.items() if value is not None}


def line_of(record: StreamRecord) -> str:
    """The record as a line of JSON: a row has the entries of its line in `metrics.jsonl`."""
    return json.dumps(row_of(record), ensure_ascii=False).encode(errors="replace").decode()
