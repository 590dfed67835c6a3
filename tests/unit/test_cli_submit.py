"""`polytempo submit`: a train command becomes a batch script."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from polytempo.cli.main import app
from polytempo.cli.options.failure import exit_code

TRAIN = ["train", "digits", "--workers", "4", "--engine", "slurm:nodes=2,time=30", "--out", "runs/digits"]


def test_a_dry_run_shows_the_script_and_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["submit", "--sbatch", "--account=physics --qos=low", "--dry-run", *TRAIN])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[:11] == [
        "#!/bin/bash",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --time=30",
        "#SBATCH --account=physics",
        "#SBATCH --qos=low",
        "#SBATCH --job-name=digits",
        "#SBATCH --output=digits-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@60",
    ]
    run = next(line for line in done.stdout.splitlines() if line.startswith("run=("))
    assert run.endswith(f" -m polytempo {' '.join(TRAIN)})")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "digits"], "submit takes a train command, got 'compare'"),
        (["train", "digits", "--out", "run"], "--engine local: a job for Slurm needs that engine"),
        (["train", "digits", "--engine", "slurm:nodes=2"], "name the run's folder with --out"),
        (["train", "digits", "--workers", "0"], "--workers 0: must be"),
        (
            ["train", "digits", "--engine", "slurm:time=never", "--out", "run"],
            "time='never' must be as Slurm writes it",
        ),
        (["train", "digits", "--nodes", "2"], "No such option: --nodes"),
    ],
)
def test_what_would_fail_in_the_queue_fails_at_once(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["submit", *words])
    assert done.exit_code == 2
    assert said in done.output


def test_in_a_batch_script_sigterm_ends_a_command_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sets SLURM_PROCID there, too, but the process is one of one."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(typer.Exit) as ended:
            _terminated()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.exit_code == 143


def _terminated() -> None:
    with exit_code():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # or these tests would end
        os.kill(os.getpid(), signal.SIGTERM)
