"""The scripts of `examples/integrations` print on "polytempo" what they print on "gloo", started as users start them.

Run by `make test-integrations`, in a venv that has the libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "integrations"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--mixed_precision", "no")
OTHERS = {
    "nano_gpt.py, bf16": (*TORCHRUN, "nano_gpt.py", "--bf16"),
    "fsdp2.py, mixed precision": (*TORCHRUN, "fsdp2.py", "--mixed"),
    "ddp_tutorial.py, spawned": ("ddp_tutorial.py", "--workers", "2"),
    "lightning_module.py, started by Lightning": ("lightning_module.py",),
    "accelerate_loop.py, started by accelerate launch": (*ACCELERATE, "accelerate_loop.py"),
}
STARTS = {path.name: (*TORCHRUN, path.name) for path in sorted(SCRIPTS.glob("*.py"))} | OTHERS
NEED_DATA = ("mnist_ddp.py", "nano_gpt.py")

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def run(arguments: tuple[str, ...], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python *arguments`, where the name of a script stands for its path; without a network, and one thread a rank."""
    known = {path.name: str(path) for path in SCRIPTS.glob("*.py")}
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "ACCELERATE_"))}
    command = [sys.executable, *(known.get(argument, argument) for argument in arguments)]
    return subprocess.run(
        command, cwd=cwd, env=clean | offline | variables, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("start", STARTS)
def test_a_script_prints_what_it_prints_on_gloo(start: str, tmp_path: Path, data_root: Path) -> None:
    shown = {}
    for backend in ("gloo", "polytempo"):
        done = run((*STARTS[start], "--backend", backend), tmp_path, POLYTEMPO_DATA=str(data_root))
        assert done.returncode == 0, done.stderr
        assert "goes through gloo" not in done.stderr, "the native core was not used"
        shown[backend] = done.stdout.splitlines()
    assert shown["polytempo"] == shown["gloo"]
    assert len(shown["gloo"]) >= 4
    assert list(tmp_path.iterdir()) == []
