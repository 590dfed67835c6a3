"""The record of a private run's noise: another answer has other noise, also where a process has died."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytempo.core.calls.refusals import Incompatible
from polytempo.core.system.url_path import UrlPath
from polytempo.federated.privacy import Releases
from polytempo.training.federated.noise_record import FILE, NoiseRecord


def test_other_answers_to_a_round_have_another_number(tmp_path: Path) -> None:
    record = NoiseRecord(tmp_path, 6, resume=False)
    secret = record.secret(0)
    assert [record.attempt(0, "a"), record.attempt(1, "b"), record.attempt(1, "b")] == [0, 0, 0]
    again = NoiseRecord(tmp_path, 6, resume=True)
    assert again.secret(1) == secret
    assert [again.attempt(1, "c"), again.attempt(1, "b"), again.attempt(2, "b")] == [1, 0, 0]
    assert again.releases(2) == Releases(6, 2, ((2, 1),))
    assert NoiseRecord(None, 6, resume=False).secret(0) != NoiseRecord(None, 6, resume=False).secret(0)


def test_lost_rounds_count_before_they_are_made_again(tmp_path: Path) -> None:
    record = NoiseRecord(tmp_path, 6, resume=False)
    record.secret(0)
    for number in range(5):
        record.attempt(number, "a")
    assert record.releases(3) == Releases(6, 3)
    assert NoiseRecord(tmp_path, 6, resume=True).releases(3) == Releases(6, 5)


def test_a_line_without_an_end_had_no_noise(tmp_path: Path) -> None:
    record = NoiseRecord(tmp_path, 6, resume=False)
    record.secret(0)
    record.attempt(0, "a")
    with (tmp_path / FILE).open("a") as file:
        file.write('[1, "b')
    again = NoiseRecord(tmp_path, 6, resume=True)
    assert again.releases(1) == Releases(6, 1)
    assert again.attempt(1, "c") == 0
    assert NoiseRecord(tmp_path, 6, resume=True).releases(2) == Releases(6, 2)


def test_a_new_run_in_the_folder_has_a_new_secret(tmp_path: Path) -> None:
    first = NoiseRecord(tmp_path, 6, resume=False).secret(0)
    assert NoiseRecord(tmp_path, 6, resume=False).secret(0) != first
    assert NoiseRecord(tmp_path, 6, resume=True).releases(0) == Releases(6, 0)


def test_a_run_without_its_record_or_with_others_clients_does_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match=r"PT2533.*there is none"):
        NoiseRecord(tmp_path, 6, resume=True).secret(3)
    NoiseRecord(tmp_path, 6, resume=True).secret(0)
    with pytest.raises(Incompatible, match=r"PT2533.*of 6 clients, and the run has 7"):
        NoiseRecord(tmp_path, 7, resume=True).secret(0)
    (tmp_path / FILE).write_text("junk\n")
    with pytest.raises(ValueError, match="not a record of noise"):
        NoiseRecord(tmp_path, 6, resume=True).secret(0)


def test_a_record_in_a_bucket() -> None:
    folder = UrlPath("memory://noise-record")
    record = NoiseRecord(folder, 6, resume=False)
    record.secret(0)
    record.attempt(0, "a")
    record.attempt(0, "b")
    assert NoiseRecord(folder, 6, resume=True).releases(1) == Releases(6, 1, ((2, 1),))


def test_a_record_in_a_bucket_is_written_in_parts_before_orders_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes grow as lines do, and another process finds each order."""
    put, write = list[int](), UrlPath.write

    def writes(path: UrlPath, content: bytes) -> None:
        put.append(len(content))
        write(path, content)

    monkeypatch.setattr(UrlPath, "write", writes)
    folder, clients = UrlPath("memory://noise-of-orders"), list(range(1000, 1100))
    record = NoiseRecord(folder, 6, resume=False)
    record.secret(0)
    for number in range(200):
        record.ask(number, clients)
        if number % 50 == 0:
            assert NoiseRecord(folder, 6, resume=True).most_turns(number) == number + 1
    assert max(put) < 1 << 15
    assert record.most_turns(200) == 200 == NoiseRecord(folder, 6, resume=True).most_turns(200)


def test_an_order_that_is_not_written_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    record = NoiseRecord(UrlPath("memory://noise-that-fails"), 6, resume=False)
    record.secret(0)

    def fails(path: UrlPath, content: bytes) -> None:
        raise OSError("the bucket is gone")

    monkeypatch.setattr(UrlPath, "write", fails)
    with pytest.raises(OSError, match="gone"):
        record.ask(0, [1])
    with pytest.raises(OSError, match="gone"):
        record.attempt(0, "a")
    assert record.most_turns(0) == 0
