"""The dask engine without dask: places of agents, refusals, and tasks at a fake client."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from polytempo import engines
from polytempo.engines.engine import Launch, parse_engine
from polytempo.engines.on_dask import dask_engine as dask_engine
from polytempo.engines.on_dask.dask_engine import Dask, DaskStarter, spread
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.wire.keys import make_keys

TICKET = AgentTicket("tcp://127.0.0.1:1", make_keys())


class FakeFuture:
    def __init__(self) -> None:
        self.status, self.said, self.cancelled = "pending", "", False

    def done(self) -> bool:
        return self.status != "pending"

    def result(self) -> str:
        return self.said

    def cancel(self) -> None:
        self.cancelled = True


class FakeClient:
    """The part of a `distributed.Client` that `DaskStarter` calls; `run` ends a task immediately."""

    asynchronous = False
    scheduler = SimpleNamespace(address="tcp://10.0.0.1:8786")

    def __init__(self, *workers: str) -> None:
        self.workers = list(workers)
        self.submitted: list[tuple[str, int, dict[str, Any]]] = []
        self.futures: dict[str, FakeFuture] = {}

    def nthreads(self) -> dict[str, int]:
        return dict.fromkeys(self.workers, 1)

    def submit(self, task: Any, name: str, ticket: str, *, key: str, **options: Any) -> FakeFuture:
        assert name == key
        self.submitted.append((key, json.loads(ticket)["number"], options))
        self.futures[key] = FakeFuture()
        return self.futures[key]

    def run(self, call: Any, key: str, **options: Any) -> None:
        self.futures[key].status = "finished"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_engine, "_LOOK_S", 0.0)


@pytest.mark.parametrize(
    ("agents", "count", "chosen"),
    [
        ({}, 2, ["a", "b"]),
        ({}, 4, ["a", "b", "c", "a"]),
        ({"a": 1}, 2, ["b", "c"]),
        ({"a": 2, "b": 1, "c": 1}, 3, ["b", "c", "a"]),
    ],
)
def test_new_agents_go_where_there_are_the_fewest(agents: dict[str, int], count: int, chosen: list[str]) -> None:
    assert spread(["a", "b", "c"], agents, count) == chosen


def test_each_agent_is_a_task_that_is_pinned_to_a_worker() -> None:
    client = FakeClient("tcp://a:1", "tcp://b:1")
    agents = DaskStarter(client).start([0, 1], TICKET)
    assert [agent.where for agent in agents] == ["dask worker tcp://a:1", "dask worker tcp://b:1"]
    for (key, number, options), worker in zip(client.submitted, client.workers, strict=True):
        assert key.startswith(f"polytempo-agent-{number}-")
        assert options == {
            "workers": [worker],
            "allow_other_workers": False,
            "retries": 0,
            "pure": False,
        }


def test_a_lost_worker_is_noticed_and_others_take_its_agents() -> None:
    """1. worker a is gone, 2. its task is cancelled, or it would begin again there, 3. the next agent is on b."""
    client = FakeClient("tcp://a:1", "tcp://b:1")
    starter = DaskStarter(client)
    first, second = starter.start([0, 1], TICKET)
    client.workers.remove("tcp://a:1")
    starter.poll()
    assert first.ended == "ended with its dask worker, which the scheduler has lost"
    assert second.ended is None
    assert [future.cancelled for future in client.futures.values()] == [True, False]
    [third] = starter.start([2], TICKET)
    assert third.where == "dask worker tcp://b:1"


@pytest.mark.parametrize(
    ("status", "how"),
    [
        ("finished", "ended with exit code 1"),
        ("cancelled", "was lost by dask (its task is cancelled)"),
        ("error", "was lost by dask (its task is error)"),
    ],
)
def test_how_a_task_has_ended(status: str, how: str) -> None:
    client = FakeClient("tcp://a:1")
    starter = DaskStarter(client)
    [agent] = starter.start([0], TICKET)
    [future] = client.futures.values()
    future.status, future.said = status, "ended with exit code 1"
    starter.poll()
    assert agent.ended == how


def test_stopping_ends_all_tasks() -> None:
    client = FakeClient("tcp://a:1")
    starter = DaskStarter(client)
    agents = starter.start([0, 1], TICKET)
    starter.stop()
    starter.stop()
    assert all(agent.ended for agent in agents)
    assert all(future.cancelled and future.status == "finished" for future in client.futures.values())


@pytest.mark.parametrize("workers", [None, ["tcp://c:1"]])
def test_without_workers_there_is_no_run(workers: list[str] | None) -> None:
    client = FakeClient(*([] if workers is None else ["tcp://a:1"]))
    with pytest.raises(ValueError, match=r"dask worker tcp://10\.0\.0\.1:8786"):
        DaskStarter(client, workers).usable()


@pytest.mark.parametrize(
    ("client", "options", "named"),
    [
        (17, {}, "client=17 must be a distributed.Client"),
        ("", {}, "dask:tcp://host:8786"),
        (SimpleNamespace(nthreads=None, asynchronous=True), {}, "asynchronous=False"),
        (FakeClient(), {"workers": "tcp://a:1"}, "workers='tcp://a:1'"),
        (FakeClient(), {"workers": []}, r"workers=\[\]"),
        (FakeClient(), {"wait_s": -1}, "wait_s=-1"),
    ],
)
def test_impossible_options_are_refused(client: object, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Dask(client, **options)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("tcp://10.0.0.1:8786", "10.0.0.1"),
        ("tls://[fe80::1]:8786", "fe80::1"),
        ("inproc://10.0.0.1/7/1", "127.0.0.1"),
    ],
)
def test_the_host_of_a_scheduler(url: str, host: str) -> None:
    assert dask_engine.host_of(url) == host


def test_the_command_line_gives_the_schedulers_address() -> None:
    assert parse_engine("dask:tcp://head:8786") == engines.dask("tcp://head:8786")
    with pytest.raises(ValueError, match="dask:tcp://host:8786"):
        parse_engine("dask")


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    launch = Launch(lambda role: None, SimpleNamespace(), dict, 1, 1)  # type: ignore[arg-type] # no run
    with pytest.raises(ImportError, match=r"pip install 'polytempo\[dask\]'"), Dask("tcp://head:8786").open(launch):
        pass


def test_a_function_is_refused() -> None:
    client = FakeClient("tcp://a:1")
    with pytest.raises(ValueError, match="a function cannot travel"):
        Dask(client).open(Launch(lambda role: 1, None, dict, 1, 1)).__enter__()
