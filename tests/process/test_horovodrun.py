"""`polytempo horovodrun` on real processes: the ranks' environment, output and ends."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import warm
from polytempo.cli.main import app
from polytempo.engines.processes.command_process import ANSWER_FILE
from polytempo.horovod import run
from polytempo.horovod.launcher.run_ranks import RanksFailed, run_ranks
from polytempo.horovod.launcher.settings import LaunchSettings
from waiting import soon

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("none_left_by_agents")]

MEETS = """
import os, sys
import torch
import polytempo.horovod.torch as hvd

hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
print("sum", total, "on", os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"], sys.stdin.read())
print("also this", file=sys.stderr)
with open(os.environ["POLYTEMPO_ANSWER_FILE"], "w") as file:
    file.write(str(10 * hvd.rank()))
"""
MEET = """
try:
    os.mkfifo("met")
except FileExistsError:
    pass
os.close(os.open("met", os.O_WRONLY if os.environ["HOROVOD_RANK"] == "1" else os.O_RDONLY))
"""
"""Two ranks wait for each other: to open a pipe waits for its other end."""

FAILS = (
    """
import os, signal, sys
from pathlib import Path

print("fusion", os.environ["HOROVOD_FUSION_THRESHOLD"], end="")
Path("pid-" + os.environ["HOROVOD_RANK"]).write_text(str(os.getpid()))
"""
    + MEET
    + """
if os.environ["HOROVOD_RANK"] == "0":
    sys.exit(3)
signal.pause()
"""
)
INTERRUPTS = (
    """
import os, signal
from pathlib import Path

Path("pid-" + os.environ["HOROVOD_RANK"]).write_text(str(os.getpid()))
"""
    + MEET
    + """
if os.environ["HOROVOD_RANK"] == "0":
    launcher = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(") ")[2].split()[1])
    os.kill(launcher, signal.SIGINT)
signal.pause()
"""
)

RANKED = """
import os
import polytempo.horovod.torch as hvd

def work(tensor, more=0.0):
    print("here")
    hvd.init()
    return hvd.rank(), os.environ.get("HOROVOD_CACHE_CAPACITY"), hvd.allreduce(tensor.float(), op=hvd.Sum) + more
"""


def horovodrun(folder: Path, source: str, *options: str) -> tuple[int, str, str]:
    """The command's exit code and output."""
    (folder / "script.py").write_text(source)
    done = warm.run(["-m", "polytempo", "horovodrun", *options, sys.executable, "script.py"], folder)
    return done.returncode, done.stdout, done.stderr


def ended(path: Path) -> bool:
    """True when the process is gone. A killed one is there until its new parent has taken its exit code."""
    return soon(lambda: not Path("/proc", path.read_text()).exists())


def test_ranks_of_several_hosts_meet_print_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(MEETS)
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept"
    settings = LaunchSettings(ssh=("env", "HOST={host}"), address="127.0.0.1", output=kept)
    answers = run_ranks([sys.executable, "script.py"], 2, {"a": 1, "b": 1}, settings, standard_input="heard")
    assert answers == ["0", "10"]
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == [
        "[0]<stdout>:sum 2.0 on a 0 heard",
        "[1]<stdout>:sum 2.0 on b 0 heard",
    ]
    assert "[1]<stderr>:also this" in printed.err.splitlines()
    assert (kept / "rank.1" / "stdout").read_text() == "sum 2.0 on b 0 heard\n"
    assert ANSWER_FILE == "POLYTEMPO_ANSWER_FILE"


def test_the_first_that_fails_ends_the_others_and_its_status_is_the_commands(tmp_path: Path) -> None:
    code, out, error = horovodrun(tmp_path, FAILS, "-np", "2", "--fusion-threshold-mb", "3", "-H", "localhost:4")
    assert code == 3, error
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:fusion {3 << 20}" for rank in range(2)]
    assert error.splitlines()[-1] == "error: rank 0 on localhost ended with exit code 3; the run has ended"
    assert ended(tmp_path / "pid-1")


STAYS = FAILS.replace("signal.pause()", "[signal.pause() for _ in range(9)]").replace(
    "import os, signal, sys", "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: None)"
)


def test_an_unended_line_of_a_rank_that_has_to_be_killed_is_there(tmp_path: Path) -> None:
    """The process that forwards its output is killed with it, and has the line from before."""
    code, out, error = horovodrun(tmp_path, STAYS, "-np", "2", "--fusion-threshold-mb", "3")
    assert code == 3, error
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:fusion {3 << 20}" for rank in range(2)]
    assert ended(tmp_path / "pid-1")


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    code, _, error = horovodrun(tmp_path, INTERRUPTS, "-np", "2")
    assert (code, error.splitlines()[-1]) == (130, "interrupted"), error
    assert all(ended(tmp_path / f"pid-{rank}") for rank in range(2))


def test_a_function_is_found_by_its_name_on_hosts_and_in_elastic_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ranked.py").write_text(RANKED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    work = importlib.import_module("ranked").work
    told = run(work, args=(torch.arange(2),), kwargs={"more": 0.5}, hosts="localhost:2", np=2, disable_cache=True)
    assert [(rank, cache, each.tolist()) for rank, cache, each in told] == [(0, "0", [0.5, 2.5]), (1, "0", [0.5, 2.5])]
    (alone,) = run(work, args=(torch.ones(1),), min_np=1, max_np=1, slots=1)
    assert alone[2].tolist() == [1.0]
    assert "[1]<stdout>:here" in capfd.readouterr().out.splitlines()
    with pytest.raises(ValueError, match="cannot be found by name in a new interpreter"):
        run(lambda: None, hosts="localhost:2")
    with pytest.raises(ValueError, match="no MPI takes part"):
        run(work, np=2, use_mpi=True)


def test_what_cannot_start_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    built = CliRunner().invoke(app, ["horovodrun", "--check-build"])
    assert (built.exit_code, "[X] PyTorch" in built.output) == (0, True)
    refused = CliRunner().invoke(app, ["horovodrun", "-np", "3", "-H", "localhost:2", "python"])
    expected = "error: -np 3 needs so many slots, and there are 2 (localhost:2)\n"
    assert (refused.exit_code, refused.stderr) == (2, expected)
    with pytest.raises(RanksFailed, match="rank 0 on localhost ended with exit code 127") as raised:
        run_ranks([str(tmp_path / "none")], 1, {"localhost": 1}, LaunchSettings())
    assert raised.value.exit_code == 127
    assert "cannot run" in capfd.readouterr().err
