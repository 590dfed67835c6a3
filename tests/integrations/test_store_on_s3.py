"""Workers that meet in a bucket of a real S3 server, moto's, by s3fs: its conditional puts, and its faults over HTTP.

No answer of this server is simulated by us but errors: a request may get 503 in place of an answer, or its answer may
be lost after it was performed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import s3fs
import torch
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

import polytempo as pt
from laws.test_store_log import counted as pushed
from laws.test_store_rounds import ONCE, WORKERS, counted, crew_of, loop, rows
from polytempo.worlds.object_store.object_store import ObjectStore, StoreFailed, StoreRequests, packed
from polytempo.worlds.object_store.objects import objects_at
from polytempo.worlds.object_store.store_world import StoreWorld
from polytempo.worlds.process.process_world import set_current
from store_workers import Crew

STRATEGY = "diloco(period=4)"
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",  # the library's own tries are tested
}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # botocore's and moto's own


class Quiet(WSGIRequestHandler):
    def log(self, *_: Any, **__: Any) -> None:
        """Say nothing of requests."""


class Faulty:
    """The server's application, with a fault before or after requests on objects: `fault(number)` names it, or ""."""

    def __init__(self) -> None:
        self._inner = DomainDispatcherApplication(create_backend_app)
        self._number, self._lock = 0, threading.Lock()
        self.fault: Callable[[int], str] = lambda number: ""
        self.paths: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        with self._lock:
            self._number += 1
            fault = self.fault(self._number)
            self.paths.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}")
        if fault == "503":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        elif fault == "lost":
            list(self._inner(environ, lambda *_: None))
        else:
            return self._inner(environ, start_response)
        start_response("503 Service Unavailable", [("Content-Type", "application/xml")])
        return [b"<Error><Code>ServiceUnavailable</Code><Message>out of order</Message></Error>"]


@pytest.fixture(scope="module")
def server() -> Iterator[Faulty]:
    app = Faulty()
    serving = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    s3fs.S3FileSystem.clear_instance_cache()  # of other settings
    with pytest.MonkeyPatch.context() as patched:
        for name, value in SETTINGS.items():
            patched.setenv(name, value)
        patched.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{serving.server_port}")
        s3fs.S3FileSystem().mkdir("runs")
        yield app
        s3fs.S3FileSystem.clear_instance_cache()
    serving.shutdown()
    thread.join(60)


@pytest.fixture
def url(server: Faulty, request: pytest.FixtureRequest) -> Iterator[str]:
    server.paths.clear()
    yield f"s3://runs/{request.node.name}"
    server.fault = lambda number: ""


def trained(url: str) -> tuple[list[Any], list[StoreRequests]]:
    """A run of three workers by the bucket, and their requests."""
    requests: list[StoreRequests] = []

    def work(world: StoreWorld) -> object:
        answer = loop(STRATEGY)(world)
        requests.append(world.rounds.store.requests)
        return answer

    crew = Crew(WORKERS, wait_s=100.0)
    for worker in range(WORKERS):
        crew.add(worker, work, objects=objects_at(url))
    return crew.run(), requests


def test_one_of_several_creators_wins(url: str) -> None:
    won: list[int] = []
    gate = threading.Barrier(8)

    def work(number: int) -> None:
        store = ObjectStore(objects_at(url), url)
        gate.wait(60)
        if store.create("decision", packed({}, {"worker": number})):
            won.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = ObjectStore(objects_at(url), url).get("decision")
    assert found is not None
    assert won == [found.about["worker"]]


def test_a_bucket_that_is_not_there_is_named_at_once(url: str) -> None:
    ObjectStore(objects_at(url), url).check_conditional()
    missing = "s3://nowhere/run"
    with pytest.raises(StoreFailed, match="PT2906"):
        ObjectStore(objects_at(missing), missing).check_conditional()


def test_a_run_has_the_bits_of_one_in_memory_and_lists_nothing(url: str, server: Faulty) -> None:
    """A listing may lag in some stores. No request of a run is one, and each that is counted is one of the server's."""
    answers = crew_of(*[loop(STRATEGY)] * WORKERS).run()
    found, requests = trained(url)
    for (model, steps), (other, others) in zip(found, answers, strict=True):
        assert torch.equal(model, other)
        assert steps == others
    methods = Counter(path.partition(" ")[0] for path in server.paths)
    assert set(methods) <= {"PUT", "GET", "DELETE"}
    assert methods["PUT"] == sum(each.puts for each in requests)
    assert methods["GET"] == sum(each.gets for each in requests)
    assert not [path for path in server.paths if path.startswith("GET") and "/test_" not in path.partition("?")[0]]
    assert counted(objects_at(url)) == ONCE  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "one_of"), [("503", 5), ("lost", 7)])
def test_faults_of_the_server_change_no_bit(url: str, server: Faulty, kind: str, one_of: int) -> None:
    expected = crew_of(*[loop(STRATEGY)] * WORKERS).run()[0][0]
    random = torch.Generator().manual_seed(3)
    server.fault = lambda number: kind if torch.rand((), generator=random) < 1 / one_of else ""
    for model, _ in trained(url)[0]:
        assert torch.equal(model, expected)


@pytest.mark.parametrize("fault", ["", "503", "lost"])
def test_a_log_of_movements_counts_each_sample_once(url: str, server: Faulty, fault: str) -> None:
    random = torch.Generator().manual_seed(3)
    server.fault = lambda number: fault if torch.rand((), generator=random) < 1 / 6 else ""
    crew = Crew(WORKERS, wait_s=100.0)
    for worker in range(WORKERS):
        crew.add(worker, loop("async_diloco(period=4)"), objects=objects_at(url))
    for found in crew.run():
        assert not isinstance(found, BaseException), found
    server.fault = lambda number: ""
    assert pushed(objects_at(url)) == ONCE  # type: ignore[arg-type]


def test_join_bucket_takes_the_url(url: str) -> None:
    loop(STRATEGY)(pt.join_bucket(url, worker=0, workers=1))
    assert len(rows(objects_at(url))) > 1  # type: ignore[arg-type]
    set_current(None)
