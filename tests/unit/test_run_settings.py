"""The settings in a run's start: options as the command line reads them, and nothing that is secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.runs.served.recording import facts_now
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.strategies import async_sgd, sync_sgd
from polytempo.training.job.run_settings import MOST_SETTING, environment_of, settings_of

DIGITS = pt.jobs.find("digits")
OWN = {"epochs": f"{DIGITS.epochs:g}", "lr": f"{DIGITS.lr:g}", "batch_size": str(DIGITS.batch_size), "seed": "0"}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, OWN),
        ({"epochs": 2.0, "seed": 3, "lr": 0.1}, OWN | {"epochs": "2", "seed": "3", "lr": "0.1"}),
        ({"steps": 4}, {name: OWN[name] for name in ("lr", "batch_size", "seed")} | {"steps": "4"}),
        ({"precision": "fp16(loss_scale=dynamic)"}, OWN | {"precision": "fp16(loss_scale=dynamic)"}),
        ({"until": {"accuracy": 0.97}, "epochs": 3}, OWN | {"until": "accuracy=0.97", "epochs": "3"}),
        ({"batch_growth": {5: 4, 10: 2.5}}, OWN | {"batch_growth": "5:4,10:2.5"}),
        ({"allow_nan": True, "accumulate": 2}, OWN | {"allow_nan": "true", "accumulate": "2"}),
        ({"callbacks": "time_budget(60), keep(best=2)"}, None),
        ({"tags": ["paper", "v2"]}, OWN | {"tags": "paper,v2"}),
        ({"data": "a b/data.csv", "threads": 1}, OWN | {"data": "a b/data.csv", "threads": "1"}),
        ({"start_from": "https://me:key@host/run?signed=1"}, OWN | {"start_from": "https://host/run"}),
        ({"data": "HTTPS://me:k@y@host/t.csv?signed=1"}, OWN | {"data": "HTTPS://host/t.csv"}),
        ({"data": "s3://bucket/part-?.parquet"}, OWN | {"data": "s3://bucket/part-?.parquet"}),
        ({"data": "abfs://container@account/t.csv"}, OWN | {"data": "abfs://container@account/t.csv"}),
        ({"trackers": "mlflow:http://me:key@host", "out": "x", "resume": True}, OWN),
        ({"data": "x" * 2 * MOST_SETTING}, OWN | {"data": "x" * (MOST_SETTING - 1) + "…"}),
    ],
)
def test_settings_are_what_the_command_line_reads(
    options: dict[str, Any], settings: dict[str, str] | None, tmp_path: Path
) -> None:
    given = RunOptions(**({"out": tmp_path} | options))
    found = settings_of(RunSpec.of(DIGITS, sync_sgd(), 2, given))
    if settings is not None:
        assert found == settings
    if "…" not in str(found) and "start_from" not in found:
        again = RunOptions(**{name: _value(name, text) for name, text in found.items()}, out=tmp_path)
        assert settings_of(RunSpec.of(DIGITS, sync_sgd(), 2, again)) == found


def test_a_record_for_replay_has_no_login_and_no_signature() -> None:
    for given, kept in (
        ("https://me:key@host/t.csv?signed=1", "https://host/t.csv"),
        ("s3://bucket/part-?.parquet", "s3://bucket/part-?.parquet"),
        (Path("/data/a?b"), "/data/a?b"),
    ):
        spec = RunSpec.of(DIGITS, async_sgd(), 2, RunOptions(data=given))
        assert facts_now(spec, native=False, threads=1).options["data"] == kept


def test_a_changed_job_has_its_own_numbers() -> None:
    from dataclasses import replace

    changed = replace(DIGITS, lr=0.5, batch_size=7)
    found = settings_of(RunSpec.of(changed, sync_sgd(), 2, RunOptions()))
    assert (found["lr"], found["batch_size"]) == ("0.5", "7")


def test_the_environment() -> None:
    found = environment_of(RunOptions(device="cpu"), sync_sgd())
    assert found.keys() == {"polytempo", "torch", "python", "platform", "device"}
    assert found["device"] == "cpu"


def _value(name: str, text: str) -> Any:
    number = {"epochs": float, "lr": float, "steps": int, "seed": int, "batch_size": int, "accumulate": int}
    number |= {"threads": int, "allow_nan": lambda text: text == "true"}
    return number.get(name, str)(text)
