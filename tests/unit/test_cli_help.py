"""The command line without its backend: quick help, and clear refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from polytempo.cli.main import app
from polytempo.cli.options.failure import exit_code
from polytempo.core import PolytempoError
from polytempo.engines.processes.failures import WorkerDied

SLOW_TO_IMPORT = ("torch", "numpy", "matplotlib", "pydantic", "yaml", "rich")


def polytempo(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "polytempo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


def test_help_imports_nothing_slow() -> None:
    """The time of `polytempo --help` is the time of its imports."""
    program = (
        "import sys, polytempo.cli.main\n"
        "try:\n"
        "    polytempo.cli.main.app(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        f"print([name for name in {SLOW_TO_IMPORT!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "polytempo train digits" in done.stdout


def test_help_names_every_command() -> None:
    """And each command's help its options."""
    main = polytempo("--help")
    assert main.returncode == 0
    for command in (
        "train",
        "compare",
        "simulate",
        "doctor",
        "strategies",
        "explain",
        "look",
        "cut",
        "plan",
        "schedule",
        "tune",
    ):
        assert f"\n  {command} " in main.stdout
    train = polytempo("train", "--help").stdout
    for option in ("strategy", "workers", "data", "epochs", "until", "steps", "batch-size", "lr", "seed", "threads"):
        assert f"  --{option} " in train
    for option in ("out", "resume", "json", "dry-run", "config"):
        assert f"  --{option} " in train


def test_a_wrong_value_ends_with_one_message(tmp_path: Path) -> None:
    """Exit code 2, no traceback, nothing on standard output, nothing left behind."""
    done = polytempo("train", "digits", "--workers", "0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --workers 0: must be a whole number >= 1\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "No such command 'trian'"),
        ("train digits --workers two", "'--workers'"),
        ("train digits --worker 2", "No such option: --worker"),
        ("train digits --until accuracy=97", "error: --until accuracy=97: accuracy is a number between 0 and 1"),
        ("train digits --config missing.toml", "error: missing.toml: there is no such file\n"),
        ("train digits --data missing", "error: --data missing: there is no such file or folder\n"),
        ("train digits --strategy locl_sgd", "no strategy 'locl_sgd' (did you mean local_sgd?); there are: "),
        ("train digits --strategy f(x=)", "\n    f(x=)\n        ^\n"),
        ("train digits --strategy local_sgd(perod=2)", "has no argument 'perod' (did you mean period?)"),
        ("train digits --strategy local_sgd(period=0)", "error: period must be at least 1"),
        ("train digits --strategy sync_sgd(route=rign)", "no route 'rign' (did you mean ring?)"),
        ("train digits --resume", "error: --resume: runs/digits-sync_sgd holds no run"),
        ("train dogits", "there is no job 'dogits'"),
        ("train", "error: name a job: "),
        ("train digits --strategy=", "error: --strategy '': the value is empty; write a name, or leave the option out"),
        ("compare digits --strategies=", "error: --strategies '': the value is empty"),
        ("simulate digits --cluster=", "error: --cluster '': the value is empty"),
        ("simulate digits --stragglers=", "error: --stragglers '': the value is empty"),
        ("compare digits --strategies sync_sgd,,adasum", "this is not a call: invalid syntax\n    sync_sgd,,adasum"),
        ("simulate digits --cluster etherne", "no cluster 'etherne' (did you mean ethernet?)"),
        ("simulate digits --stragglers lognorm", "no straggler distribution 'lognorm'"),
    ],
)
def test_wrong_values(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    """Each error names the mistake and a remedy."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        app(arguments.split())
    said = capsys.readouterr()
    assert end.value.code == 2
    assert message in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


ANSWERING = """
import json, os, sys, polytempo.cli.main
for line in sys.stdin:  # each command is a process of its own
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
folder, arguments = json.loads(line)
os.chdir(os.path.join(folder, "here"))
for descriptor, name in ((1, "out"), (2, "error")):
    os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
try:
    polytempo.cli.main.app(arguments)
except SystemExit as end:
    assert end.code == 2
print([name for name in ("torch", "numpy") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def answering() -> Iterator[subprocess.Popen[str]]:
    """An interpreter that has loaded the command line, and forks for each folder and command that it reads."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", ANSWERING], text=True, start_new_session=True, **pipes) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "arguments",
    [
        "train digits --strategy local_sg(period=8)",
        "train digits --strategy local_sgd(perod=8)",
        "train digits --batch-size -1",
        "train digits --until accuracy=97",
        "train digits --on-drift wait",
        "train digits --config missing.toml",
        "train digits --resume",
        "train digits --out taken",
        "train dogits",
        "train missing.py:job",
        "train missing_module:job",
        "train",
        "compare digits --strategies sync_sgd,local_sg",
        "simulate digits --cluster ethernett",
        "simulate digits --stragglers lognorm",
        "replay missing",
        "replay taken --until 3",
        "replay taken --job dogits",
        "chaos --seeds 0",
        "chaos --processes 1000000 --seeds 1000000",
        "bench collectives --ranks two",
        "bench training --turn-s 0",
        "bench memory --parameters many",
        "bench compression --codecs bf17",
        "explain local_sg",
        "explain local_sgd --job dogits",
        "cut dogits",
        "cut digits --stages 0",
        "cut digits --by trafic",
        "schedule laso",
        "schedule lasso --data scenes",
        "schedule lda --sweeps 0",
        "plan layers dogits",
        "plan layers digits --link fast",
        "plan layers digits --reduction rings",
        "plan layers digits --batch-size 2 --global-batch-size 8",
        "plan split digits --parts 1",
        "tune batch dogits",
        "tune batch digits --extra 0",
    ],
)
def test_a_rejected_argument_is_answered_without_torch(
    tmp_path: Path, arguments: str, answering: subprocess.Popen[str]
) -> None:
    """Torch takes seconds to load, so the answer comes before."""
    (tmp_path / "here/taken").mkdir(parents=True)
    (tmp_path / "here/taken/result.json").touch()
    assert answering.stdin is not None
    assert answering.stdout is not None
    print(json.dumps([str(tmp_path), arguments.split()]), file=answering.stdin, flush=True)
    code = int(answering.stdout.readline())
    out, error = ((tmp_path / name).read_text() for name in ("out", "error"))
    assert (code, out) == (0, "[]\n"), error
    assert error.startswith("error: ")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("wrong"), 2, "error: wrong\n"),
        (PolytempoError("lost"), 1, "error: lost\n"),
        (RuntimeError(), 1, "error: RuntimeError\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str) -> None:
    """One message, and an exit code by the kind of mistake."""
    with pytest.raises(typer.Exit) as end, exit_code():
        raise error
    assert end.value.exit_code == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("how", "last_lines", "code", "message"),
    [
        ("raised ValueError", ["Traceback", "ValueError: no data", "    here"], 2, "error: no data\n    here\n"),
        ("raised ValueError", ["ValueError: first", "ValueError: then"], 2, "error: then\n"),
        (
            "raised KeyError",
            ["ValueError: no data", "KeyError: 1"],
            1,
            "error: rank 0 raised KeyError; the run has ended\n",
        ),
        ("was killed", ["ValueError: no data"], 1, "error: rank 0 was killed; the run has ended\n"),
    ],
)
def test_a_wrong_value_in_a_worker(
    capsys: pytest.CaptureFixture[str], how: str, last_lines: list[str], code: int, message: str
) -> None:
    """The error reads like one in the launcher, without the worker's traceback."""
    with pytest.raises(typer.Exit) as end, exit_code():
        raise WorkerDied(f"rank 0 {how}; the run has ended", 0, 1, None, last_lines)
    assert end.value.exit_code == code
    assert capsys.readouterr().err == message


def test_the_traceback_is_shown_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`POLYTEMPO_DEBUG=1` serves to find the cause."""
    monkeypatch.setenv("POLYTEMPO_DEBUG", "1")
    with pytest.raises(typer.Exit), exit_code():
        raise PolytempoError("lost")
    assert "Traceback" in capsys.readouterr().err
