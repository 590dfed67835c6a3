"""The cost of a parameter server for its workers, beyond its known parts: `server step`, `server exchange`.

    step with a server - step without one,  real  =  the same simulated  +  server step  +  server exchange · share

Known are the copies of gradient and parameters, the messages, and the work of the shards. The rest of a step is the
request for its batch; the rest of an exchange is the client's work around the messages, misses of the caches, and the
time to wake processes up. Downpour exchanges in one of 8 steps, so it tells the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from polytempo.cluster import Cluster, KernelSpeed
from polytempo.cluster.computing_time import SERVER_EXCHANGE, SERVER_STEP
from polytempo.engines.engine import EngineSetup
from polytempo.engines.processes import janitor
from polytempo.report.pages.validation import typical_step_s
from polytempo.report.runs import load_run
from polytempo.runs.calibration.measurement import NO_EXCHANGE, SMALL_SIZES, SmallRun
from polytempo.runs.frame.short_fork import beside_forks
from polytempo.runs.run import run
from polytempo.runs.simulated.simulate import simulate
from polytempo.strategies import async_sgd, downpour

_PERIOD = 8
_RUNS = {
    f"{size} {name}": SmallRun(strategy, 4, SMALL_SIZES[size], 80)
    for size, name, strategy in (
        ("small", "alone", NO_EXCHANGE),
        ("small", "seldom", downpour(_PERIOD, _PERIOD, optimizer="sgd", overlap=False)),
        ("small", "always", async_sgd()),
        ("large", "alone", NO_EXCHANGE),
        ("large", "always", async_sgd()),
    )
}
_SIMULATED, _ROUNDS = 40, 2


class _Charges(NamedTuple):
    """Seconds of a step, of an exchange, and of each byte of its vector."""

    step_s: float = 0.0
    exchange_s: float = 0.0
    byte_s: float = 0.0

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster with these kernels."""
        exchange = KernelSpeed(call_s=self.exchange_s, byte_s=self.byte_s)
        return cluster.with_kernel(SERVER_STEP, KernelSpeed(self.step_s)).with_kernel(SERVER_EXCHANGE, exchange)


_GUESS = _Charges(3e-4, 3e-4, 1e-10)
"""Charges of a trial: workers that wait for the server, or for a core, hide a part of a charge.

Stragglers are left as they are: workers of one speed fall into step, and then meet at the server always or never."""


def with_server_exchange(cluster: Cluster, setup: EngineSetup, workers: int) -> Cluster:
    """The cluster with both kernels. Cost: five runs of 80 steps. Errors: as `run`."""
    alone_s = {name: _simulated_s(run, cluster, workers) for name, run in _RUNS.items() if "alone" in name}
    taken_s = {name: _measured_s(run, setup, workers) for name, run in _RUNS.items()}

    def remaining_s(name: str, charges: _Charges) -> float:
        """Measured less simulated seconds of the run with these charges, each beyond the run without an exchange."""
        alone = f"{name.split()[0]} alone"
        said_s = _simulated_s(_RUNS[name], charges.on(cluster), workers)
        return taken_s[name] - taken_s[alone] - (said_s - alone_s[alone])

    found = _Charges()
    for _ in range(_ROUNDS):
        for name, field in (("small seldom", "step_s"), ("small always", "exchange_s"), ("large always", "byte_s")):
            found = _fitted(found, field, partial(remaining_s, name))
    return found.on(cluster)


def _fitted(charges: _Charges, field: str, remaining_s: Callable[[_Charges], float]) -> _Charges:
    """A step of the secant method towards the charge that leaves no remaining seconds."""
    seconds: float = getattr(charges, field)
    guess_s = getattr(_GUESS, field)
    remains_s = remaining_s(charges)
    explained_s = remains_s - remaining_s(charges._replace(**{field: seconds + guess_s}))
    if explained_s > 0:
        seconds = max(0.0, seconds + guess_s * remains_s / explained_s)
    return charges._replace(**{field: seconds})


def _measured_s(small: SmallRun, setup: EngineSetup, workers: int) -> float:
    """Seconds of a typical step on the hosts."""
    options = small.options(small.steps)
    return _typical_s(lambda out: run(small.job, small.strategy, workers, replace(options, out=out), engine=setup))


def _simulated_s(small: SmallRun, cluster: Cluster, workers: int) -> float:
    options = replace(small.options(_SIMULATED), epochs=None)

    def simulated(out: Path) -> object:
        return simulate(small.job, small.strategy, workers, cluster, replace(options, out=out), meta=True)

    return beside_forks(lambda: _typical_s(simulated))


def _typical_s(train: Callable[[Path], object]) -> float:
    with janitor.private_folder() as folder:
        out = folder / "run"
        train(out)
        return typical_step_s(load_run(out).events, _PERIOD)
