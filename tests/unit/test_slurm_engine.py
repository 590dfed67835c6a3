"""The slurm engine's requests, as words and as a script; Slurm's commands are stand-ins here."""

from __future__ import annotations

from pathlib import Path

import pytest

import polytempo as pt
from polytempo.core import PolytempoError
from polytempo.engines.engine import Launch, parse_engine
from polytempo.engines.on_slurm.allocation import Allocation, existing, granted
from polytempo.engines.on_slurm.slurm_engine import Slurm, slurm_script, submit
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

TWO = Allocation("7", ("n1", "n2"), ("10.0.0.1", "10.0.0.2"))
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --time=01:00:00
#SBATCH --gpus-per-node=4
#SBATCH --account=physics
#SBATCH --job-name=digits
#SBATCH --output=digits-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60

# 60 s before the time is over, Slurm sends SIGUSR1: the run gets SIGTERM, saves and leaves, and the job goes
# back into the queue. It does not where the run ended well, failed by itself, or was cancelled by scancel (SIGTERM).

run=(polytempo train digits --strategy 'local_sgd(period=8)' --engine slurm --out runs/digits)
[ -d runs/digits/checkpoint ] && run+=(--resume)

again= heard=
trap 'again=yes heard=yes; kill -TERM "$child"' USR1
trap 'heard=yes; kill -TERM "$child"' TERM

"${run[@]}" &
child=$!
while :; do
  wait "$child"
  code=$?
  [ "$heard" ] || break # else a signal has ended the wait, and perhaps not the run
  heard=
done

if [ "$again" ] && [ "$code" -ne 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def command(folder: Path, name: str, text: str) -> None:
    """A stand-in for a command of Slurm."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o700)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def test_the_script_says_what_the_job_needs_and_how_it_goes_on() -> None:
    setup = pt.engines.slurm(nodes=2, partition="gpu", time="01:00:00", gpus_per_node=4, options=["--account=physics"])
    run = ["polytempo", "train", "digits", "--strategy", "local_sgd(period=8)", "--engine", "slurm"]
    assert slurm_script(setup, [*run, "--out", "runs/digits"], "runs/digits", name="digits") == SCRIPT


def test_a_script_quotes_what_a_shell_would_read_otherwise() -> None:
    script = slurm_script(Slurm(), ["polytempo", "$(reboot)"], "a run's", grace_s=5)
    assert "run=(polytempo '$(reboot)')" in script
    assert """[ -d 'a run'"'"'s/checkpoint' ] && run+=(--resume)""" in script
    assert "#SBATCH --signal=B:USR1@5\n" in script


def test_a_run_that_is_kept_elsewhere_is_resumed_by_the_count_of_starts() -> None:
    script = slurm_script(Slurm(), ["polytempo"], "s3://bucket/run")
    assert '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && run+=(--resume)' in script


def test_what_cannot_be_a_new_job_is_refused() -> None:
    with pytest.raises(ValueError, match="job='7' exists already"):
        slurm_script(Slurm(job="7"), ["polytempo"], "run")
    with pytest.raises(ValueError, match="grace_s=0 must be at least 1 second"):
        slurm_script(Slurm(), ["polytempo"], "run", grace_s=0)


def test_the_step_starts_one_agent_on_each_node() -> None:
    words = Slurm(python="python3").step(TWO)
    assert words[:10] == [
        "srun",
        "--jobid=7",
        "--nodes=2",
        "--ntasks=2",
        "--nodelist=n1,n2",
        "--ntasks-per-node=1",
        "--overlap",
        "--cpu-bind=none",
        "--input=all",
        "--kill-on-bad-exit=0",
    ]
    assert words[-4:] == ["python3", "-P", "-m", "polytempo.agent"]


def test_a_heterogeneous_job_has_agents_in_all_of_its_components() -> None:
    words = Slurm().step(TWO._replace(num_components=2))
    assert words[1:4] == ["--jobid=7", "--het-group=0-1", "--ntasks-per-node=1"]


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        ("slurm", Slurm()),
        ("slurm:nodes=2", Slurm(nodes=2)),
        (
            "slurm:nodes=2, partition=gpu,time=1-12,gpus_per_node=8",
            Slurm(nodes=2, partition="gpu", time="1-12", gpus_per_node=8),
        ),
        ("slurm:job=4711", Slurm(job="4711")),
    ],
)
def test_the_command_line_names_options(text: str, setup: Slurm) -> None:
    assert parse_engine(text) == setup


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("slurm:4", "'4' is not one of NAME=VALUE with nodes, gpus_per_node, partition, time, job"),
        ("slurm:nodes=", "'nodes=' is not one of"),
        ("slurm:nodes=two", "nodes must be a whole number, got 'two'"),
        ("slurm:nodes=0", "nodes=0 must be at least 1"),
        ("slurm:time=1h", "time='1h' must be as Slurm writes it: 30 "),
    ],
)
def test_options_that_cannot_be_are_refused(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        parse_engine(text)


def test_an_allocation_is_known_by_the_names_and_addresses_of_its_nodes(commands: Path) -> None:
    command(
        commands,
        "scontrol",
        'case "$*" in\n'
        '*"show job"*) echo "JobId=7 JobState=RUNNING NodeList=n[1-2] NumNodes=2";;\n'
        '*hostnames*) printf "n1\\nn2\\n";;\n'
        '*) echo "NodeName=n1 NodeAddr=10.0.0.1 X=1"; echo "NodeName=n2 NodeAddr=10.0.0.2 X=1";;\nesac',
    )
    assert existing("7") == TWO


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('echo "JobId=7 JobState=PENDING NodeList=(null)"', "job 7 of Slurm is PENDING; it must be running"),
        ("echo 'Invalid job id specified' >&2; exit 1", "failed: Invalid job id specified"),
    ],
)
def test_a_job_that_does_not_run_cannot_be_joined(commands: Path, text: str, named: str) -> None:
    command(commands, "scontrol", text)
    with pytest.raises(ValueError, match=named):
        existing("7")


def test_fewer_nodes_of_an_allocation_can_be_used_and_not_more() -> None:
    assert Slurm(nodes=1)._chosen(TWO) == Allocation("7", ("n1",), ("10.0.0.1",))
    with pytest.raises(ValueError, match=r"nodes=3, and job 7 has 2 \(n1, n2\); leave nodes out"):
        Slurm(nodes=3)._chosen(TWO)


def test_an_allocation_that_does_not_come_is_waited_for_only_so_long(commands: Path) -> None:
    command(commands, "salloc", 'echo "job 5 is queued" >&2\nexec sleep 60')
    with pytest.raises(PolytempoError, match=r"within 0.5 s \(job 5 is queued\); wait longer"), granted([], 0.5):
        pass


def test_what_slurm_refuses_is_quoted(commands: Path) -> None:
    command(commands, "salloc", 'echo "error: invalid partition specified: $1" >&2\nexit 1')
    with pytest.raises(PolytempoError, match="no allocation: error: invalid partition specified: --partition=x"):
        granted(["--partition=x"], 60).__enter__()


def test_without_slurm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    spec = RunSpec.of(pt.jobs.find("digits"), pt.strategies.sync_sgd(), 1, RunOptions(steps=1))
    launch = Launch(lambda role: None, spec, dict, 1, 1)
    with pytest.raises(ValueError, match=r"cannot run salloc .* Slurm's commands \(Debian: slurm-client\)"):
        pt.engines.slurm().open(launch).__enter__()


def test_a_script_is_handed_to_sbatch(commands: Path) -> None:
    command(commands, "sbatch", f'[ "$1" = --parsable ] && cat > {commands}/given && echo "12;cluster"')
    assert submit(SCRIPT) == "12"
    assert (commands / "given").read_text() == SCRIPT
