"""Runs as they leave their folders, for tests of the live page; and the page's server."""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from polytempo.report.status.event_log import EventLog
from polytempo.report.status.live_status import LiveStatus, ProcessStatus, write_status
from polytempo.report.status.records import (
    CheckpointSaved,
    Diagnosis,
    GroupStatus,
    Logged,
    ProcessEvent,
    RunFinished,
    RunStarted,
)
from polytempo.ui.address import listen
from polytempo.ui.server import serve
from polytempo.worlds.trace import Event, write_chrome_trace
from polytempo.worlds.trace_tail import tail_of

DEADLINE_S = 60.0
NUM_STEPS = 120


def write_run(
    folder: Path,
    *,
    job: str = "digits",
    strategy: str = "sync_sgd(route=native)",
    state: str = "finished",
    world: str = "process",
    workers: int = 2,
    number: int = 0,
    seed: int = 0,
    served: bool = False,
    log: str = "step 1\nstep 2\n",
    why: str = "",
    who: str = "worker",
    lr: str = "",
) -> Path:
    """A run's folder. A running one belongs to this process, and has done half of its steps."""
    folder.mkdir(parents=True)
    done = NUM_STEPS // 2 if state == "running" else NUM_STEPS
    rows = [row for step in range(1, done + 1) for row in rows_of(step, number, workers, served)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    began_s = time.time() - 60
    start = RunStarted(
        job=job,
        strategy=strategy,
        world=world,
        workers=workers,
        began_s=began_s,
        steps=NUM_STEPS,
        host=socket.gethostname(),
        pid=os.getpid(),
        settings={"lr": lr} if lr else {},
    )
    with EventLog(folder, fresh=True) as events:
        events.append(start)
        events.append(ProcessEvent(f"{who}-1", "was killed by SIGKILL", 0.2, "started again"))
        events.append(CheckpointSaved(step=20, at_s=0.3, path="checkpoint/step-00000020"))
        events.append(GroupStatus(2, 30, workers))
        events.append(Diagnosis(at_s=0.5, about="slow rank", who=f"{who}-1", text=f"{who}-1 is 31 % slower"))
        for step in range(10, done + 1, 10):
            events.append(Logged(step=step, values={"perplexity": 100.0 / step}))
        if state != "running":
            events.append(RunFinished(state=state, why=why))  # type: ignore[arg-type]
    last = {kind: next(row for row in reversed(rows) if row["kind"] == kind) for kind in ("train", "test")}
    processes = tuple(
        ProcessStatus(f"{who}-{n}", "worker", "n1", "running" if state == "running" else "ended", 900.0, 0.25, 1.5)
        for n in range(workers)
    )
    status = LiveStatus(
        version=1,
        job=job,
        strategy=strategy,
        world=world,
        workers=workers,
        state=state,  # type: ignore[arg-type]
        written_s=time.time(),
        began_s=began_s,
        launcher_host=socket.gethostname(),
        launcher_pid=os.getpid(),
        why=why,
        steps=NUM_STEPS,
        train=last["train"],
        test=last["test"],
        processes=processes,
        num_events=1,
    )
    if world == "process":
        write_status(folder, status)
    logs = folder / "logs"
    logs.mkdir()
    (logs / "worker-0.log").write_text(log)
    (logs / "worker-1.log").write_text("")
    if state == "running":
        for rank in range(workers):
            write_tail(folder, rank, [event for event in trace(workers) if event.rank == rank])
    if state == "finished":
        _finish(folder, status, seed, number)
    return folder


def write_tail(folder: Path, rank: int, events: list[Event]) -> None:
    """The last operations of a rank, as a run that goes on leaves them."""
    tail = tail_of(folder, rank)
    assert tail is not None
    tail.show(events)


def _finish(folder: Path, status: LiveStatus, seed: int, number: int) -> None:
    result = {
        "job": status.job,
        "strategy": status.strategy,
        "world": status.world,
        "workers": status.workers,
        "steps": NUM_STEPS,
        "epochs": 4.0,
        "samples": 64 * NUM_STEPS,
        "seconds": 0.01 * NUM_STEPS,
        "samples_per_s": 6400.0,
        "loss": 0.1 + number / 10,
        "accuracy": 0.97 - number / 100,
        "train_loss": 0.05,
        "bytes_sent_per_rank": 1.5e6,
        "communication_share": 0.2,
        "batch_size": 32,
        "seed": seed,
        "threads": 1,
        "parameters_sha256": "5f" * 32,
        "trace_hash": "c0" * 32,
    }
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "report.html").write_text("<script>document.title = 'hostile'</script>")
    factor = 1.2 if status.world == "virtual" else 1.0
    write_chrome_trace(folder / "trace.json", trace(status.workers, factor), title="a test", dropped=0)


def rows_of(step: int, number: int, workers: int, served: bool) -> Iterator[dict[str, Any]]:
    """The rows of one step."""
    place = {"step": step, "epoch": step / 30, "samples": 64 * step, "seconds": 0.01 * step}
    loss = 2.3 * math.exp(-step / (20 + 5 * number)) + 0.05 + 0.02 * math.sin(step)
    row = {"kind": "train", **place, "loss": loss, "samples_per_s": 6400.0 + 100 * math.sin(step / 3)}
    yield row | ({"worker": step % workers, "idle_share": 0.25, "staleness": 1.0} if served else {})
    if step % 10 == 0:
        yield {"kind": "test", **place, "loss": loss * 1.1, "accuracy": 1 - math.exp(-step / 30)}


def trace(workers: int, factor: float = 1.0) -> list[Event]:
    """Ranks that compute, and send around a ring."""
    found = []
    for step in range(1, 9):
        begin_s = 0.01 * step * factor
        for rank in range(workers):
            found.append(Event(rank, step, "compute", 0, begin_s, begin_s + 0.006 * factor))
            peer = (rank + 1) % workers
            found.append(Event(rank, step, "send", 1000, begin_s + 0.006 * factor, begin_s + 0.008 * factor, peer))
    return found


class Served:
    """A page's server in a thread of this process."""

    def __init__(self, link: str) -> None:
        self.link = link
        parts = urlsplit(link)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)
        self.base = f"http://{parts.netloc}"
        self.token = parse_qs(parts.query)["token"][0]

    def ask(
        self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None, body: str | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def cookie(self) -> str:
        """The cookie that the link gives."""
        return self.ask(f"/?token={self.token}")[1]["set-cookie"].partition(";")[0]

    def parts(self, query: str, count: int) -> dict[str, Any]:
        """The first `count` parts of a view."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE_S)
        found: dict[str, Any] = {}
        try:
            connection.request("GET", f"/events?{query}", headers={"Cookie": self.cookie()})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            name = ""
            while len(found) < count:
                line = answer.readline().decode()
                if line.startswith("event: "):
                    name = line[7:].strip()
                elif line.startswith("data: ") and name != "hello":
                    found[name] = msgspec.json.decode(line[6:])
        finally:
            connection.close()
        return found


@contextmanager
def serving(root: Path) -> Iterator[Served]:
    """The page of the runs in `root`."""
    address, over = listen(port=0), threading.Event()
    thread = threading.Thread(target=serve, args=(root, address, over.wait))
    thread.start()
    try:
        yield Served(address.link)
    finally:
        over.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
