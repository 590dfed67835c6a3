"""`Hub`: reads runs at the page's pace, however many browsers look at them, and makes each view once.

files of runs ──▶ RunList, Watch (one a run) ──▶ Hub ──▶ parts of a view as JSON ──▶ every page with that view
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from polytempo.core.system.files import EVENTS, is_folder, read
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.report.status.live_status import LiveStatus, read_status
from polytempo.report.status.stream import FILES as GROWING
from polytempo.ui.of_run.run_columns import RunColumns
from polytempo.ui.of_run.run_logs import log_lines, logs_of
from polytempo.ui.of_run.run_trace import RunTrace, compared, node_names
from polytempo.ui.page_view import PageView
from polytempo.ui.run_facts import differences, facts, standing
from polytempo.ui.run_list import RunList, version_of

LOOK_S, SLOWEST_S = 1.0, 30.0
"""The least and the greatest time between two looks."""
_WINDOW_S, _STEP = 3.0, 2.0
_READ_S = 0.7
"""The longest time of one look: a run of a million rows comes in parts."""
_MOST_WATCHES, _MOST_VIEWS = 100, 256
_NO_SPAN = (None, None)
_PNG, _MOST_PICTURE = b"\x89PNG\r\n\x1a\n", 16 << 20

Part = tuple[str, bytes]


class LookPace:
    """The interval of looks. share: the part of a core, 0 to 1, that this process may use; None: any.

        pace = LookPace(0.005)
        pace.look(running=True)
        pace.interval_s               # 1 s, or longer if looks and pages are many

    Every three seconds the used part of a core over `share` scales the interval, which shrinks at most twofold.
    """

    def __init__(
        self,
        share: float | None,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self.interval_s = LOOK_S
        """The time between two looks now."""
        self._share, self._clock, self._used = share, clock, used
        self._since = clock(), used()

    def look(self, *, running: bool) -> None:
        """Take note of the processor time; `running`: a run goes on, which the page could hold up."""
        if self._share is None or not running:
            self.interval_s = LOOK_S
            return
        now_s, used_s = self._clock(), self._used()
        passed_s = now_s - self._since[0]
        if passed_s < max(_WINDOW_S, self.interval_s):
            return
        over = (used_s - self._since[1]) / passed_s / self._share
        self._since = now_s, used_s
        wanted_s = self.interval_s * max(1 / _STEP, over)
        self.interval_s = min(SLOWEST_S, max(LOOK_S, wanted_s))


class Watch:
    """One run that a page looks at."""

    def __init__(self, folder: Place, pace: LookPace) -> None:
        self.folder, self._pace = folder, pace
        self.lock = threading.Lock()
        self.columns, self.trace = RunColumns(folder), RunTrace(folder)
        self.status: LiveStatus | None = None
        self.problem = ""
        """The reason why the run's files cannot be read; "" where they can."""
        self.looked_s = -LOOK_S
        """The time of the last look, on the monotonic clock."""
        self.compared: tuple[object, dict[str, Any] | None] = None, None
        """The prediction beside this run, and the traces that it is of."""
        self._rows_then: object = None

    def look(self) -> None:
        """Read the news, if the last look is a second ago, or longer where the pace asks for it."""
        if time.monotonic() - self.looked_s < (LOOK_S - _READ_S if self.columns.behind else self._pace.interval_s):
            return
        rows = version_of(self.folder, GROWING)
        if self.columns.ended and not self.columns.behind and rows != self._rows_then:
            self.columns = RunColumns(self.folder)  # it was resumed, or begun again
        self._rows_then = rows
        try:
            self.status = read_status(self.folder)
            self.columns.look(_READ_S)
            self.problem = ""
        except (ValueError, OSError, RecursionError) as error:
            self.problem = str(error)[:500]
        self.trace.look()
        self.looked_s = time.monotonic()


class _Made:
    """A part of a view, and its time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at_s, self.content = -math.inf, b""


class Hub:
    """The runs below `root`, for any number of pages. All methods may be called from several threads."""

    def __init__(self, root: Place, pace: LookPace) -> None:
        self.root, self.pace = root, pace
        self._list = RunList(root)
        self._rows: list[dict[str, Any]] = []
        self._listed_s = -LOOK_S
        self._lock = threading.Lock()
        self._watches: OrderedDict[str, Watch] = OrderedDict()
        self._made: OrderedDict[tuple[PageView, str], _Made] = OrderedDict()

    def rows(self, *, fresh: bool = False) -> list[dict[str, Any]]:
        """The rows of all runs, at most a second old; `fresh`: of now."""
        with self._lock:
            if fresh or time.monotonic() - self._listed_s >= self.pace.interval_s:
                self._rows = self._list.look()
                self.pace.look(running=any(row["state"] == "running" for row in self._rows))
                self._listed_s = time.monotonic()
            return self._rows

    def folder(self, name: str) -> Place:
        """The folder of the run `name`. KeyError for a run that is not listed."""
        if name not in self._list.folders:
            self.rows(fresh=True)
        return self._list.folders[name]

    def picture(self, name: str, path: str) -> bytes:
        """A picture that a run has logged, a PNG file. KeyError or ValueError for any other file."""
        watch = self._watch(name)
        with watch.lock:
            watch.look()
            paths = {each.get("path") for each in watch.columns.logged if each["kind"] == "image"}
        if path not in paths or isinstance(watch.folder, UrlPath):
            raise ValueError(f"{path!r} is not a picture that this run has logged")
        folder = watch.folder
        for part in path.split("/")[:-1]:
            folder = folder / part
            if not is_folder(folder):
                raise ValueError(f"{folder} is not a folder, or is a link")
        content = read(watch.folder / path, _MOST_PICTURE)
        if not content.startswith(_PNG):
            raise ValueError(f"{path!r} is not a PNG file")
        return content

    def forget(self, name: str) -> None:
        """Leave out a run that was removed."""
        with self._lock:
            self._watches.pop(name, None)
        self.rows(fresh=True)

    def said(self, view: PageView) -> object:
        """Another value after a run of the view has told of an event, which is not a row. Cost: a file's time."""
        found = [self._list.folders.get(name) for name in view.runs]
        return [None if folder is None else version_of(folder, (EVENTS,)) for folder in found]

    def parts(self, view: PageView, *, fresh: bool = False) -> Iterator[Part]:
        """The parts of a view, each with its name; parts that are made fast come first. `fresh`: none is kept.

        Errors: KeyError for a run that is not there, ValueError for a log that is not.
        """
        if fresh:
            self._listed_s = -math.inf
            for name in view.runs:
                self._watch(name).looked_s = -math.inf
        of_run = PageView(kind="run", runs=view.runs) if view.kind == "run" else view
        for name, make in self._makers(view):
            shared = view if name == "curves" else of_run  # pages of any width and axis
            if fresh:
                with self._lock:
                    self._made.pop((shared, name), None)
            yield name, self._once(shared, name, make)

    def _once(self, view: PageView, name: str, make: Callable[[], Any]) -> bytes:
        """The part, made again after a second, by one of the pages that ask for it: the others wait for that one."""
        with self._lock:
            made = self._made.pop((view, name), None) or _Made()
            self._made[view, name] = made
            while len(self._made) > _MOST_VIEWS:
                self._made.popitem(last=False)
        with made.lock:
            if time.monotonic() - made.at_s >= self.pace.interval_s:
                try:
                    made.content = msgspec.json.encode(make())
                except (KeyError, ValueError, OSError):  # a run that is not there takes no place
                    with self._lock:
                        self._made.pop((view, name), None)
                    raise
                made.at_s = time.monotonic()
            return made.content

    def _makers(self, view: PageView) -> list[tuple[str, Callable[[], Any]]]:
        if view.kind == "runs":
            return [("runs", self.rows), ("plans", lambda: self._list.plans), ("sweeps", lambda: self._list.sweeps)]
        if view.kind == "log":
            return [("log", lambda: log_lines(self.folder(view.runs[0]), view.log, view.search))]
        if view.kind == "compare":
            return [("compared", lambda: self._compared(view)), ("curves", lambda: self._curves_of_all(view))]
        name = view.runs[0]
        return [
            ("run", lambda: self._run(name)),
            ("curves", lambda: self._curves(view)),
            ("activity", lambda: self._activity(name)),
            ("prediction", lambda: self._prediction(name)),
        ]

    # ------------------------------------------------------------------ one run

    def _watch(self, name: str) -> Watch:
        folder = self.folder(name)
        with self._lock:
            found = self._watches.pop(name, None) or Watch(folder, self.pace)
            self._watches[name] = found
            while len(self._watches) > _MOST_WATCHES:
                self._watches.popitem(last=False)
            return found

    def _row(self, name: str) -> dict[str, Any]:
        self.folder(name)
        return next((row for row in self.rows() if row["id"] == name), {"id": name, "name": name, "state": "unknown"})

    def _run(self, name: str) -> dict[str, Any]:
        """The facts of a run that need none of its rows."""
        folder, row = self.folder(name), self._row(name)
        try:
            status = read_status(folder)
        except (ValueError, OSError):
            status = None
        processes = [] if status is None else [msgspec.to_builtins(each) for each in status.processes]
        return {"row": row, "facts": facts(folder, row), "processes": processes, "logs": logs_of(folder)}

    def _curves(self, view: PageView) -> dict[str, Any]:
        """The curves and marks of a run."""
        watch, row = self._watch(view.runs[0]), self._row(view.runs[0])
        sent = row.get("bytes_sent_per_rank")
        with watch.lock:
            watch.look()
            columns = watch.columns
            axes = columns.axes(sent)
            axis = view.axis if view.axis in axes else axes[0] if axes else view.axis
            span = (view.begin, view.end) if axis == view.axis else _NO_SPAN
            curves = {
                quantity: columns.curves(axis, quantity, view.pixels, span, sent) for quantity in columns.quantities()
            }
            return {
                "axis": axis,
                "axes": axes,
                "rows": columns.num_rows,
                "behind": columns.behind,
                "curves": {quantity: found for quantity, found in curves.items() if found},
                "marks": columns.marks(axis, sent),
                "logged": columns.logged,
                "clients": columns.client_rounds.plain(),
                "exchanged": columns.exchanged,
                "last": columns.last,
                "workers": {str(worker): last for worker, last in columns.workers.items()},
                "said": standing(columns, row),
                "problem": watch.problem,
            }

    def _activity(self, name: str) -> dict[str, Any]:
        """The timeline and the topology, and the last rows of each worker, which stand for it where there is none."""
        watch = self._watch(name)
        with watch.lock:
            watch.look()
            workers = int(self._row(name).get("workers") or 0)
            names = [] if watch.status is None else [each.who for each in watch.status.processes]
            return {
                "goes_on": watch.trace.goes_on,
                "timeline": watch.trace.timeline,
                "topology": watch.trace.topology(workers, node_names(names)),
                "recent": watch.columns.recent,
            }

    def _prediction(self, name: str) -> dict[str, Any] | None:
        """The newest simulation of the same job, strategy and workers, beside a run on processes."""
        row = self._row(name)
        if row.get("world") != "process":
            return None
        same = ("job", "strategy", "workers")
        virtual = (each for each in self.rows() if each.get("world") == "virtual")
        found = next((each for each in virtual if all(each.get(key) == row.get(key) for key in same)), None)
        if found is None:
            return None
        predicted, measured = self._watch(found["id"]), self._watch(name)
        with predicted.lock:
            predicted.look()
            events, version = predicted.trace.events, predicted.trace.version
        with measured.lock:
            measured.look()
            of = (found["id"], version, measured.trace.version)
            if measured.compared[0] != of:
                measured.compared = of, compared(events, measured.trace.events)
        return {"run": found["id"], "row": found, "times": measured.compared[1]}

    # ------------------------------------------------------------------ several runs

    def _compared(self, view: PageView) -> dict[str, Any]:
        rows = [self._row(name) for name in view.runs]
        found = [facts(self.folder(name), row) for name, row in zip(view.runs, rows, strict=True)]
        return {"runs": rows, "settings": differences(found)}

    def _curves_of_all(self, view: PageView) -> dict[str, Any]:
        """The curves of several runs, by quantity; a pixel holds less where there are many."""
        found, axes = dict[str, list[Any]](), list[str]()
        for number, name in enumerate(view.runs):
            curves = self._curves(_of_one(view, name))
            axes += [axis for axis in curves["axes"] if axis not in axes]
            if curves["axis"] != view.axis:
                continue
            for quantity, each in curves["curves"].items():
                found.setdefault(quantity, []).extend({**curve, "run": number} for curve in each)
        return {"axis": view.axis, "axes": axes, "curves": found}


def _of_one(view: PageView, name: str) -> PageView:
    pixels = max(50, view.pixels // 2) if len(view.runs) > 8 else view.pixels
    return msgspec.structs.replace(view, runs=(name,), pixels=pixels)
