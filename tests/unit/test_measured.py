"""Measurements of real hosts, their file, and the cluster that a simulation uses for them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polytempo as pt
from polytempo.cli.main import app
from polytempo.cluster import Cluster, Link, ethernet
from polytempo.cluster.cluster import Crash
from polytempo.cluster.cluster_file import from_toml
from polytempo.cluster.measured import Measured, MeasuredHost, MeasuredLink, cluster_of, to_toml
from polytempo.cluster.slow_spells import measured_steps
from polytempo.jobs import find
from polytempo.runs.calibration.probe import measured_of, pairs_of
from polytempo.spec.text.catalogue import parse_cluster

MEASURED = Measured(
    "ssh:n1,n2",
    (MeasuredHost("n1", 2, 20e9), MeasuredHost('n"2', 1, 10e9)),
    (MeasuredLink("n1", 'n"2', 1e-3, 1e8), MeasuredLink('n"2', "n1", 3e-3, 3e8)),
    (MeasuredLink("n1", "n1", 2e-6, 4e9),),
)


def figures(cluster: Cluster) -> tuple[Any, ...]:
    """All that a file says of a cluster."""
    shape = cluster.workers_per_host, cluster.cores, cluster.hosts_per_machine
    return cluster.name, cluster.network, cluster.memory, *shape, cluster.flops_per_s


def test_a_cluster_has_the_medians() -> None:
    expected = ("measured(ssh:n1,n2, 2 hosts)", Link(2e-3, 2e8), Link(2e-6, 4e9), 2, None, 1, 15e9)
    assert figures(cluster_of(MEASURED)) == expected


def test_what_could_not_be_measured_is_the_default() -> None:
    alone = cluster_of(MEASURED._replace(between=()))
    assert alone.network == alone.memory == Link(2e-6, 4e9)
    assert cluster_of(MEASURED._replace(within=())).memory == ethernet().memory


def test_a_file_makes_an_equal_cluster() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        links = [Link(10 ** draw.uniform(-9, 1), 10 ** draw.uniform(1, 12)) for _ in range(2)]
        cluster = Cluster(
            *links,
            workers_per_host=draw.randint(1, 99),
            cores=draw.choice([None, draw.randint(1, 99)]),
            hosts_per_machine=draw.choice([1, draw.randint(2, 9)]),
            flops_per_s=10 ** draw.uniform(3, 15),
            name=f'"\\é{seed}\n',
        )
        for listed in (None, MEASURED):
            assert figures(from_toml(to_toml(cluster, listed))) == figures(cluster), seed


def test_what_a_file_does_not_say_is_refused() -> None:
    with pytest.raises(ValueError, match="has servers or faults"):
        to_toml(Cluster(Link(0, 1), faults=(Crash(rank=0, at_s=1.0),)))


GOOD = to_toml(cluster_of(MEASURED))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a = ", "is not TOML"),
        ("a = 1", 'must begin with format = "polytempo-cluster" and version = 4'),
        (GOOD.replace("version = 4", "version = true"), "must begin with"),
        (GOOD.replace("version = 4", "version = 5"), "the text has version 5, and this release reads versions up to 4"),
        (GOOD.partition("[end]")[0], r"the text was cut off: it does not end with \[end\]; copy it again"),
        (GOOD.replace("[memory]", "[memories]"), r"the table \[memory\] is missing"),
        (GOOD.replace("workers = 2", "workers = 0"), "host.workers = 0 must be a whole number >= 1"),
        (GOOD.replace("workers = 2", "workers = true"), "host.workers = True must be"),
        (GOOD.replace("workers = 2", "workers = 2\ncores = 0"), "host.cores = 0 must be a whole number >= 1"),
        (
            GOOD.replace("latency_s = 0.002", "latency_s = -1"),
            "^the text: network.latency_s = -1 must be a number >= 0",
        ),
        (GOOD.replace("latency_s = 0.002", "latency_s = nan"), "network.latency_s = nan must be"),
        (GOOD.replace("200000000.0", "inf"), "network.bytes_per_s = inf must be a finite number"),
        (GOOD.replace("200000000.0", "9" * 400), "network.bytes_per_s = 9+ must be a finite number"),
        (
            GOOD + "[[collectives]]\nname = 'x'\nbytes_per_s = 1\nsizes = [0]\nlatencies_s = [nan]\n",
            r"collectives 'x': a collective's link needs latencies_s >= 0",
        ),
        (
            GOOD + f"[[collectives]]\nname = 'x'\nbytes_per_s = 1\nsizes = [{'9' * 400}]\nlatencies_s = [0]\n",
            r"collectives 'x'.sizes\[0\] = 9+ must be a finite number",
        ),
        (GOOD.replace("200000000.0", "'fast'"), "network.bytes_per_s = 'fast' must be"),
        (GOOD.replace("flops_per_s", "flop_per_s"), "host.flops_per_s is missing"),
    ],
)
def test_a_broken_file_is_one_error(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        from_toml(text)


def test_a_file_that_was_cut_off_anywhere_is_refused() -> None:
    whole = to_toml(cluster_of(MEASURED), MEASURED, {"steps": 0.1})
    lines = whole.splitlines(keepends=True)
    for number in range(len(lines)):
        with pytest.raises(ValueError, match=r"cut off|not TOML|must begin with"):
            from_toml("".join(lines[:number]))
    assert from_toml(whole).name == "measured(ssh:n1,n2, 2 hosts)"


def test_a_simulation_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(GOOD)
    cluster = parse_cluster(str(path), "lognormal(sigma=0.3)")
    assert cluster.name == "measured(ssh:n1,n2, 2 hosts), stragglers lognormal(sigma=0.3)"
    slow, fast = (
        pt.simulate(find("digits"), pt.strategies.sync_sgd(), 4, each, steps=2, meta=True).seconds
        for each in (parse_cluster(str(path)), ethernet())
    )
    assert slow > fast
    with pytest.raises(ValueError, match="there is no such file; `polytempo doctor --engine"):
        parse_cluster(str(tmp_path / "other.toml"))


def test_a_simulation_takes_the_stragglers_of_a_busy_machine(tmp_path: Path) -> None:
    path, busy = tmp_path / "measured.toml", measured_steps((1.0, 2.0, 9.0), 0.5)
    path.write_text(to_toml(replace(ethernet(), stragglers=measured_steps((1.0, 1.1)), busy_stragglers=busy)))
    cluster = parse_cluster(str(path), "busy")
    assert (cluster.stragglers, cluster.name) == (busy, "ethernet(gbit_per_s=10), busy")
    for text in ("ethernet", str(path)):
        path.write_text(GOOD)
        with pytest.raises(ValueError, match=r"--stragglers busy: .* says nothing of hosts .* `polytempo calibrate`"):
            parse_cluster(text, "busy")


def test_which_ranks_talk() -> None:
    table = {
        (0,): [],
        (0, 0): [(0, 1)],
        (0, 1): [(0, 1), (1, 0)],
        (0, 0, 1, 1, 2): [(0, 2), (0, 4), (2, 0), (2, 4), (4, 0), (4, 2), (0, 1), (2, 3)],
    }
    assert {hosts: pairs_of(hosts) for hosts in table} == table


def test_answers_of_processes_add_up() -> None:
    told = [
        {"name": "n", "host": 0, "flops_per_s": 1e9, "links": [(0, 2, 1e-3, 1e8), (0, 1, 1e-6, 1e9)]},
        {"name": "n", "host": 0, "flops_per_s": 3e9, "links": []},
        {"name": "n", "host": 1, "flops_per_s": 4e9, "links": [[2, 0, 2e-3, 2e8]]},
    ]
    assert measured_of("ssh:a,b", told) == Measured(
        "ssh:a,b",
        (MeasuredHost("n-0", 2, 2e9), MeasuredHost("n-1", 1, 4e9)),
        (MeasuredLink("n-0", "n-1", 1e-3, 1e8), MeasuredLink("n-1", "n-0", 2e-3, 2e8)),
        (MeasuredLink("n-0", "n-0", 1e-6, 1e9),),
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workers", "2"), "--workers and --out go with --engine"),
        (("--engine", "nothing"), "engine 'nothing' is not known"),
        (("--engine", "local", "--out", "x.txt"), "the name must end in .toml"),
        (("--engine", "local", "--out", "no/x.toml"), "there is no folder no"),
        (("--engine", "local", "--out", "taken.toml"), "this is another file"),
    ],
)
def test_wrong_arguments_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.toml").write_text("x = 1")
    done = CliRunner().invoke(app, ["doctor", *words])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
