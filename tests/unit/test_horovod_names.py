"""The table of docs/horovod.md is complete; and Horovod's settings, encodings and links alone."""

from __future__ import annotations

import inspect
import os
import re
import socket
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

import polytempo.horovod.torch as hvd
from polytempo.horovod.negotiation.autotuner import AutotuneOptions
from polytempo.horovod.plain_values import decoded, encoded
from polytempo.horovod.runtime.link import RankLink
from polytempo.horovod.runtime.settings import LOG, HorovodSettings, begin_log
from polytempo.horovod.torch import mpi_ops

PAGE = Path(__file__).parents[2] / "docs" / "horovod.md"
ROWS = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
NAMES = {name for names, _ in ROWS for name in re.findall(r"`(\w+)`", names) if not name.isupper()}


def test_the_table_lists_every_name_that_there_is_and_no_other() -> None:
    settings = {name for name in NAMES if name.startswith("HOROVOD_")}
    assert set(NAMES) - settings == set(hvd.__all__)


def test_the_module_mpi_ops_has_the_same_functions() -> None:
    assert [name for name in hvd.__all__ if getattr(mpi_ops, name, None) is not getattr(hvd, name)] == []


def test_the_page_lists_the_variables_that_are_read_and_those_that_are_not() -> None:
    first, _, second = PAGE.read_text(encoding="utf-8").partition("## Settings")[2].partition("do nothing here")
    listed = [set(re.findall(r"HOROVOD_\w+", part)) for part in (first, second)]
    assert listed[0] == set(re.findall(r"\bHOROVOD_\w+\b", Path(inspect.getfile(HorovodSettings)).read_text("utf-8")))
    assert not listed[0] & listed[1]


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
        with pytest.raises(ValueError, match=r"not a value|no value|dtype"):
            decoded(data)


def test_settings_are_horovods_variables() -> None:
    found = HorovodSettings.from_environment(
        {"HOROVOD_CYCLE_TIME": "2.5", "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    )
    assert found == HorovodSettings(fusion_bytes=0, cycle_s=0.0025, warn_s=0.0)
    assert HorovodSettings.from_environment({}) == HorovodSettings()
    found = HorovodSettings.from_environment(
        {
            "HOROVOD_TIMELINE": "t.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_LOG_LEVEL": "DEBUG",
            "HOROVOD_LOG_HIDE_TIME": "1",
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_LOG": "log.csv",
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "0",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "7",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "9",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
            "HOROVOD_CYCLE_TIME": "1",
        }
    )
    assert found == HorovodSettings(
        timeline="t.json",
        mark_cycles=True,
        log_level="debug",
        log_time=False,
        fuse_groups=False,
        autotune=AutotuneOptions(0, 7, 9, 0.5, tunes_cycle=False),
        autotune_log="log.csv",
    )
    assert HorovodSettings.from_environment({"HOROVOD_TIMELINE": "DYNAMIC"}) == HorovodSettings()
    with pytest.raises(ValueError, match="HOROVOD_LOG_LEVEL='loud' must be one of trace, debug"):
        HorovodSettings.from_environment({"HOROVOD_LOG_LEVEL": "loud"})
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
    for rank in (1, 0):  # the other end sends the rest without being waited for, as in a collective
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


def test_strangers_that_greet_slowly_never_or_wrongly_delay_no_rank() -> None:
    """Each stranger connects before the rank, and none has been dismissed for its silence by then."""
    store, strangers, kept, ends = HashStore(), [], [], {}

    def join() -> None:
        ends[1] = RankLink(1, 2, store, address="", timeout_s=20)

    rank = threading.Thread(target=join)

    def look() -> None:
        if not strangers:
            host, port, _ = store.get("link").decode().split("|")
            strangers.extend(socket.create_connection((host, int(port))) for _ in range(3))
            strangers[1].sendall(b"a")
            strangers[2].sendall(bytes(36))
        elif rank.ident is None and not stranger_is_open(strangers[2]):
            kept.extend(map(stranger_is_open, strangers))
            rank.start()

    ends[0] = RankLink(0, 2, store, address="127.0.0.1", timeout_s=20, look=look)
    rank.join()
    assert kept == [True, True, False]
    assert [stranger_is_open(one) for one in strangers] == [False] * 3
    for one in (*ends.values(), *strangers):
        one.close()


def stranger_is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_a_flood_of_connections_closes_the_oldest_of_them() -> None:
    store, strangers = HashStore(), []

    def look() -> None:
        host, port, _ = store.get("link").decode().split("|")
        if len(strangers) < 100:
            strangers.append(socket.create_connection((host, int(port))))
        elif not stranger_is_open(strangers[30]):
            raise StopIteration

    with pytest.raises(StopIteration):
        RankLink(0, 2, store, address="127.0.0.1", timeout_s=20, look=look)
    for one in strangers:
        one.close()


def test_ranks_of_one_host_meet_where_no_other_user_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is private, and a process of another user that is inside nevertheless is a stranger."""
    store, strangers = HashStore(), []

    def look() -> None:
        where, token = store.get("link").decode().split("|")
        if not strangers:
            assert stat.S_IMODE(os.stat(os.path.dirname(where)).st_mode) == 0o700
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[0].connect(where)
            strangers[0].sendall(bytes.fromhex(token) + (1).to_bytes(4, "little"))
        elif not stranger_is_open(strangers[0]):
            raise StopIteration

    user = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: user + 1)
    with pytest.raises(StopIteration):
        RankLink(0, 2, store, address="", timeout_s=20, look=look)
    strangers[0].close()


def test_the_log_has_levels_ranks_and_times_unless_they_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    for settings, expected in (
        (HorovodSettings(log_level="info", log_time=False), "[INFO] [3] heard\n"),
        (HorovodSettings(log_level="warning"), ""),
    ):
        end = begin_log(settings, 3)
        LOG.info("heard")
        end()
        assert capsys.readouterr().err == expected
    end = begin_log(HorovodSettings(log_level="trace"), 0)
    LOG.log(5, "much")
    end()
    assert re.fullmatch(r"\[\d{4}-\S+ \S+: TRACE\] \[0\] much\n", capsys.readouterr().err)
    assert not LOG.handlers
    assert LOG.propagate
