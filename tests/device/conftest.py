"""The device of these tests: `--device pretend`, which is compiled here once, or a real one's name: `--device cuda`.

This process gives torch the device and never uses it: ranks are forked from it, and a fork of a process that has used
a device cannot. Nor can a fork of a process that has computed gradients, so these tests come before others that are
run in the same process, and others see no device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from device.build import built, compiler, give

LOADED = ("torch._dynamo", "polytempo.training.trainer")
"""Slow to load: once here instead of once in every worker (optimizers load the first when they are made)."""
LIMIT_S = 600
"""A test may take as long: it ends with a deadlock, and not because the machine is busy."""
FOLDER = Path(__file__).parent
WITHOUT_COMPILER = "no C++ compiler here, so the pretend device is not built (with CI=1 these tests would fail)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="pretend", help="the device of tests/device: pretend, cuda, …")


def pytest_configure(config: pytest.Config) -> None:
    if is_pretend(config):
        with given():
            importlib.import_module("pretend").register()
            torch.get_device_module("pretend").hide(True)
    for name in LOADED:
        importlib.import_module(name)


def is_pretend(config: pytest.Config) -> bool:
    return config.getoption("--device") == "pretend" and can_build()


def can_build() -> bool:
    return compiler() is not None or "CI" in os.environ


@contextmanager
def given() -> Iterator[None]:
    """Let torch find the pretend device, by the environment and the path of modules."""
    with pytest.MonkeyPatch.context() as patch:
        folder, environment = built(), dict(os.environ)
        give(environment, folder, cards=int(environment.get("PRETEND_DEVICES", "2")))
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.syspath_prepend(folder)
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(FOLDER)]
    for item in here:
        item.add_marker(pytest.mark.timeout(LIMIT_S))
        if config.getoption("--device") == "pretend" and not can_build():
            item.add_marker(pytest.mark.skip(reason=WITHOUT_COMPILER))
    items.sort(key=lambda item: item.path.is_relative_to(FOLDER), reverse=True)


@pytest.fixture(scope="module", autouse=True)
def _shown(request: pytest.FixtureRequest) -> Iterator[None]:
    """This process and the processes that it starts see the device during tests of this folder alone."""
    if not is_pretend(request.config):
        yield
        return
    with given():
        torch.get_device_module("pretend").hide(False)
        yield
        torch.get_device_module("pretend").hide(True)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device's type."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def _never_used_here(device: str) -> Iterator[None]:
    yield
    assert not torch.get_device_module(device).is_initialized(), "the test has used the device in the process of pytest"
