"""The others: the same push and pull by a plain shared-memory add and copy, gloo, Ray and torch RPC.

Each call of a worker adds its gradient to the server's vector and leaves that in the worker's own parameters.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from crew import Attend, Crew, RankInfo, Unavailable
from torch import Tensor
from torch.distributed import rpc

from polytempo.wire.shared import Arenas

try:
    import ray
except ImportError:
    ray = None

_DEADLINE = timedelta(minutes=10)


def limit(numel: int, workers: int) -> Crew:
    """No messages, no locks, no checks: each worker adds to one shared vector and copies that."""
    arenas = Arenas(workers + 1, 4 * numel * 3 + (1 << 20))
    shared = arenas.empty(workers, numel)

    def rank_info(worker: int) -> RankInfo:
        def work(attend: Attend) -> None:
            gradient, parameters = arenas.empty(worker, numel).fill_(1e-3), arenas.empty(worker, numel)

            def run(calls: int) -> None:
                for _ in range(calls):
                    shared.add_(gradient)
                    parameters.copy_(shared)

            attend(run)

        return work

    return Crew("limit", [rank_info(worker) for worker in range(workers)])


def gloo(numel: int, workers: int) -> Crew:
    """`dist.send` and `dist.recv` to a process that adds."""
    port = _free_port()

    def join(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, workers + 1, rank == workers, timeout=_DEADLINE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers + 1, timeout=_DEADLINE)

    def serve() -> None:
        join(workers)
        weights, gradient = torch.zeros(numel), torch.zeros(numel)
        while True:
            source = dist.recv(gradient)
            weights.add_(gradient)
            dist.send(weights, source)

    def rank_info(worker: int) -> RankInfo:
        def work(attend: Attend) -> None:
            join(worker)
            gradient, parameters = torch.full((numel,), 1e-3), torch.zeros(numel)

            def run(calls: int) -> None:
                for _ in range(calls):
                    dist.send(gradient, workers)
                    dist.recv(parameters, workers)

            attend(run)

        return work

    return Crew("gloo", [rank_info(worker) for worker in range(workers)], [serve])


# ---------------------------------------------------------------------------------------------------------- torch RPC


class _Held:
    """The server's vector, in the process that has it."""

    weights = torch.empty(0)
    lock = threading.Lock()


def _push_pull(gradient: Tensor) -> Tensor:
    with _Held.lock:
        return _Held.weights.add_(gradient)


def torch_rpc(numel: int, workers: int) -> Crew:
    """`rpc_sync` of a function that adds and answers the sum, over TensorPipe (shared memory on one host)."""
    port = _free_port()

    def join(rank: int) -> None:
        os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=_DEADLINE.total_seconds(), num_worker_threads=4
        )
        rpc.init_rpc(f"n{rank}", rank=rank, world_size=workers + 1, rpc_backend_options=options)

    def serve() -> None:
        _Held.weights = torch.zeros(numel)
        join(workers)
        threading.Event().wait()

    def rank_info(worker: int) -> RankInfo:
        def work(attend: Attend) -> None:
            join(worker)
            gradient, parameters = torch.full((numel,), 1e-3), torch.zeros(numel)

            def run(calls: int) -> None:
                for _ in range(calls):
                    parameters.copy_(rpc.rpc_sync(f"n{workers}", _push_pull, (gradient,)))

            attend(run)
            os._exit(0)  # an orderly end waits for all

        return work

    return Crew("torch RPC", [rank_info(worker) for worker in range(workers)], [serve])


# ---------------------------------------------------------------------------------------------------------------- Ray


def ray_actors(numel: int, workers: int) -> Crew:
    """An actor that adds and answers the sum; workers are actors, too. Tensors travel through Ray's object store."""
    if ray is None:
        raise Unavailable("Ray is not installed; pip install ray")
    return Crew("Ray actors", [_ray_driver(numel, workers)])


def _ray_driver(numel: int, workers: int) -> RankInfo:
    def work(attend: Attend) -> None:
        ray.init(
            num_cpus=workers + 1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=4 * numel * 16,
            _system_config={"metrics_report_interval_ms": 3_600_000},
        )
        server = ray.remote(_RayServer).options(num_cpus=1).remote(numel)
        crew = [ray.remote(_RayWorker).options(num_cpus=1).remote(numel, server) for _ in range(workers)]

        def run(calls: int) -> None:
            ray.get([worker.run.remote(calls) for worker in crew])

        attend(run)
        ray.shutdown()

    return work


class _RayServer:
    def __init__(self, numel: int) -> None:
        torch.set_num_threads(1)
        self._weights = np.zeros(numel, np.float32)

    def push_pull(self, gradient: Any) -> Any:
        np.add(self._weights, gradient, out=self._weights)
        return self._weights


class _RayWorker:
    def __init__(self, numel: int, server: Any) -> None:
        self._server = server
        self._gradient, self._parameters = np.full(numel, 1e-3, np.float32), np.zeros(numel, np.float32)

    def run(self, calls: int) -> None:
        for _ in range(calls):
            np.copyto(self._parameters, ray.get(self._server.push_pull.remote(self._gradient)))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


PEERS: dict[str, Callable[[int, int], Crew]] = {
    "limit": limit,
    "gloo": gloo,
    "Ray actors": ray_actors,
    "torch RPC": torch_rpc,
}
