"""Planted bugs: how many of them each budget's tests find. `make mutations TIER=test` runs them, in a copy of the tree.

A row changes one place of a file. The tests that the file reaches run, the nearest first, until one of them fails, or
none is left, or the time is over. The tiers `check` and `test` have the tests of `make check` and `make test`.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

import reached

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would load this tree's library, not the copy's
import torch  # noqa: F401 - before the forks: seconds of each

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {".git", "build", "dist", "runs"}
"""Entries of the root that a copy does without."""
AT_FIRST = 1
"""Test files of the first process; the next has twice as many. To import all takes longer than to run the nearest."""

MOST_TESTS = {"check": reached.MOST, "test": 10**6, "all": 10**6}


class Mutation(NamedTuple):
    """A place of a file under src/polytempo, its replacement, and the property that breaks."""

    path: str
    """A folder or a file; in a folder the text may move from file to file."""
    old: str
    new: str
    breaks: str


MUTATIONS = [
    Mutation("core", "rank = rank * length + coordinate", "rank = rank + length * coordinate", "ranks of a mesh"),
    Mutation("synchronization", "self._own_turns.has(step):", "self._own_turns.has(step + 1):", "rounds a step early"),
    Mutation("synchronization", "due.copy()", "due", "two owners of one tensor"),
    Mutation("aggregation", "rounds + 2 * (extra > 0)", "rounds + (extra > 0)", "the price of odd ranks"),
    Mutation("aggregation", "for buffer in buffers[1:]:", "for buffer in buffers[2:]:", "a rank's vote"),
    Mutation("aggregation", "1 - momentum)", "momentum)", "a moving average's weights"),
    Mutation("aggregation", "float(weights[port.rank]) - 1", "float(weights[port.rank])", "de-biasing"),
    Mutation("compression", "& 0x7FFFFFFF) + drawn", "& 0x7FFFFFFF) + drawn // 2", "its mean"),
    Mutation("compression/codecs/top_k.py", "math.ceil(self.ratio", "math.floor(self.ratio", "entries sent"),
    Mutation("compression", "self._scale(like) - 1", "self._scale(like)", "its variance's law"),
    Mutation("collectives", "(rank - k - 1) % num_ranks", "(rank - k) % num_ranks", "chunks of a ring"),
    Mutation("collectives", "port.rank + distance < port.size", "port.rank + distance < port.size - 1", "a leaf"),
    Mutation("collectives", "2 * latency_s + 2 * through_root", "latency_s + 2 * through_root", "a star's price"),
    Mutation("server", "max(1, learners // n)", "max(1, learners // n + 1)", "pushes per update"),
    Mutation("server", "Mix(arrival.worker, alpha)", "Mix(arrival.worker, alpha / 2)", "elastic force"),
    Mutation("server", "len(situation.members) - backups", "len(situation.members)", "backup workers"),
    Mutation("flexrr", "return round(1 / self.grain)", "return round(2 / self.grain)", "slices of a batch"),
    Mutation("cluster", "_BITS_PER_S[found[2]] / 8", "_BITS_PER_S[found[2]]", "bits for bytes"),
    Mutation("cluster", "place[kernel] + 3]", "place[kernel] + 3].flip(0)", "fitted constants"),
    Mutation("data", "count -= middle - start", "count -= stop - start", "samples taken of spans"),
    Mutation("data", "epochs * self.num_samples + (", "epochs * self.num_samples - (", "samples counted"),
    Mutation("data", "return self.once == self.num_samples", "return True", "the account of samples"),
    Mutation("partition", "min(stages - 1 - stage, micro_batches)", "0", "micro-batches in flight"),
    Mutation("large_batch", "1 - beta2**t for t in steps", "1 - beta1**t for t in steps", "bias correction"),
    Mutation("planner", "self.e_min / self.s_min if", "self.s_min / self.e_min if", "the noise scale"),
    Mutation("worlds", "max(now_s, self._out_s[out])", "now_s", "messages that share a link"),
    Mutation("wire", "if end <= self._arenas", "if end >= self._arenas", "tensors in shared memory"),
    Mutation("spec", "not 0 < goal <= 1:", "not 0 < goal:", "a mistake of an option"),
    Mutation("server", "version, check)", "version + 1, check)", "versions in a server's record"),
    Mutation("training", "1 <= version <= VERSION", "1 <= version", "files of the future"),
    Mutation("training", "if i in used else None", "", "gradients of unused parameters"),
    Mutation("chaos", "and not self.finished:", "and self.finished:", "restarts of dead workers"),
    Mutation("engines", "else code, killed_by, lines)", "else code, None, lines)", "the signal of a death"),
    Mutation("runs", "self._broken >= self.generation", "self._broken > self.generation", "ends"),
    Mutation("horovod", "if sum(hosts.values()) < size:", "if False:", "ranks without a slot"),
    Mutation("horovod", "mean - best - _XI", "best - mean - _XI", "tuning"),
    Mutation("cli", "return link_s / count", "return link_s", "messages of micro-batches"),
    Mutation("report", 'if most >= 1e6 else ("kB", 1e3)', 'if most else ("kB", 1e3)', "units"),
    Mutation("interop", "first = self._queue[0]", "first = self._queue[-1]", "the order of calls"),
    Mutation("replay", "self.facts.generation * LIVES + 1", "self.facts.generation * LIVES", "lives replayed"),
]


class Found(NamedTuple):
    """A test that failed, or "", and the seconds until then."""

    test: str
    seconds: float


def left_out(folder: str, names: list[str]) -> set[str]:
    """Entries of a folder that are not copied."""
    of_root = [name for name in names if name in LEFT_OUT or name.startswith(".venv")]
    return {"__pycache__", *(of_root if folder == str(ROOT) else [])}


def places(mutation: Mutation) -> list[str]:
    """Files with the text, each as often as it has it. There has to be one."""
    start = ROOT / "src/polytempo" / mutation.path
    files = [start] if start.is_file() else sorted(start.rglob("*.py"))
    return [str(file.relative_to(ROOT)) for file in files for _ in range(file.read_text().count(mutation.old))]


def tests_of(mutation: Mutation, tier: str, later: set[str]) -> list[str]:
    """Files of the tests that a tier has for it, the nearest first."""
    files = reached.reached(places(mutation))
    return [path for path in files if tier == "all" or path not in later][: MOST_TESTS[tier]]


def found(mutation: Mutation, tier: str, files: list[str], copy: Path, limit_s: float) -> Found:
    """Run the tests on the changed copy, which is as before in the end."""
    begin_s = time.monotonic()
    path = copy / places(mutation)[0]
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        failed, first, number = "", 0, AT_FIRST
        while not failed and first < len(files) and (left_s := begin_s + limit_s - time.monotonic()) > 0:
            failed = _failed(files[first : first + number], tier, copy, left_s)
            first, number = first + number, 2 * number
        return Found(failed, time.monotonic() - begin_s)
    finally:
        path.write_text(text, encoding="utf-8")


def _failed(files: list[str], tier: str, copy: Path, limit_s: float) -> str:
    """The first test that fails, in a fork of this process; "" if none does in this time."""
    log = copy / "mutation.log"
    child = os.fork()
    if child == 0:
        _be_pytest(files, tier, copy, log)
    process = os.pidfd_open(child)
    in_time = bool(select.select([process], [], [], limit_s)[0])
    os.close(process)
    if not in_time:
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (1, 2, 3):
        return ""
    name = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(encoding="utf-8"), re.MULTILINE)
    return name[1] if name else f"pytest ended with {code}"


def _be_pytest(files: list[str], tier: str, copy: Path, log: Path) -> None:
    """Does not return."""
    os.setsid()
    os.chdir(copy)
    sys.path[:] = [str(copy / "src"), *(each for each in sys.path if each != str(ROOT / "tests"))]
    del sys.modules["reached"]
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    import_module("polytempo.interop.autoload").register()
    os.environ.setdefault("POLYTEMPO_DATA", str(ROOT.parent / "shared" / "data"))  # the copy stands elsewhere
    os.environ.update(BUDGET=tier, PYTHONPATH=str(copy / "src"), OMP_NUM_THREADS="1")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files])
        sys.stdout.flush()
        os._exit(code)
    finally:
        os._exit(3)


def main() -> None:
    """Print a line for each mutation, and how many were found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=sorted(MOST_TESTS), default="test")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one mutation")
    parser.add_argument("--only", default="", help="paths that contain this")
    parser.add_argument("--later", nargs="*", default=[], help="test files that only the tier `all` has")
    given = parser.parse_args()
    rows = [each for each in MUTATIONS if given.only in each.path]
    stale = [each for each in rows if len(places(each)) != 1]
    if stale:
        sys.exit("no longer once in their folders: " + "; ".join(f"{each.path}: {each.old}" for each in stale))
    number = 0
    with TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder, "tree"), ignore=left_out))
        for each in rows:
            files = tests_of(each, given.tier, set(given.later))
            test, seconds = found(each, given.tier, files, copy, given.limit_s)
            number += bool(test)
            print(
                f"{test or 'not found':100} {seconds:5.0f} s of {len(files)} files: {each.path}, {each.breaks}",
                flush=True,
            )
    print(f"{given.tier}: {number} of {len(rows)} found")


if __name__ == "__main__":
    main()
