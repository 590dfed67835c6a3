"""The main job as a person starts it: wall time from typing the command to 97 % test accuracy.

python benchmarks/digits/main.py [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STRATEGIES = ["sync_sgd", "sync_sgd(route=ring)", "local_sgd(period=8)", "gossip"]


def one(strategy: str, seed: int) -> tuple[float, float, float]:
    """Wall seconds of the command, seconds of training in it, and the accuracy that it reached."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "polytempo", "train", "digits", "--workers", "2", "--strategy", strategy]
        command += ["--until", "accuracy=0.97", "--seed", str(seed), "--json", "--out", str(Path(folder) / "run")]
        begin_s = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wall_s = time.perf_counter() - begin_s
        result = json.loads(done.stdout)
        return wall_s, result["seconds"], result["accuracy"]


def main() -> None:
    """Measure and print the rows of a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for strategy in STRATEGIES:
        measured = [one(strategy, seed) for seed in range(runs)]
        wall_s, training_s, accuracy = (statistics.median(column) for column in zip(*measured, strict=True))
        slowest_s = max(wall for wall, _, _ in measured)
        print(f"| {strategy} | {wall_s:.1f} | {slowest_s:.1f} | {training_s:.2f} | {accuracy:.1%} |", flush=True)


if __name__ == "__main__":
    main()
