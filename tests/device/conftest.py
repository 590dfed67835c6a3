"""The device of these tests: `--device pretend`, which is compiled here once, or a real one's name: `--device cuda`.

This process gives torch the device and never uses it: ranks are forked from it, and a fork of a process that has used
a device cannot.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from device.build import built, compiler, give

LOADED = ("torch._dynamo", "polytempo.training.trainer")
"""Slow to load: once here instead of once in every worker (optimizers load the first when they are made)."""
LIMIT_S = 600
"""A test may take as long: it ends with a deadlock, and not because the machine is busy."""
WITHOUT_COMPILER = "no C++ compiler here, so the pretend device is not built (with CI=1 these tests would fail)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="pretend", help="the device of tests/device: pretend, cuda, …")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "pretend" and can_build():
        folder = built()
        give(os.environ, folder, cards=int(os.environ.get("PRETEND_DEVICES", "2")))
        sys.path.insert(0, str(folder))
        importlib.import_module("pretend").register()
    for name in LOADED:
        importlib.import_module(name)


def can_build() -> bool:
    return compiler() is not None or "CI" in os.environ


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(LIMIT_S))
        if config.getoption("--device") == "pretend" and not can_build():
            item.add_marker(pytest.mark.skip(reason=WITHOUT_COMPILER))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device's type."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def _never_used_here(device: str) -> Iterator[None]:
    yield
    assert not torch.get_device_module(device).is_initialized(), "the test has used the device in the process of pytest"
