"""A device's hour in one command: are the results right, and how fast is training on it?

    python benchmarks/gpu/main.py [--device auto] [--out build/gpu] [--minutes 14] [--tiny] [--only SECTION ...]

Sections run one after the other, each in processes of its own. The table is written after each section, so finished
sections stay if the time ends. `--tiny` takes sizes for the pretend device of `tests/device`, which has no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from codecs_of_device import codecs
from models import workloads
from simulation import simulation
from training import Plan, parameters, training

from polytempo.bench.machine import written
from polytempo.device import accelerator_kind, num_devices

ROOT = Path(__file__).parents[2]
Rows = list[dict[str, Any]]


def conformance(device: str, timeout_s: float) -> Rows:
    """The tests of `tests/device` on this device."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/device", "--device", device], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
    lines = done.stdout.strip().splitlines()
    return [{"device": device, "outcome": lines[-1] if lines else done.stderr[-300:], "exit_code": done.returncode}] + [
        {"device": device, "outcome": line} for line in lines if line.startswith(("FAILED", "ERROR"))
    ]


def sections(device: str, tiny: bool, timeout_s: float) -> dict[str, Callable[[], Rows]]:
    """The sections by name, in their order: the most wanted come first."""
    plan = Plan(device, rounds=2 if tiny else 5, turn_s=0.01 if tiny else 0.4)
    models = workloads(tiny)
    shared = plan._replace(families=("sync_sgd()", "local_sgd(period=8)", "gossip()", "top_k_sgd(0.01)"))
    found: dict[str, Callable[[], Rows]] = {} if tiny else {"conformance": lambda: conformance(device, timeout_s)}
    for name, workload in models.items():
        facts = {"model": name, "parameters": parameters(workload)}
        found[f"training {name}"] = lambda w=workload, f=facts: _with(f, training(plan, w, 1))
    found["codecs"] = lambda: codecs(device, 2**12 if tiny else 2**24, 2 if tiny else 20)
    found["simulation"] = lambda: simulation(device, 4 if tiny else 1000, 2 if tiny else 16)
    for workers in (2,) if tiny else (2, 4):
        for name, workload in models.items():
            facts = {"model": name, "parameters": parameters(workload)}
            found[f"{workers} ranks {name}"] = lambda w=workload, f=facts, n=workers: _with(f, training(shared, w, n))
    return found


def _with(facts: dict[str, Any], rows: Rows) -> Rows:
    return [facts | row for row in rows]


def card_name(device: str) -> str:
    """The device's name, asked of a process of its own: this one must not begin to use it."""
    program = (
        "import sys, torch; module = torch.get_device_module(sys.argv[1]); "
        "print(module.get_device_name() if hasattr(module, 'get_device_name') else sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", program, device], capture_output=True, text=True, timeout=120)
    return done.stdout.strip() or device


def table(result: dict[str, Any]) -> str:
    """The result in Markdown: a table for each section."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"Card: {settings['card']} ({settings['devices']} visible), torch {machine['torch']}, {machine['cpu']}, "
        f"{machine['cores']} cores; begun {result['begun']} by `{result['command']}`.",
    ]
    for section, rows in result["sections"].items():
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines += ["", f"## {section}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [f"| {' | '.join(_shown(row.get(name, '')) for name in columns)} |" for row in rows]
    for section, reason in result["missing"].items():
        lines += ["", f"Not measured: {section}: {reason}"]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    """A figure over rounds as its median and quartiles."""
    if isinstance(value, tuple):
        return f"{value[0]:.4g} ({value[1]:.4g} to {value[2]:.4g})"
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())


def main() -> None:
    """Run the sections and write `gpu.json` and `gpu.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--minutes", type=float, default=14.0, help="no section begins later")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", help="beginnings of sections' names")
    given = parser.parse_args()
    device = accelerator_kind() if given.device == "auto" else given.device
    if device is None:
        parser.error("torch sees no accelerator here")
    end_s = time.monotonic() + 60 * given.minutes
    settings = {"device": device, "card": card_name(device), "devices": num_devices(), "tiny": given.tiny}
    result = written("gpu", settings, {}, []) | {"sections": {}}
    torch.set_float32_matmul_precision("high")
    given.out.mkdir(parents=True, exist_ok=True)
    for name, measure in sections(device, given.tiny, 60 * given.minutes).items():
        if given.only and not name.startswith(tuple(given.only)):
            continue
        if time.monotonic() > end_s:
            result["missing"][name] = "the time was over"
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            result["sections"][name] = measure()
        except Exception as error:  # finished sections stay
            result["missing"][name] = f"{type(error).__name__}: {str(error)[:500]}"
        (given.out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (given.out / "gpu.md").write_text(table(result), encoding="utf-8")
    print((given.out / "gpu.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
