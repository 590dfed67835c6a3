"""The scripts of `examples/integrations`, started as users start them, print the same on "polytempo" and on "gloo".

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
OTHERS = {
    "nano_gpt.py, bf16": (*TORCHRUN, "nano_gpt.py", "--bf16"),
    "fsdp2.py, mixed precision": (*TORCHRUN, "fsdp2.py", "--mixed"),
    "ddp_tutorial.py, spawned": ("ddp_tutorial.py", "--workers", "2"),
    "lightning_module.py, started by Lightning": ("lightning_module.py",),
}
STARTS = {
    path.name: (*TORCHRUN, path.name) for path in sorted(SCRIPTS.glob("*.py")) if not path.name.startswith("horovod_")
} | OTHERS

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

GLOO_ABORTS = "terminate called without an active exception"
"""Gloo's threads print it now and then when a process ends; another run of the peer is as good."""
MOST_RUNS = 5


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
        for _ in range(MOST_RUNS if backend == "gloo" else 1):
            done = run((*STARTS[start], "--backend", backend), tmp_path, POLYTEMPO_DATA=str(data_root))
            if GLOO_ABORTS not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
        assert "goes through gloo" not in done.stderr, "the native core was not used"
        shown[backend] = done.stdout.splitlines()
    assert shown["polytempo"] == shown["gloo"]
    assert len(shown["gloo"]) >= 4
    assert list(tmp_path.iterdir()) == []


NAMED = {
    "accelerate": """
from accelerate import Accelerator, InitProcessGroupKwargs
Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="polytempo")])
""",
    "transformers": """
from transformers import TrainingArguments
TrainingArguments("unused", use_cpu=True, ddp_backend="polytempo")
""",
}


@pytest.mark.parametrize("library", NAMED)
def test_a_name_in_place_of_a_group_is_refused_as_the_examples_say(library: str, tmp_path: Path) -> None:
    """A failure here means that the library takes the name by now, and the recipe becomes one line shorter."""
    done = run(("-c", NAMED[library]), tmp_path, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert done.returncode == 1
    assert "Your assigned backend polytempo is not available" in done.stderr


def test_without_cpu_accelerate_trains_alone_as_the_example_says(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text("""
import torch.distributed as dist
from accelerate import Accelerator
dist.init_process_group("polytempo")
print(Accelerator().num_processes, flush=True)
dist.destroy_process_group()
""")
    done = run((*TORCHRUN, str(program)), tmp_path, CUDA_VISIBLE_DEVICES="")
    assert "".join(done.stdout.split()) == "11", done.stderr  # two processes write to one pipe
