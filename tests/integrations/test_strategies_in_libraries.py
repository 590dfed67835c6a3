"""Strategies of ours in Lightning, accelerate and `transformers.Trainer`: the bits of a hand-written loop.

Each program trains twice on two ranks, by the library and by hand, and once more from the library's checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
STRATEGIES = {
    "lightning_strategies.py": ["sync_sgd", "shared_memory", "top_k_sgd(0.3)", "diloco(period=3)", "gossip"],
    "hugging_face_strategies.py": ["local_sgd(period=5)", "shared_memory", "top_k_sgd(0.3)"],
    "adapters.py": ["sync_sgd", "local_sgd(period=3)", "top_k_sgd(0.3)", "shared_memory", "gossip"],
}

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.mark.parametrize("program", STRATEGIES)
def test_a_program_says_that_all_is_equal(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(PROGRAMS / program),
            *STRATEGIES[program],
        ],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert lines == sorted(f"rank {rank}: {each}: equal" for rank in range(2) for each in STRATEGIES[program])
