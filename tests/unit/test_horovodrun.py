"""`horovodrun` without processes: its options and their variables, hosts and slots, and hosts that fail."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from polytempo.cli.horovod.horovodrun_arguments import parsed, variables
from polytempo.horovod.launcher.elastic_ranks import HostSlots
from polytempo.horovod.launcher.hosts import discovered, parsed_hosts, places, read_hostfile
from polytempo.horovod.launcher.settings import ElasticSettings, LaunchSettings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--fusion-threshold-mb 32", {"HOROVOD_FUSION_THRESHOLD": str(32 << 20)}),
        ("--cycle-time-ms 3.5", {"HOROVOD_CYCLE_TIME": "3.5"}),
        ("--cache-capacity 7", {"HOROVOD_CACHE_CAPACITY": "7"}),
        ("--disable-cache", {"HOROVOD_CACHE_CAPACITY": "0"}),
        ("--timeline-filename t.json", {"HOROVOD_TIMELINE": "t.json"}),
        ("--timeline-mark-cycles", {"HOROVOD_TIMELINE_MARK_CYCLES": "1"}),
        ("--autotune --autotune-log-file a.csv", {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a.csv"}),
        ("--no-autotune", {"HOROVOD_AUTOTUNE": "0"}),
        ("--no-stall-check", {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
        (
            "--hierarchical-allreduce --log-level DEBUG",
            {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_LOG_LEVEL": "DEBUG"},
        ),
        ("--stall-check-shutdown-time-seconds 9 --gloo", {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}),
    ],
)
def test_options_become_variables(words: str, expected: dict[str, str]) -> None:
    given = parsed(["-np", "2", *words.split(), "python", "train.py", "-np", "9", "--autotune"])
    assert variables(given) == expected
    assert given.num_proc == 2
    assert given.command == ["python", "train.py", "-np", "9", "--autotune"], "options after the command are its own"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("python train.py", "-np 4, or --min-np 2"),
        ("-np 0 python", "-np 0 must be at least 1"),
        ("-np 2", "no command is given"),
        ("-np 2 --mpi python", "no MPI takes part"),
        ("-np 2 -H a:1 --hostfile f python", "hosts are given twice"),
    ],
)
def test_what_cannot_be_is_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(words.split())


def test_an_elastic_run_says_its_bounds() -> None:
    given = parsed(
        [
            "-np",
            "3",
            "--min-np",
            "2",
            "--max-np",
            "4",
            "--slots",
            "2",
            "--blacklist-cooldown-range",
            "1",
            "8",
            "python",
            "x",
        ]
    )
    settings = ElasticSettings.of(
        given.num_proc, given.min_num_proc, given.max_num_proc, cooldown_s=given.blacklist_cooldown_range
    )
    assert settings == (3, 2, 4, 600.0, None, (1.0, 8.0))
    for wrong in ((3, 4, None), (3, 2, 2), (5000, None, None)):
        with pytest.raises(ValueError, match="1 <= min-np <= np <= max-np"):
            ElasticSettings.of(*wrong)
    with pytest.raises(ValueError, match="two numbers of seconds"):
        ElasticSettings.of(2, 1, 2, cooldown_s=[4, 1])
    with pytest.raises(ValueError, match="reset-limit 0"):
        ElasticSettings.of(2, 1, 2, reset_limit=0)


def test_hosts_are_read_from_a_text_and_from_a_file(tmp_path: Path) -> None:
    assert parsed_hosts("a:2,b,user@c:3") == {"a": 2, "b": 1, "user@c": 3}
    path = tmp_path / "hosts"
    path.write_text("# all of them\na slots=2\nb   # one\n\nc:3\n")
    assert read_hostfile(path) == {"a": 2, "b": 1, "c": 3}
    for wrong in ("a:0", "a:x", "-o:1", "", "a:1,a:2", "no hosts", "a;b:2", "\0"):
        with pytest.raises(ValueError, match=r"not a host with its slots|named twice"):
            parsed_hosts(wrong)
    path.write_text("a slots=two\n")
    with pytest.raises(ValueError, match="not a host with its slots"):
        read_hostfile(path)
    with pytest.raises(ValueError, match="no such file"):
        read_hostfile(tmp_path / "none")


def test_ranks_fill_the_slots_of_one_host_after_the_other() -> None:
    found = places({"a": 1, "b": 3, "c": 2}, 5)
    assert [(p.host, p.rank, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in found] == [
        ("a", 0, 0, 1, 0, 3),
        ("b", 1, 0, 3, 1, 3),
        ("b", 2, 1, 3, 0, 1),
        ("b", 3, 2, 3, 0, 1),
        ("c", 4, 0, 1, 2, 3),
    ]
    told = found[3].environment()
    assert {name: told[name] for name in ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE", "POLYTEMPO_HOST")} == {
        "HOROVOD_RANK": "3",
        "HOROVOD_LOCAL_RANK": "2",
        "HOROVOD_SIZE": "5",
        "POLYTEMPO_HOST": "1",
    }
    with pytest.raises(ValueError, match="-np 7 needs so many slots, and there are 6"):
        places({"a": 1, "b": 3, "c": 2}, 7)


def test_ranks_get_the_launchers_variables_but_for_those_of_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MINE": "1", "POLYTEMPO_RANK": "0", "SSH_CLIENT": "x", "TMPDIR": "/x"}.items():
        monkeypatch.setenv(name, value)
    told = LaunchSettings(exported={"HOROVOD_CYCLE_TIME": "2"}).environment()
    assert (told["MINE"], told["HOROVOD_CYCLE_TIME"], told["PYTHONUNBUFFERED"]) == ("1", "2", "1")
    assert not told.keys() & {"POLYTEMPO_RANK", "SSH_CLIENT", "TMPDIR"}
    with pytest.raises(ValueError, match="start-timeout 0 must be"):
        LaunchSettings(start_timeout_s=0)
    assert LaunchSettings(ssh_port=23, ssh_identity_file="k").ssh_command()[-5:] == ("-p", "23", "-i", "k", "{host}")


def test_discovery_reads_lines() -> None:
    assert discovered("a:2\n b \n\n", 4) == {"a": 2, "b": 4}
    assert discovered("", 4) == {}
    for nonsense in ("a:b", "connection refused", "\ufffd\0"):
        with pytest.raises(ValueError, match=r"it printed '.*is not a host with its slots"):
            discovered(nonsense, 1)


def test_a_host_that_failed_gets_no_process_until_it_has_cooled_down() -> None:
    slots = HostSlots((2.0, 5.0))
    slots.found({"a": 2, "b": 1})
    assert slots.room(0.0, Counter()) == "a"
    assert slots.room(0.0, Counter(a=2)) == "b"
    assert slots.room(0.0, Counter(a=2, b=1)) is None
    slots.failed(10.0, "a")
    slots.failed(10.1, "a")  # with it
    assert (slots.capacity(11.0, Counter(a=1)), slots.room(11.0, Counter(a=1, b=1))) == (2, None)
    assert (slots.capacity(12.0, Counter(a=1)), slots.room(12.0, Counter(a=1, b=1))) == (3, "a")
    for at_s, until_s in ((20.0, 24.0), (30.0, 35.0), (40.0, 45.0)):
        slots.failed(at_s, "a")
        assert slots.is_blacklisted(until_s - 0.01, "a")
        assert not slots.is_blacklisted(until_s, "a")
    assert not slots.is_hopeless


def test_without_a_cool_down_it_is_out_for_ever_and_hosts_that_go_have_no_slots() -> None:
    slots = HostSlots()
    slots.found({"a": 2, "b": 1})
    slots.failed(0.0, "a")
    assert slots.room(1e9, Counter()) == "b"
    assert not slots.is_hopeless
    slots.found({"c": 1, "a": 2})
    assert slots.surplus(Counter(a=1, b=1)) == {"b": 1}
    slots.failed(0.0, "c")
    assert slots.is_hopeless
    slots.found({"b": 1, "a": 2})
    assert slots.room(0.0, Counter()) == "b"
