"""Compile the pretend device: `python tests/device/build.py` prints the folder to put into `$PYTHONPATH`.

A build belongs to the sources, torch and Python; it is kept in `build/pretend/`, and made once, however many processes
ask. It takes a minute of processor time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "pretend"
BUILDS = Path(__file__).parents[2] / "build" / "pretend"
FLAGS = ["-O1", "-g0", "-w", "-DUSE_C10D"]
TIMEOUT_S = 900


def compiler() -> str | None:
    """The C++ compiler's path, or None."""
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def built() -> Path:
    """The folder of the build, which is made if there is none yet."""
    folder = BUILDS / _key()
    if not folder.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with (BUILDS / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                _build(folder)
    return folder


def _key() -> str:
    """torch's version, Python's, and a hash of the sources and flags."""
    content = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            content.update(path.name.encode() + path.read_bytes())
    content.update(Path(__file__).read_bytes())
    return f"torch-{torch.__version__}-py{platform.python_version()}-{content.hexdigest()[:12]}"


def _build(folder: Path) -> None:
    """Build beside the folder and rename: a build that was broken off leaves none behind."""
    with tempfile.TemporaryDirectory(dir=BUILDS) as made:
        place = Path(made) / "made"
        place.mkdir()
        subprocess.run([sys.executable, __file__, str(place)], check=True, timeout=TIMEOUT_S, stdout=sys.stderr)
        _write_package(place)
        place.rename(folder)


def _compile(place: Path) -> None:
    from torch.utils import cpp_extension

    work = place / "objects"
    work.mkdir()
    cpp_extension.load(
        "pretend_device",
        [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=FLAGS,
        build_directory=str(work),
    )
    (work / "pretend_device.so").rename(place / "pretend_device.so")
    shutil.rmtree(work)


def _write_package(place: Path) -> None:
    """The Python module, and the entry point that torch calls when it is imported."""
    (place / "pretend").mkdir()
    shutil.copy(SOURCES / "__init__.py", place / "pretend")
    facts = place / "pretend-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: pretend\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\npretend = pretend:register\n")


def give(environment: MutableMapping[str, str], folder: Path, *, cards: int = 2) -> None:
    """Let the processes that get this environment have the device, with copies that land late and strict batches."""
    paths = [str(folder), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment.update(PRETEND_BUILD=str(folder), PRETEND_DEVICES=str(cards), PRETEND_LATE="1", PRETEND_STRICT="1")


if __name__ == "__main__":
    if sys.argv[1:]:
        _compile(Path(sys.argv[1]))
    else:
        print(built())
