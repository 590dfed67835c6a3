"""`run`: a function on several processes, each of which has a rank in `polytempo.horovod.torch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polytempo.engines.launch import launch
from polytempo.engines.worker import RankInfo
from polytempo.horovod.plain_values import decoded, encoded
from polytempo.horovod.torch.basics import shutdown


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    start_timeout: float | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in `np` processes of this host; what each rank returned, by rank.

    Processes are forked from this one, so `func` may be any function; call it before this process computes with
    several threads. Results are plain values, tensors and NumPy arrays (`horovod.plain_values`); TypeError for others.
    `start_timeout` bounds the whole run in seconds. Hosts are not started here yet: use an engine of Polytempo, or
    torchrun, mpirun or Slurm, whose processes `init` recognises. Errors: those of `polytempo.launch`.

        run(lambda: hvd.init() or hvd.rank(), np=2)      # [0, 1]
    """

    def work(_: RankInfo) -> str:
        answer = encoded(func(*args, **(kwargs or {})))
        shutdown()
        return answer.hex()

    return [decoded(bytes.fromhex(each)) for each in launch(work, np, timeout_s=start_timeout)]
