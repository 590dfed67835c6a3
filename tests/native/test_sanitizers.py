"""The programs of `native/tests/`, whose ranks are threads, under the thread and the address and UB sanitizers."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "native" / "tests").glob("*.cpp"))
KERNELS = {"thread": (), "address,undefined": ("v3",)}
"""Instruction sets to build besides the baseline: threads meet outside of the kernels, and v4 is v3's source."""
TIMEOUT_S = 120


def test_there_are_programs() -> None:
    assert PROGRAMS == ["collectives", "endings", "hogwild", "messages", "step"]


@pytest.mark.parametrize("sanitizer", KERNELS)
def test_the_native_core_is_clean(sanitizer: str, tmp_path: Path) -> None:
    build(sanitizer, tmp_path)
    for program in PROGRAMS:
        done = run(str(tmp_path / program))
        print(f"{sanitizer} {program}: {done.stdout}")
        assert done.returncode == 0, done.stderr


def test_the_thread_sanitizer_sees_what_is_no_meeting(tmp_path: Path) -> None:
    """Without the order that a meeting gives, it speaks: so its silence says something."""
    source, tests = tmp_path / "native", tmp_path / "native" / "tests"
    tests.mkdir(parents=True)
    for path in (ROOT / "native").glob("*.*"):
        (source / path.name).write_bytes(path.read_bytes())
    for name in ("crew.h", "collectives.cpp"):
        (tests / name).write_bytes((ROOT / "native" / "tests" / name).read_bytes())
    group = source / "group.cpp"
    ordered = "member.phase.load(std::memory_order_acquire) - phase"
    text = group.read_text(encoding="utf-8")
    assert text.count(ordered) == 1
    group.write_text(text.replace(ordered, ordered.replace("acquire", "relaxed")), encoding="utf-8")
    build("thread", tmp_path / "build", source)
    done = run(str(tmp_path / "build" / "collectives"))
    assert done.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in done.stderr


def build(sanitizer: str, into: Path, source: Path = ROOT / "native") -> None:
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
    quiet = {name: value for name, value in os.environ.items() if not name.endswith("SAN_OPTIONS")}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=TIMEOUT_S)
    if "FATAL: ThreadSanitizer: unexpected memory mapping" in done.stderr and command[0] != "setarch":
        return run("setarch", os.uname().machine, "-R", *command)
    return done
