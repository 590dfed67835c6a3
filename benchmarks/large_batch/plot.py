"""The picture of docs/large-batch.md: the noise scale of a real run of digits, and the steps saved by a growing batch.

    python benchmarks/large_batch/plot.py docs/large-batch.png

Two worker processes, synchronous SGD, rate 0.05, 15 epochs, seed 0: a batch of 16 throughout, and a batch multiplied by
5 after 5 and after 10 epochs. The noise scale of the first is measured every 4 steps; where its line has a gap, noise
hid the gradient.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import polytempo as pt
from polytempo.report.pictures.plots import points, windowed
from polytempo.report.runs import RunRecord, load_run

EPOCHS, BATCH = 15, 16
GROWTH = {5: 5.0, 10: 5.0}


def trained(folder: Path, growth: dict[int, float]) -> RunRecord:
    """The results of a run."""
    options = pt.RunOptions(
        global_batch_size=BATCH, lr=0.05, epochs=EPOCHS, noise_scale=4, batch_growth=growth, out=folder
    )
    pt.run(pt.jobs.find("digits"), pt.strategies.sync_sgd(), 2, options)
    return load_run(folder)


def main() -> None:
    """Draw and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    growth_of = {f"batch of {BATCH}": {}, "batch x 5 after 5 and 10 epochs": GROWTH}
    with TemporaryDirectory() as folder:
        runs = {name: trained(Path(folder, str(len(growth))), growth) for name, growth in growth_of.items()}
    figure = Figure(figsize=(10, 3.8), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    scale, loss = figure.subplots(1, 2)
    for name, run in runs.items():
        rows = [row for row in run.rows("train") if "noise_trace" in row]
        if not growth_of[name]:
            scales = [math.nan if row["noise_scale"] is None else row["noise_scale"] for row in rows]
            scale.plot([row["epoch"] for row in rows], scales, label=name)
        losses = windowed(points(run, "train", "step", "loss"), EPOCHS)
        loss.plot([x for x, _ in losses], [y for _, y in losses], label=name)
        print(name, run.result["steps"], "steps, test accuracy", run.result["accuracy"])
        print("noise scale by epoch:", [(round(row["epoch"]), row["noise_scale"]) for row in rows[9::10]])
    for axes, x, y in ((scale, "Epochs", "Noise scale (samples)"), (loss, "Steps", "Training loss")):
        axes.set(xlabel=x, ylabel=y, yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(given.path)


if __name__ == "__main__":
    main()
