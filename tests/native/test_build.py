"""The native core in a wheel, a wheel without it, and refusals of the library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from polytempo.native import library

ROOT = Path(__file__).parents[2]
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", ".gitignore")
LIBRARY = "polytempo/native/libpolytempo.so"
TIMEOUT_S = 250

ASK = """
import json, polytempo
from polytempo.native.library import available, instruction_set, why_not
print(json.dumps([polytempo.__file__, available(), why_not(), instruction_set()]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files for a wheel, with a library of another build."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in NEEDED:
        shutil.copy(ROOT / name, copy)
    for folder in ("src", "native"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (copy / "src" / LIBRARY).write_text("left behind by another build", encoding="ascii")
    return copy


def best_instruction_set() -> str:
    """The best instruction set, by the processor's own words."""
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    if not {"avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"} <= flags:
        return "baseline"
    return "v4" if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags else "v3"


def run(*command: str, **environment: str) -> str:
    """The standard output of this Python with these arguments, offline."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("POLYTEMPO_")}
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        env=inherited | offline | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(checkout: Path, into: Path, **environment: str) -> Path:
    """The wheel of a checkout."""
    run("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(into), str(checkout), **environment)
    (wheel,) = into.iterdir()
    return wheel


def asked(wheel: Path, into: Path) -> tuple[bool, str | None, str | None]:
    """The installed wheel's native core: its presence or the reason for its absence, and its instruction set."""
    run("-m", "pip", "install", "--no-deps", "--target", str(into), str(wheel))
    file, available, why_not, instruction_set = json.loads(run("-c", ASK, PYTHONPATH=str(into)))
    assert Path(file).is_relative_to(into)
    return available, why_not, instruction_set


@pytest.mark.process
def test_a_wheel_brings_the_library_for_every_python_of_a_platform(checkout: Path, tmp_path: Path) -> None:
    wheel = built(checkout, tmp_path / "wheel")
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")
    assert LIBRARY in ZipFile(wheel).namelist()
    available, why_not, instruction_set = asked(wheel, tmp_path / "installed")
    assert (available, why_not) == (True, None)
    assert instruction_set == best_instruction_set()


@pytest.mark.process
@pytest.mark.parametrize("compiler", ["/bin/false", "/there/is/no/compiler"])
def test_without_a_compiler_the_wheel_is_pure_python_and_works(checkout: Path, tmp_path: Path, compiler: str) -> None:
    wheel = built(checkout, tmp_path / "wheel", CXX=compiler)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in ZipFile(wheel).namelist()
    available, why_not, instruction_set = asked(wheel, tmp_path / "installed")
    assert (available, instruction_set) == (False, None)
    assert why_not is not None
    assert why_not.startswith("there is no libpolytempo.so in ")
    assert why_not.endswith("with a C++ compiler, `make install` in a checkout or `pip install .` builds it")


def test_the_environment_can_turn_it_off() -> None:
    said = json.loads(run("-c", ASK, POLYTEMPO_NATIVE="0"))
    assert said[1:] == [False, "POLYTEMPO_NATIVE=0 in the environment; unset it to have the native core", None]


def test_a_checkout_has_it() -> None:
    assert library.why_not() is None
    assert library.available()


def test_other_systems_have_none(tmp_path: Path) -> None:
    assert library.open_library(tmp_path, "darwin") == (None, "the native core is for Linux, and this is darwin")


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "libpolytempo.so"
    file.write_text("not a library", encoding="ascii")
    none, why_not = library.open_library(file, "linux")
    assert none is None
    assert why_not is not None
    assert f"{file} cannot be used: " in why_not


def test_the_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file, ours = Path(library.__file__).with_name("libpolytempo.so"), library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", ours + 1)
    none, why_not = library.open_library(file, "linux")
    assert none is None
    assert why_not is not None
    assert why_not.startswith(f"{file} has interface {ours}, and this package needs {ours + 1}; ")


def test_a_library_that_lacks_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library._SIGNATURES, "pt_there_is_no_such_function", (None,))
    file = Path(library.__file__).with_name("libpolytempo.so")
    none, why_not = library.open_library(file, "linux")
    assert none is None
    assert why_not is not None
    assert "pt_there_is_no_such_function" in why_not
