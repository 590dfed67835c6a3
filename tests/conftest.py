"""Set-up of all tests: one thread for torch, Ctrl-C, one profile for hypothesis, the budget, and the real data sets.

Garbage is collected from the first test on, without a look at earlier objects: modules and thousands of tests
are most of the memory's objects, and each full collection would look at them all.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from some_cases import BUDGET, NAME, SEED, Values, chosen, examples, has_turn

settings.register_profile("polytempo", deadline=None, print_blob=True, max_examples=examples(100))
settings.load_profile("polytempo")
torch.set_num_threads(1)
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell begins a background command, and all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


TABLES = BUDGET._replace(few=4 * BUDGET.few)
"""The budget of tests/unit: most of its cases are the rows of literal tables."""

SECONDS = {"process": 1.0, "agreement": 1.0, "commands": 1.0, "laws": 0.12}
"""Estimated time of a case, by folder. All others take 0.04 s."""

CHECK_S = 100.0
"""Seconds of cases that `make check` starts, on two cores."""


HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ZE_AFFINITY_MASK": "none"}
"""Variables that hide a machine's accelerators."""


class FailuresAtOnce:
    """Prints failures when they happen, so that a long run that is ended early has told them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called once for each phase of a test."""
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed in its {report.when}:\n{report.longreprtext[-3000:]}")


def pytest_configure(config: pytest.Config) -> None:
    """Hide accelerators, because laws are about the CPU's bits; tests/device gets one by `--device`.

    And let a warning of torch 2.11 pass, which it gives even where a sparse tensor is made with `check_invariants`.
    """
    if config.getoption("--device", "pretend") == "pretend":
        os.environ.update(HIDDEN)
    if NAME in {"all", "ci"} and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config), "failures at once")
    if torch.__version__.startswith("2.11."):
        config.addinivalue_line("filterwarnings", "ignore:Sparse invariant checks are implicitly disabled:UserWarning")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium for the tests of a file."""
    from browser_window import chromium  # playwright, which few tests need

    with chromium() as started:
        yield started


def pytest_report_header() -> str | None:
    """The seed, so that another choice of cases can be made."""
    return f"budget: {NAME} (SEED={SEED})" if NAME else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases that the budget does not pay for out. Cases that failed last stay.

    An address in a test's id is an error, because each process of pytest has another one.
    """
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give `ids` to the parameters of {addresses[0]}")
    if BUDGET.of == 1:
        return
    cache = getattr(config, "cache", None)  # not with `-p no:cacheprovider`
    failed = set() if cache is None else set(cache.get("cache/lastfailed", {}))
    kept = [item for item in _within_budget(items) if item.nodeid not in failed]
    if NAME == "check":
        kept = _nearest(kept)
    staying = failed | {item.nodeid for item in kept}
    left_out = [item for item in items if item.nodeid not in staying]
    items[:] = [item for item in items if item.nodeid in staying]
    config.hook.pytest_deselected(items=left_out)


def _within_budget(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items of each test that the budget chooses."""
    files: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        file, _, test = item.nodeid.partition("[")[0].partition("::")
        files[file][test].append(item)
    kept = set()
    for file, tests in files.items():
        if not has_turn(file):
            continue
        cases = {test: [_values(item) for item in those] for test, those in tests.items()}
        numbers = chosen(cases, TABLES if file.startswith("tests/unit/") else BUDGET)
        kept |= {tests[test][number].nodeid for test in tests for number in numbers[test]}
    return [item for item in items if item.nodeid in kept]


def _values(item: pytest.Item) -> Values:
    """Parameters by name. Tests of a file share the objects of their lists, so an object is known by its id."""
    case = getattr(item, "callspec", None)
    values = {} if case is None else case.params
    return {name: value if isinstance(value, (int, float, str)) else id(value) for name, value in values.items()}


def _nearest(items: list[pytest.Item]) -> list[pytest.Item]:
    """The first items that there is time for: `make check` names the files nearest to the change first."""
    kept, seconds = [], 0.0
    for item in items:
        seconds += SECONDS.get(item.nodeid.split("/")[1], 0.04)
        if seconds > CHECK_S:
            break
        kept.append(item)
    return kept


def pytest_collection_finish() -> None:
    """All tests are known."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of data sets: $POLYTEMPO_DATA, or `shared/data` beside the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("POLYTEMPO_DATA", default))
    if not root.is_dir():
        pytest.fail(f"no data sets at {root}; set POLYTEMPO_DATA to the folder that holds mnist, a9a, …")
    return root
