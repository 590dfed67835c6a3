"""One host at the speed of memory: the three benchmarks of `polytempo bench`, and their tables as one Markdown file.

Each runs in a process of its own, one after another; the machine should have nothing else to do.

    python benchmarks/one_host/main.py [--quick] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("collectives", "training", "memory")


def measured(benchmark: str, folder: Path, quick: bool) -> str:
    """Run one benchmark; its section: the command, the machine, the table, and missing measurements."""
    options = [benchmark, "--out", str(folder), *(["--quick"] if quick else [])]
    subprocess.run([sys.executable, "-m", "polytempo", "bench", *options], check=True)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    machine = result["machine"]
    lines = [
        f"## {benchmark.capitalize()}",
        "",
        f"    polytempo bench {benchmark}{' --quick' if quick else ''}",
        "",
        f"{result['begun'][:10]}; {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB; "
        f"Linux {machine['kernel']}; torch {machine['torch']}; native core: {machine['native']}.",
        "",
        (folder / "table.md").read_text(encoding="utf-8"),
        *(f"{name} is not measured: {reason}." for name, reason in result["missing"].items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure everything and write `tables.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a rough look")
    parser.add_argument("--out", type=Path, default=Path("runs/one_host"), help="a folder without results")
    arguments = parser.parse_args()
    sections = [measured(name, arguments.out / name, arguments.quick) for name in BENCHMARKS]
    path = arguments.out / "tables.md"
    path.write_text("\n".join(sections), encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
