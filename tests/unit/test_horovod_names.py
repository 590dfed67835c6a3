"""The table of docs/horovod.md says what there is; and Horovod's settings, encodings and links by themselves."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

import polytempo.horovod.torch as hvd
from polytempo.horovod.plain_values import decoded, encoded
from polytempo.horovod.runtime.link import RankLink
from polytempo.horovod.runtime.settings import HorovodSettings

PAGE = Path(__file__).parents[2] / "docs" / "horovod.md"
ROWS = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
NAMES = {name: status for names, status in ROWS for name in re.findall(r"`(\w+)`", names) if not name.isupper()}


def test_the_table_lists_every_name_that_there_is_and_no_other() -> None:
    settings = {name for name in NAMES if name.startswith("HOROVOD_")}
    there = {name for name, status in NAMES.items() if not status.startswith("not yet")} - settings
    assert there == set(hvd.__all__)
    absent = set(NAMES) - there - settings
    assert absent == {"start_timeline", "stop_timeline"}
    assert not [name for name in absent if hasattr(hvd, name)]


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -1, 1 << 70, 2.5, "x", b"\0", [1, [2]], (1, (2,)), {1, 2}, frozenset({3}), 1 + 2j),
        *({"a": {2: None}}, torch.Size([2, 3]), torch.float16, torch.device("cpu"), np.float32(2.5)),
    ],
)
def test_plain_values_come_back(value: object) -> None:
    found = decoded(encoded(value))
    assert found == value
    assert type(found) is type(value)


def test_tensors_and_arrays_come_back() -> None:
    for tensor in (torch.arange(6).view(2, 3), torch.empty(0, 2), torch.tensor(1.5).bfloat16(), torch.ones(3, 2).t()):
        found = decoded(encoded(tensor))
        assert torch.equal(found, tensor)
        assert found.dtype == tensor.dtype
    assert np.array_equal(decoded(encoded(np.arange(4.0).reshape(2, 2))), np.arange(4.0).reshape(2, 2))


def test_what_needs_pickle_is_refused_and_foreign_bytes_are_too() -> None:
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    for value in (object(), len, np.array([object()])):
        with pytest.raises(TypeError, match="no pickle"):
            encoded(value)
    with pytest.raises(ValueError, match="deep"):
        encoded(deep)
    for data in (b"\xc1", encoded("x")[:0], b"\x91\xa4exec", b"\x94\xa6Tensor\xa4load\x90\xc4\x00"):
        with pytest.raises(ValueError, match=r"no value|dtype"):
            decoded(data)


def test_settings_are_horovods_variables() -> None:
    found = HorovodSettings.from_environment(
        {"HOROVOD_CYCLE_TIME": "2.5", "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    )
    assert found == HorovodSettings(fusion_bytes=0, cycle_s=0.0025, warn_s=0.0)
    assert HorovodSettings.from_environment({}) == HorovodSettings()
    with pytest.raises(ValueError, match="HOROVOD_CACHE_CAPACITY='many'"):
        HorovodSettings.from_environment({"HOROVOD_CACHE_CAPACITY": "many"})


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_links_carry_messages_longer_than_a_socket_holds_and_tell_of_a_rank_that_is_gone(address: str) -> None:
    """Both ends send before either reads."""
    store, ends = HashStore(), {}

    def make(rank: int) -> None:
        ends[rank] = RankLink(rank, 2, store, address=address, timeout_s=20)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    large = bytes(range(256)) * 20_000
    for rank in range(2):
        ends[rank].send(1 - rank, large)
        ends[rank].send(1 - rank, b"")
    for rank in (1, 0):  # the other end sends what is left without being waited for, as if it were in a collective
        heard: list[bytes | None] = []
        while len(heard) < 2:
            heard += [message for _, message in ends[rank].wait(20.0)]
        assert heard == [large, b""]
    ends[0].interrupt()
    while ends[0].wait(0.0):
        pass
    ends[1].close()
    assert ends[0].wait(20.0) == [(1, None)]
    ends[0].send(1, b"dropped")
    ends[0].close()
