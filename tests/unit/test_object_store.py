"""`ObjectStore`: objects keep their bits, one of several creators wins, and faults of a store are outlived or named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import polytempo as pt
from object_store import bucket
from polytempo.worlds.object_store.object_store import Damaged, ObjectStore, StoreFailed, packed, unpacked
from polytempo.worlds.object_store.objects import Objects, objects_at
from polytempo.worlds.object_store.rounds import StoreRounds
from polytempo.worlds.object_store.store_world import StoreWorld
from store_workers import Faults, MemoryObjects

SECONDS = 30.0


class PausesClock:
    """Time passes in pauses alone."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses.append(seconds)


def store_of(objects: Objects) -> tuple[ObjectStore, PausesClock]:
    clock = PausesClock()
    return ObjectStore(objects, "memory", deadline_s=SECONDS, clock=clock), clock


def places(tmp_path: Path) -> list[Objects]:
    return [objects_at(tmp_path / "shared"), objects_at(f"memory://{tmp_path.name}"), objects_at(bucket(tmp_path))]


TENSORS = {
    "double": torch.randn(3, 5, dtype=torch.float64),
    "half": torch.randn(7).bfloat16(),
    "turned": torch.arange(6.0).view(2, 3).T,
    "number": torch.tensor(3),
    "nothing": torch.zeros(0),
}


def test_objects_keep_their_bits(tmp_path: Path) -> None:
    about = {"round": 3, "place": {"left": [[0, 1, 2]]}, "rate": 0.1}
    for objects in places(tmp_path):
        store, _ = store_of(objects)
        assert store.get("a/b") is None
        assert store.create("a/b", packed(TENSORS, about))
        found = store.get("a/b")
        assert found is not None
        assert found.about == about
        assert all(torch.equal(found.tensors[name], each) for name, each in TENSORS.items())
        assert {name: t.dtype for name, t in found.tensors.items()} == {name: t.dtype for name, t in TENSORS.items()}
        store.remove("a/b")
        store.remove("a/b")
        assert store.get("a/b") is None


def test_a_changed_byte_anywhere_shows() -> None:
    content = packed({"w": torch.arange(5.0)}, {"round": 3})
    for i in range(len(content)):
        with pytest.raises(Damaged):
            unpacked(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
    for i in range(0, len(content), 7):
        with pytest.raises(Damaged):
            unpacked(content[:i])


def test_one_of_several_creators_wins(tmp_path: Path) -> None:
    for objects in places(tmp_path):
        won: list[int] = []
        gate = threading.Barrier(8)

        def work(number: int, objects: Objects = objects, won: list[int] = won, gate: threading.Barrier = gate) -> None:
            store, _ = store_of(objects)
            gate.wait(60)
            if store.create("decision", packed({}, {"worker": number})):
                won.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        found = store_of(objects)[0].get("decision")
        assert found is not None
        assert won == [found.about["worker"]]


def test_a_place_without_conditional_puts_is_refused() -> None:
    class Careless(MemoryObjects):
        def create(self, name: str, content: bytes) -> None:
            self.put(name, content)

    class Older(MemoryObjects):
        def create(self, name: str, content: bytes) -> None:
            raise TypeError("pipe_file() got an unexpected keyword argument 'mode'")

    for objects in (Careless(), Older()):
        with pytest.raises(pt.errors.Incompatible, match="PT2902"):
            store_of(objects)[0].check_conditional()
        assert not objects.content


def test_the_start_outlives_faults_and_names_a_store_that_is_not_there(tmp_path: Path) -> None:
    for place in (MemoryObjects(), *places(tmp_path)):
        for what in ("create", "lost create", "get", "remove"):
            faulty = Faults(place, failing(2, what, lambda: OSError(503, "Slow Down")))
            store_of(faulty)[0].check_conditional()
    missing = Faults(MemoryObjects(), failing(10**9, "create", lambda: FileNotFoundError("no such bucket")))
    store, clock = store_of(missing)
    with pytest.raises(StoreFailed, match=r"PT2906.*no such bucket"):
        store.check_conditional()
    assert not clock.pauses, "it is named at once"


def test_a_word_of_leaving_to_a_store_that_is_gone_is_no_error() -> None:
    objects = Faults(MemoryObjects(), failing(10**9, "create", lambda: ConnectionError("refused")))
    world = StoreWorld(StoreRounds(store_of(objects)[0], 0, 2, wait_s=10.0, timeout_s=100.0))
    world.rounds.begun = True
    world.at_exit()
    world.rounds.begun = True
    with pytest.raises(StoreFailed, match="PT2906"):
        world.leave()


def failing(times: int, what: str, error: Callable[[], Exception]) -> Callable[[int, str, str], None]:
    """The first `times` operations of this kind fail."""
    left = [times]

    def fault(number: int, operation: str, name: str) -> None:
        if operation == what and left[0]:
            left[0] -= 1
            raise error()

    return fault


@pytest.mark.parametrize("what", ["create", "lost create", "put", "lost put", "get", "remove", "lost remove"])
def test_faults_are_outlived(what: str) -> None:
    """503, and lost answers: a put with a lost answer has happened, and is put again."""
    objects = MemoryObjects()
    store, clock = store_of(Faults(objects, failing(4, what, lambda: OSError(503, "Slow Down"))))
    content = packed({}, {"worker": 1})
    assert store.create("a", content)
    assert not store.create("a", packed({}, {"worker": 2}))
    store.put("b", content)
    found = store.get("a")
    assert found is not None
    assert found.about == {"worker": 1}
    store.remove("a")
    assert list(objects.content) == ["b"]
    once = what == "lost create"  # the second try finds its own object
    assert clock.pauses == [0.02, 0.04, 0.08, 0.16][: 1 if once else 4]


def test_a_store_that_does_not_answer_is_named_after_its_deadline() -> None:
    store, clock = store_of(Faults(MemoryObjects(), failing(10**9, "get", lambda: OSError(503, "Slow Down"))))
    with pytest.raises(StoreFailed, match=r"PT2906.*get of a.*Slow Down") as caught:
        store.get("a")
    assert caught.value.code == "PT2906"
    assert SECONDS - max(clock.pauses) <= clock.now_s <= SECONDS
    assert max(clock.pauses) == 2.0


def test_what_another_try_does_not_mend_is_not_tried_again() -> None:
    store, clock = store_of(Faults(MemoryObjects(), failing(1, "put", lambda: PermissionError("Access Denied"))))
    with pytest.raises(StoreFailed, match=r"PT2906.*Access Denied"):
        store.put("a", b"")
    assert not clock.pauses


def test_a_damaged_object_is_read_again() -> None:
    content = packed({"w": torch.ones(3)}, {})

    class Tearing(MemoryObjects):
        reads = 0

        def get(self, name: str) -> bytes:
            self.reads += 1
            return content[: 20 * self.reads]

    store, _ = store_of(Tearing())
    found = store.get("a")
    assert found is not None
    assert torch.equal(found.tensors["w"], torch.ones(3))


def test_requests_are_counted() -> None:
    store, _ = store_of(MemoryObjects())
    content = packed({}, {})
    store.create("a", content)
    store.create("a", packed({}, {"other": 1}))
    store.get("a")
    store.get("b")
    counted = store.requests
    assert (counted.puts, counted.gets) == (2, 3)
    assert counted.sent_bytes == len(content) + len(packed({}, {"other": 1}))
    assert counted.received_bytes == len(content)


def test_arguments_of_join_bucket(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="worker is 2 of 2"):
        pt.join_bucket(tmp_path, worker=2, workers=2)
    with pytest.raises(ValueError, match="wait_s is a number of seconds over 0"):
        pt.join_bucket(tmp_path, worker=0, workers=2, wait_s=0.0)
    with pytest.raises(ValueError, match="no filesystem is known"):
        pt.join_bucket("nowhere://bucket/run", worker=0, workers=2)


def test_the_users_own_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    store_of(objects_at(tmp_path / "shared"))[0].check_conditional()
    assert (tmp_path / "shared").is_dir()
