"""The scripts of `examples/integrations` that need torch alone have the same output on "polytempo" and on "gloo".

Here in small, by forked workers with the environment that torchrun gives them; `make test-integrations` starts all as
users do.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # forked workers have it then; every optimizer asks for it
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result

SCRIPTS = Path(__file__).parents[2] / "examples" / "integrations"
SMALL = {
    "mnist_ddp.py": ("--samples", "600", "--epochs", "1", "--log-interval", "2"),
    "ddp_tutorial.py": (),
    "nano_gpt.py": ("--steps", "6", "--eval-interval", "3", "--bf16"),
    "fsdp2.py": ("--steps", "6"),
}

pytestmark = pytest.mark.process


def shown(script: str, backend: str, data: Path) -> list[list[str]]:
    """The output of each of two ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    joins = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    held = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "POLYTEMPO_DATA": str(data)}

    def work(rank_info: RankInfo) -> Result:
        warnings.simplefilter("ignore")  # torch's own, about its own calls of deprecated functions
        os.environ.update(joins, **held, RANK=str(rank_info.rank), LOCAL_RANK=str(rank_info.rank))
        sys.argv = [script, "--backend", backend, *SMALL[script]]
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        return out.getvalue().splitlines()

    lines: list[Any] = launch(work, 2, threads=1, timeout_s=100)
    return lines


@pytest.mark.parametrize("script", SMALL)
def test_a_script_prints_what_it_prints_on_gloo(script: str, data_root: Path) -> None:
    first, second = (shown(script, backend, data_root) for backend in ("gloo", "polytempo"))
    assert first == second
    assert len(first[0]) >= 3
    assert first[1] == []
