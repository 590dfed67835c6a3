"""The cost of negotiation by name for an asynchronous all-reduce: 2 ranks of one host, one thread each.

python benchmarks/horovod/main.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

import polytempo.horovod.torch as hvd
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result


def seconds(call: Callable[[], object], times: int) -> list[float]:
    """The time of each of so many calls."""
    found = []
    for _ in range(times):
        start_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - start_s)
    return found


def work(_: RankInfo) -> Result:
    """Size in bytes -> medians of ours and of the backend's, in turns."""
    hvd.init()
    answer = {}
    for num_bytes, times in ((4 << 10, 1500), (16 << 20, 10)):
        tensor = torch.ones(num_bytes // 4)
        ours: list[float] = []
        backend: list[float] = []
        for _ in range(4):
            ours += seconds(
                lambda t=tensor, n=num_bytes: hvd.synchronize(hvd.allreduce_async_(t, name=f"{n}", op=hvd.Max)), times
            )
            backend += seconds(lambda t=tensor: dist.all_reduce(t, dist.ReduceOp.MAX, async_op=True).wait(), times)
        answer[num_bytes] = [median(ours), median(backend)]
    return answer


if __name__ == "__main__":
    for num_bytes, (ours, backend) in launch(work, 2, threads=1, timeout_s=100)[0].items():
        print(
            f"{int(num_bytes) >> 10} KiB: hvd {1e6 * ours:.1f} us, dist.all_reduce {1e6 * backend:.1f} us, "
            f"ratio {ours / backend:.2f}, added {1e6 * (ours - backend):.1f} us"
        )
