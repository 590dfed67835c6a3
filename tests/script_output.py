"""Prints a script of `examples/integrations` on "gloo" and on "polytempo", as JSON: `script_output.py NAME DATA`.

A program, because its workers are forked: in a fork of a process that has run other tests, objects that these have left
come to their end, and may wait for threads that a fork does not have.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch._dynamo  # forked workers have it then; every optimizer asks for it
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result

SCRIPTS = Path(__file__).parents[1] / "examples" / "integrations"
SMALL = {
    "mnist_ddp.py": ("--samples", "600", "--epochs", "1", "--log-interval", "2"),
    "ddp_tutorial.py": (),
    "nano_gpt.py": ("--steps", "6", "--eval-interval", "3", "--bf16"),
    "fsdp2.py": ("--steps", "6"),
}


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

    lines: list[Any] = launch(work, 2, threads=1, timeout_s=50)
    return lines


if __name__ == "__main__":
    name, data = sys.argv[1], Path(sys.argv[2])
    print(json.dumps([shown(name, backend, data) for backend in ("gloo", "polytempo")]))
