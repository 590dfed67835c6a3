"""The command line with its workers: its output, its files, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm

pytestmark = pytest.mark.process

RESULT: dict[str, Any] = {
    "strategy": str,
    "world": str,
    "workers": int,
    "steps": int,
    "samples": int,
    "seconds": float,
    "samples_per_s": float,
    "loss": float,
    "accuracy": float,
    "bytes_sent_per_rank": float,
    "parameters_sha256": str,
    "trace_hash": str,
    "report": str,
    "checkpoint": str | None,
}


def polytempo(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; with variables of its own it starts from nothing."""
    if not environment:
        return warm.run(["-m", "polytempo", *arguments], cwd)
    return subprocess.run(
        [sys.executable, "-m", "polytempo", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
    )


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that a successful command printed, and nothing but."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_result(result: dict[str, Any]) -> None:
    for key, kind in RESULT.items():
        assert isinstance(result[key], kind), key
    assert len(result["parameters_sha256"]) == 64


def test_train_prints_one_json_object_and_leaves_a_run(tmp_path: Path) -> None:
    """The result on standard output is the one in the run's folder; files are where it says."""
    result = answer(polytempo("train", "digits", "--steps", "5", "--json", cwd=tmp_path))
    assert_result(result)
    assert (result["strategy"].split("(")[0], result["world"], result["workers"], result["steps"]) == (
        "sync_sgd",
        "process",
        2,
        5,
    )
    folder = tmp_path / "runs" / "digits-sync_sgd"
    assert json.loads((folder / "result.json").read_text()) == result
    assert {"metrics.jsonl", "trace.json", "report.html", "checkpoint"} <= {path.name for path in folder.iterdir()}
    assert (tmp_path / result["report"]).is_file()
    assert (tmp_path / result["checkpoint"]).exists()


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    """The default is a folder of its own; a named folder is refused; `--resume` goes on in it."""
    options = ("train", "digits", "--batch-size", "16", "--steps")
    answer(polytempo(*options, "3", "--json", cwd=tmp_path))
    whole = answer(polytempo(*options, "6", "--json", cwd=tmp_path))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"digits-sync_sgd", "digits-sync_sgd-2"}

    out = ("--out", "runs/digits-sync_sgd")
    refused = polytempo(*options, "6", *out, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "this folder holds a run; continue it with --resume, or name another folder" in refused.stderr

    resumed = answer(polytempo(*options, "6", *out, "--resume", "--json", cwd=tmp_path))
    assert resumed["steps"] == whole["steps"] == 6
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]


def test_train_for_people(tmp_path: Path) -> None:
    """Plain lines on standard output, progress on standard error."""
    done = polytempo("train", "digits", "--steps", "5", "--strategy", "local_sgd(period=2)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["strategy"].startswith("local_sgd(period=2")
    assert lines["steps"] == "5"
    assert done.stderr


def test_dry_run_prints_what_would_be_run(tmp_path: Path) -> None:
    """The output has the file's options, the command line's over them, and the job's own; nothing runs."""
    (tmp_path / "run.toml").write_text('job = "digits"\nworkers = 3\nlr = 0.05\nuntil = "accuracy=0.97"\n')
    plan = answer(polytempo("train", "--config", "run.toml", "--workers", "4", "--dry-run", "--json", cwd=tmp_path))
    assert (plan["job"], plan["world"], plan["workers"], plan["lr"]) == ("digits", "process", 4, 0.05)
    assert plan["until"] == {"accuracy": 0.97}
    assert plan["out"] == "runs/digits-sync_sgd"
    assert plan["batch_size"] > 0
    assert not (tmp_path / "runs").exists()


def test_compare_prints_a_list_and_leaves_one_report(tmp_path: Path) -> None:
    """A run folder for each strategy."""
    arguments = ("compare", "digits", "--strategies", "sync_sgd,local_sgd(period=2)", "--steps", "4", "--json")
    results = answer(polytempo(*arguments, "--out", "both", cwd=tmp_path))
    assert [result["strategy"].split("(")[0] for result in results] == ["sync_sgd", "local_sgd"]
    for result in results:
        assert_result(result)
    assert (tmp_path / "both" / "report.html").is_file()
    assert json.loads((tmp_path / "both" / "compare.json").read_text()) == results


def test_compare_deals_the_data_to_the_same_clients(tmp_path: Path) -> None:
    """Each strategy has the clients, the draws and the tests of `train`."""
    given = ["--clients", "shards(8)", "--sampling", "drop_outs(0.2)", "--client-test", "0.2", "--steps", "3", "--json"]
    strategies = ["fed_avg(cohort=3)", "fed_adam(cohort=3)"]
    results = answer(polytempo("compare", "digits", "--strategies", ",".join(strategies), *given, cwd=tmp_path))
    alone = answer(polytempo("simulate", "digits", "--workers", "2", "--strategy", strategies[1], *given, cwd=tmp_path))
    assert [result["strategy"].split("(")[0] for result in results] == ["fed_avg", "fed_adam"]
    assert results[1]["parameters_sha256"] == alone["parameters_sha256"] != results[0]["parameters_sha256"]
    assert results[1]["metrics"] == alone["metrics"]
    assert 0 < results[0]["metrics"]["clients/took_part"] <= 8
    refused = polytempo("compare", "digits", "--strategies", "fed_avg(cohort=3),sync_sgd", *given, cwd=tmp_path)
    assert refused.returncode == 2
    assert "PT25" in refused.stderr


def test_simulate_repeats_itself(tmp_path: Path) -> None:
    """The same seed, the same trace; another straggler distribution, another time."""
    arguments = ["simulate", "digits", "--workers", "8", "--steps", "3", "--json"]
    arguments += ["--cluster", "ethernet(gbit_per_s=1)"]
    first, second = (answer(polytempo(*arguments, cwd=tmp_path)) for _ in range(2))
    slow = answer(polytempo(*arguments, "--stragglers", "slow_host(factor=3)", cwd=tmp_path))
    assert_result(first)
    assert (first["world"], first["workers"]) == ("virtual", 8)
    assert first["trace_hash"] == second["trace_hash"]
    assert slow["seconds"] > first["seconds"]
    assert slow["parameters_sha256"] == first["parameters_sha256"]


def test_a_job_that_breaks_is_a_failed_run(tmp_path: Path) -> None:
    """Exit code 1 and the worker's own words, no traceback of the launcher; a job's output is not the result."""
    (tmp_path / "broken.py").write_text(
        "import dataclasses\n"
        "from polytempo.jobs.digits import job as digits\n"
        "print('a job may print')\n"
        "def loss(output, target):\n"
        "    raise RuntimeError('the loss is broken')\n"
        "job = dataclasses.replace(digits, loss=loss)\n"
    )
    done = polytempo("train", "broken.py:job", "--steps", "2", "--json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the loss is broken" in done.stderr
    assert "a job may print" in done.stderr


def test_a_loss_that_is_not_finite_ends_it_with_its_error_the_first_failure_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(
        "import torch, polytempo as pt\n"
        "x = torch.randn(16, 3)\n"
        "data = torch.utils.data.TensorDataset(x, x)\n"
        "job = pt.Job(model=lambda: torch.nn.Linear(3, 3), data=lambda folder: pt.Data(data), batch_size=4,\n"
        "             loss=lambda o, t: (o - t).mean() * float('nan'),\n"
        "             optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=0.1))\n"
    )
    train = ["train", "jobs.py:job", "--workers", "1", "--steps", "2"]
    ended = polytempo(*train, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    error, last = ended.stderr.strip().splitlines()[-2:]
    assert error.startswith("error: rank 0, step 0: the loss is nan")
    assert "--allow-nan" in error
    assert last.startswith("first failure: rank 0 of 1 on ")
    going_on = polytempo(*train, "--allow-nan", cwd=tmp_path)
    assert going_on.returncode == 0, going_on.stderr


def test_a_job_without_its_data_is_a_wrong_value(tmp_path: Path) -> None:
    """The workers look for the data."""
    done = polytempo("train", "mnist", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: job mnist needs --data FOLDER")
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_the_run(tmp_path: Path) -> None:
    """Exit code 130, a line, no traceback. Whether it had begun, and saves, is the machine's affair."""
    command = [sys.executable, "-u", "-m", "polytempo", "train", "digits", "--epochs", "100000"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline()  # the first line of progress: workers are at work
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in error.splitlines()[-1]
    assert "Traceback" not in error


def test_inside_a_world_it_is_one_worker(tmp_path: Path) -> None:
    """No process is launched under torchrun: the processes join, and the first one speaks for all."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "polytempo", "train", "digits", "--steps", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    result = answer(done)
    assert_result(result)
    assert (result["workers"], result["steps"]) == (2, 3)
    alone = answer(polytempo("train", "digits", "--steps", "3", "--json", cwd=tmp_path))
    assert alone["parameters_sha256"] == result["parameters_sha256"]


def test_doctor_lets_two_workers_talk(tmp_path: Path) -> None:
    """Doctor reports its findings, as JSON too."""
    health = answer(polytempo("doctor", "--json", cwd=tmp_path))
    assert health["healthy"] is True
    assert health["problems"] == []
    assert health["backends"]["gloo"] is True
    assert health["start_ms"] > 0
    assert health["all_reduce_ms"] > 0
    assert health["native"] in ("baseline", "v3", "v4")
    assert health["native_missing"] is None
    people = polytempo("doctor", cwd=tmp_path)
    assert people.returncode == 0
    assert "2 workers met in" in people.stdout


def test_doctor_says_why_there_is_no_native_core(tmp_path: Path) -> None:
    """Everything works without it."""
    done = polytempo("doctor", cwd=tmp_path, POLYTEMPO_NATIVE="0")
    assert done.returncode == 0
    assert "no: POLYTEMPO_NATIVE=0 in the environment" in done.stdout


def test_doctor_names_what_is_broken(tmp_path: Path) -> None:
    """An environment that contradicts itself is a problem, and exit code 1."""
    done = polytempo("doctor", "--json", cwd=tmp_path, RANK="0")
    assert done.returncode == 1
    health = json.loads(done.stdout)
    assert health["healthy"] is False
    assert "WORLD_SIZE is not set" in health["problems"][0]
