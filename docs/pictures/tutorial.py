"""Draw `tutorial.png`: pictures of the tutorial's data, and the accuracy of its models by epoch.

    python docs/pictures/tutorial.py FOLDER

`FOLDER` is where the tutorial of `docs/start.md` was done.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw

import polytempo as pt

RUNS = {"runs/table": ("job file, table", "#0072b2"), "runs/pictures": ("job file, pictures", "#d55e00")}
RUNS |= {"runs/by-job": ("job, local SGD", "#009e73")}
WIDTH, HEIGHT, CELL = 1000, 320, 38
LEFT, RIGHT, TOP, BOTTOM = 420, 960, 30, 270


def draw(folder: Path, path: Path) -> None:
    """Draw the picture of the files in `folder`."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    canvas = ImageDraw.Draw(image)
    _sheet(image, folder / "digits")
    most = max(pt.training.history(folder / run)[-1]["epoch"] for run in RUNS)
    for share in (0.0, 0.5, 1.0):
        y = BOTTOM - share * (BOTTOM - TOP)
        canvas.line([(LEFT, y), (RIGHT, y)], fill="#d0d5da")
        canvas.text((LEFT - 46, y - 7), f"{share:.0%}", fill="#444")
    for epoch in range(0, round(most) + 1, 2):
        canvas.text((LEFT + epoch / most * (RIGHT - LEFT) - 4, BOTTOM + 8), str(epoch), fill="#444")
    canvas.text(((LEFT + RIGHT) / 2 - 20, BOTTOM + 26), "epochs", fill="#444")
    for number, (run, (name, color)) in enumerate(RUNS.items()):
        rows = pt.training.history(folder / run).of("test")
        points = [
            (LEFT + row["epoch"] / most * (RIGHT - LEFT), BOTTOM - row["accuracy"] * (BOTTOM - TOP)) for row in rows
        ]
        canvas.line(points, fill=color, width=3)
        for x, y in points:
            canvas.ellipse([x - 4, y - 4, x + 4, y + 4], fill=color)
        canvas.text((LEFT + 300, 170 + 24 * number), f"{name}: {rows[-1]['accuracy']:.1%}", fill=color)
    image.quantize(64).save(path, optimize=True)


def _sheet(image: Image.Image, pictures: Path) -> None:
    """Eight pictures of each of the first eight classes."""
    for row, label in enumerate(sorted(entry for entry in pictures.iterdir() if entry.is_dir())[:8]):
        for column, file in enumerate(sorted(label.iterdir())[:8]):
            with Image.open(file) as picture:
                image.paste(picture.convert("RGB"), (8 + column * CELL, 8 + row * CELL))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(__file__).with_name("tutorial.png"))
