"""Draw `docs/compare.png`: seven strategies on the digits, by two virtual workers with a link of 1 Gbit/s between them.

    python docs/pictures/compare.py

Seconds are virtual, so every drawing has the same ones.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import polytempo as pt
from polytempo.report.pictures.picture import write_picture
from polytempo.report.runs import load_run

OPTIONS = {"workers": 2, "lr": 0.01, "epochs": 20, "cluster": pt.cluster.ethernet(gbit_per_s=1)}
SYNCHRONOUS, LOCAL, OUTER = "sync_sgd", "local_sgd(period=8)", "diloco(period=8)"
STRATEGIES = (
    *(SYNCHRONOUS, "sync_sgd(route=ring)", LOCAL, OUTER),
    *("post_local_sgd(switch_step=150)", "delayed_sgd", "adasum"),
)


def draw(path: Path) -> None:
    """Simulate all, and write the picture."""
    job = pt.jobs.find("digits")
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(len(STRATEGIES))]
        for strategy, place in zip(STRATEGIES, places, strict=True):
            result = pt.simulate(job, pt.parse_strategy(strategy), out=place, **OPTIONS)
            print(
                f"{strategy:35} {result.steps} steps, {result.bytes_sent_per_rank / 1e6:.1f} MB, {result.seconds:.3f} s"
            )
        write_picture(path, [load_run(place) for place in places])


if __name__ == "__main__":
    draw(Path(__file__).parents[1] / "compare.png")
