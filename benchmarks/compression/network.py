"""Training over a network of four hosts: the time and bytes of a step, and the time to 97 %.

    export POLYTEMPO_NETLAB=…/netlab.sh POLYTEMPO_DATA=…         # see lab.py for the script; needs root
    python benchmarks/compression/network.py learn               # steps to 97 %, on loopback: no network, no lab
    python benchmarks/compression/network.py speed --mbit 100 1000        # seconds a step, in turns
    python benchmarks/compression/network.py predict --measured SPEED.json   # the step that `bench compression` expects
    python benchmarks/compression/network.py whole --mbit 100 --only …    # time to 97 %, trained over the network

`speed` and `learn` leave JSON (`--json`); `table` puts them together: time to 97 % = steps x seconds a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import ALONE, CONTENDERS, PARAMETERS, SIZES, TASKS, Contender, Recipe, Training, afresh, trained
from lab import lab, on_every_host

from polytempo.bench.compression import costs, gradient_of
from polytempo.bench.machine import cores, machine
from polytempo.bench.tables import markdown
from polytempo.cluster import Link
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.worlds import ProcessWorld

HOSTS = 4
_WARM_UP = 4
"""DDP rebuilds its buckets after a step, and PowerSGD's hook begins at the second."""
_RUN_S = 3600.0
_LATENCY_S = 100e-6
"""The latency between two processes in namespaces of this machine, by gloo over TCP."""
_EVERY = 20
"""Steps between looks at the accuracy."""


# ---------------------------------------------------------------------------------------------------- on each host


def speed(world: ProcessWorld, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds a step of each contender, one figure a round; who begins changes from round to round."""
    task = TASKS[given["task"]](Path(given["data"]))
    recipe = Recipe(given["steps"][0]) if given["steps"] else None
    trainings = {name: Training(CONTENDERS[name], world, task, recipe) for name in given["names"]}
    steps = {name: _steps_a_turn(CONTENDERS[name], each, given["turn_s"]) for name, each in trainings.items()}
    rows: dict[str, dict[str, Any]] = {
        name: {"name": name, "seconds": [], "wire": [], "trace": []} for name in trainings
    }
    names = list(trainings)
    for number in range(given["rounds"]):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            dist.barrier()
            sent, traced = interface_bytes(), world.trace.bytes_sent[world.rank]
            begun = time.perf_counter()
            trainings[name].run(steps[name])
            seconds = time.perf_counter() - begun
            row = rows[name]
            row["seconds"].append(_slowest(seconds) / steps[name])
            row["wire"].append((interface_bytes() - sent) / steps[name])
            row["trace"].append((world.trace.bytes_sent[world.rank] - traced) / steps[name])
    return list(rows.values())


def whole(world: ProcessWorld, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Each contender trained until the goal, or for so many steps; by the recipe, to the end of its schedule."""
    task = TASKS[given["task"]](Path(given["data"]))
    rows = []
    for name, steps, seed in itertools.product(given["names"], given["steps"], range(given["seeds"])):
        contender = replace(CONTENDERS[name], peak=given["peak"] or CONTENDERS[name].peak)
        training = afresh(contender, world, task, Recipe(steps), seed)
        found = trained(training, task.goal, steps, steps)
        rows.append({"name": name, "seed": seed, **found._asdict(), "of": steps})
        if world.rank == 0:
            print(f"{name}, seed {seed}, {steps} steps: {found}", flush=True)
        del training
    if given["steps"]:
        return rows
    for name in given["names"]:
        contender = CONTENDERS[name]
        training = afresh(contender, world, task)
        found = trained(training, task.goal, given["most_steps"], -(-_EVERY // contender.period) * contender.period)
        rows.append({"name": name, **found._asdict()})
        if world.rank == 0:
            print(f"{name}: {found}", flush=True)
        del training
    return rows


def _steps_a_turn(contender: Contender, training: Training, turn_s: float) -> int:
    """Whole periods that fill a turn, as rank 0 finds; the steps that find it out also warm up."""
    warm_up = -(-_WARM_UP // contender.period) * contender.period
    training.run(warm_up)
    dist.barrier()
    begun = time.perf_counter()
    training.run(contender.period)
    fitting = torch.tensor([turn_s / (time.perf_counter() - begun)], dtype=torch.float64)
    dist.broadcast(fitting, 0)
    return max(1, int(fitting)) * contender.period


def _slowest(seconds: float) -> float:
    most = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def interface_bytes() -> int:
    """Bytes that have left this host by other interfaces than loopback, headers included."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    fields = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in lines)}
    return sum(int(values[8]) for name, values in fields.items() if name != "lo")


WORK = {"speed": speed, "whole": whole}


def on_host(given: dict[str, Any]) -> None:
    """One rank's process on a host of the lab. Ends with its launcher: then standard input closes."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    world = init(quiet=True)
    rows = WORK[given["what"]](world, given)
    if world.rank == 0:
        Path(given["result"]).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


# ----------------------------------------------------------------------------------------------------- the launcher


def learn(given: dict[str, Any]) -> list[dict[str, Any]]:
    """`whole` on loopback: a synchronous contender's learning does not depend on the network."""
    rows: list[dict[str, Any]] = []
    for name in given["names"]:

        def work(rank_info: RankInfo, name: str = name) -> list[dict[str, Any]]:
            return whole(init(backend="gloo", quiet=True), {**given, "names": [name]})

        rows += launch(work, HOSTS, threads=1, timeout_s=_RUN_S)[0]
        print(rows[-1], flush=True)
    return rows


def over_network(script: Path, mbit_per_s: int, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of rank 0, of a lab that is made for this and gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="polytempo-network-") as folder,
        lab(script, HOSTS, mbit_per_s, given["delay_ms"]),
    ):
        result = Path(folder) / "rows.json"
        told = json.dumps({**given, "result": str(result)})
        on_every_host(script, HOSTS, [sys.executable, str(Path(__file__).resolve()), "host", told], _RUN_S)
        rows: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    return [{"mbit_per_s": mbit_per_s, **row} for row in rows]


def ring_bytes() -> float:
    """Each rank's bytes for an uncompressed gradient: 2(N-1)/N · K."""
    return 2 * (HOSTS - 1) / HOSTS * 4 * PARAMETERS


def speed_table(rows: Sequence[dict[str, Any]], steps: dict[str, int | None]) -> str:
    """A row for each contender and rate. `steps`: to the goal, where they are known."""
    cells: list[Sequence[str]] = []
    for mbit in sorted({row["mbit_per_s"] for row in rows}):
        own = {row["name"]: row for row in rows if row["mbit_per_s"] == mbit}
        seconds = {name: statistics.median(row["seconds"]) for name, row in own.items()}
        goal_s = {name: seconds[name] * n for name, n in steps.items() if name in seconds and n is not None}
        hook_s = min((each for name, each in goal_s.items() if "PowerSGD hook" in name), default=None)
        for name, row in own.items():
            wire, mine = statistics.median(row["wire"]), goal_s.get(name)
            bound_ms = wire * 8 / (mbit * 1e6) * 1e3
            against = [f"{peer / mine:.1f}" if peer and mine else "-" for peer in (goal_s.get("DDP"), hook_s)]
            cells.append(
                (
                    *(f"{mbit}", f"`{name}`" if "(" in name and "DDP" not in name else name, f"{wire / 1e6:.3f}"),
                    f"{row['trace'][0] / 1e6:.3f}" if any(row["trace"]) else "-",
                    *(
                        f"{seconds[name] * 1e3:.0f}",
                        f"{bound_ms:.0f}",
                        f"{steps.get(name) or '-'}",
                    ),
                    *(f"{mine:.1f}" if mine else "-", *against),
                )
            )
    columns = (
        *("Mbit/s", "contender", "MB a step and rank, interface", "payload", "ms a step", "line-rate bound, ms"),
        *("steps to the goal", "time to it, s", "DDP / it", "PowerSGD hook / it"),
    )
    return markdown((columns, cells))


def steps_of(rows: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """Steps to the goal by contender; by the recipe, the fewest that were enough for every seed."""
    found: dict[str, int | None] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        totals = sorted({row.get("of", row["steps"] or 0) for row in own})
        reached = [n for n in totals if all(row["steps"] for row in own if row.get("of", n) == n)]
        found[name] = min(reached) if reached and reached[0] else None
    return found


PREDICTED = ("sync_sgd()", "bf16_sgd()", "int8_sgd()", "one_bit_sgd()", "top_k_sgd(0.01)", "power_sgd(rank=1)")
"""The contenders with steps predicted from `polytempo bench compression`."""


def prediction_table(rows: Sequence[dict[str, Any]], rounds: int) -> str:
    """The predicted and the measured time of a step: the step without an exchange, and the exchange as predicted.

    `bench compression` has a core for itself; here all hosts share this machine's, so its computing takes as many
    times as long as there are hosts for a core.
    """
    torch.set_num_threads(1)
    gradients = [gradient_of(SIZES, rank) for rank in range(HOSTS)]
    crowded = max(1.0, HOSTS / cores())
    medians = {(row["mbit_per_s"], row["name"]): statistics.median(row["seconds"]) for row in rows}
    cells: list[Sequence[str]] = []
    for name in PREDICTED:
        if not any(measured == name for _, measured in medians):
            continue
        found = costs(parse_strategy(name).gradients, gradients, rounds)
        for mbit in sorted({rate for rate, _ in medians}):
            sending_s = found.communication_s(Link(_LATENCY_S, mbit * 1e6 / 8))
            alone_s, measured_s = medians[mbit, ALONE], medians[mbit, name]
            predicted_s = alone_s + crowded * found.computing_s + sending_s
            parts = (alone_s, crowded * found.computing_s, sending_s, predicted_s, measured_s)
            error = f"{predicted_s / measured_s - 1:+.0%}"
            cells.append((name, str(mbit), *(f"{seconds * 1e3:.1f}" for seconds in parts), error))
    columns = (
        "strategy",
        "Mbit/s",
        "step without exchange, ms",
        "computing",
        "sending",
        "predicted",
        "measured",
        "error",
    )
    return markdown((columns, cells))


def main() -> None:
    """Measure and print a table."""
    if sys.argv[1:2] == ["host"]:
        on_host(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learn", "speed", "whole", "table", "predict"))
    parser.add_argument("--lab", type=Path, default=os.environ.get("POLYTEMPO_NETLAB"), help="the script of the lab")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("POLYTEMPO_DATA"), help="folder with mnist, or tinyshakespeare"
    )
    parser.add_argument("--task", choices=TASKS, default="mnist")
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-s", type=float, default=3.0)
    parser.add_argument("--most-steps", type=int, default=800)
    parser.add_argument("--recipe", type=int, nargs="+", default=[], metavar="STEPS", help="by the recipe, so long")
    parser.add_argument("--peak", type=float, help="of the recipe's learning rate, in place of the contender's")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each contender, by the recipe")
    parser.add_argument("--delay-ms", type=int, default=0, help="between two hosts, one way")
    parser.add_argument("--learnt", type=Path, help="JSON of `learn`")
    parser.add_argument("--measured", type=Path, help="JSON of `speed`, for `table` and `predict`")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("name the folder with the data: --data, or POLYTEMPO_DATA")
    if arguments.lab is None and arguments.what in ("speed", "whole"):
        parser.error("name the lab's script: --lab, or POLYTEMPO_NETLAB")
    given = {
        "what": arguments.what,
        "names": arguments.only,
        "task": arguments.task,
        "data": str(arguments.data),
        "rounds": arguments.rounds,
        "turn_s": arguments.turn_s,
        "most_steps": arguments.most_steps,
        "steps": arguments.recipe,
        "peak": arguments.peak,
        "seeds": arguments.seeds,
        "delay_ms": arguments.delay_ms,
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the end of `lab`, which takes it down
    rows = _rows(arguments, given)
    if arguments.json:
        found = {"machine": machine(), "command": sys.argv, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    learnt = json.loads(arguments.learnt.read_text(encoding="utf-8"))["rows"] if arguments.learnt else []
    if arguments.what == "predict":
        print(prediction_table(rows, arguments.rounds))
        return
    if arguments.what in ("speed", "table"):
        print(speed_table(rows, steps_of(learnt)))
        return
    columns = ("Mbit/s", "contender", "steps to the goal", "seconds of these steps", "score then")
    print(
        markdown(
            (
                columns,
                [
                    (
                        *(str(row.get("mbit_per_s", "loopback")), row["name"], str(row["steps"] or "-")),
                        *(f"{row['seconds']:.1f}", f"{row['score']:.4f}"),
                    )
                    for row in rows
                ],
            )
        )
    )


def _rows(arguments: argparse.Namespace, given: dict[str, Any]) -> list[dict[str, Any]]:
    if arguments.what in ("table", "predict"):
        found: list[dict[str, Any]] = json.loads(arguments.measured.read_text(encoding="utf-8"))["rows"]
        return found
    if arguments.what == "learn":
        given["names"] = [name for name in given["names"] if name != ALONE]
        return learn(given)
    return [row for mbit in arguments.mbit for row in over_network(arguments.lab, mbit, given)]


if __name__ == "__main__":
    main()
