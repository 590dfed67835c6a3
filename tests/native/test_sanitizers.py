"""The programs of `native/tests/`, with threads as ranks, under the thread and the address and UB sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "native" / "tests").glob("*.cpp"))
KERNELS = {"thread": (), "address,undefined": ("v3",)}
"""Further instruction sets to build: threads meet outside of the kernels, and v4 is v3's source."""
TIMEOUT_S = 240


def test_there_are_programs() -> None:
    assert PROGRAMS == ["collectives", "endings", "hogwild", "messages", "step"]


def test_no_byte_is_touched_that_is_not_ours(tmp_path: Path) -> None:
    build("address,undefined", tmp_path, ROOT / "native")
    for program in PROGRAMS:
        done = run(str(tmp_path / program))
        assert done.returncode == 0, done.stdout + done.stderr


def test_no_two_ranks_race_and_if_they_did_it_would_be_seen(tmp_path: Path) -> None:
    """First as it is; then without the order that a meeting gives: there the sanitizer has to speak."""
    source, built = tmp_path / "native", tmp_path / "build"
    shutil.copytree(ROOT / "native", source)
    build("thread", built, source)
    for program in PROGRAMS:
        done = run(str(built / program))
        assert done.returncode == 0, done.stdout + done.stderr

    group, ordered = source / "group.cpp", "member.phase.load(std::memory_order_acquire) - phase"
    text = group.read_text(encoding="utf-8")
    assert text.count(ordered) == 1
    group.write_text(text.replace(ordered, ordered.replace("acquire", "relaxed")), encoding="utf-8")
    build("thread", built, source)
    done = run(str(built / "collectives"))
    assert done.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in done.stderr


def build(sanitizer: str, into: Path, source: Path) -> None:
    """Build the programs with a sanitizer."""
    scripts = Path(sysconfig.get_path("scripts"))
    missing = {"v3", "v4"} - set(KERNELS[sanitizer])
    configure = [
        *(str(scripts / "cmake"), "-S", str(source), "-B", str(into), "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", f"-DPOLYTEMPO_SANITIZE={sanitizer}", "-DPOLYTEMPO_WERROR=ON"),
        *(f"-DCOMPILER_KNOWS_{isa}=OFF" for isa in missing),
    ]
    for command in (configure, [str(scripts / "cmake"), "--build", str(into)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program; once more at fixed addresses where the kernel scatters them too far for the thread sanitizer."""
    plain = {name: value for name, value in os.environ.items() if not name.endswith("SAN_OPTIONS")}
    done = subprocess.run(
        command, env=plain | {"TSAN_OPTIONS": "halt_on_error=1"}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if "FATAL: ThreadSanitizer: unexpected memory mapping" in done.stderr and command[0] != "setarch":
        return run("setarch", os.uname().machine, "-R", *command)
    return done
