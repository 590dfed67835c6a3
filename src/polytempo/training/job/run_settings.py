"""The settings and the environment that a run's stream begins with: plain texts by name."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

import polytempo
from polytempo.core import Strategy
from polytempo.core.system.url_path import without_secrets
from polytempo.device import accelerator_kind
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.table.option import entries
from polytempo.training.model.run_device import may_use_device

MOST_SETTING = 1_000
"""Characters of a value; the end of a longer one is left out, and marked by "…"."""
_ELSEWHERE = {"out", "resume", "trackers"}
"""Options that change no bit of a run: its folder, and the addresses of trackers, which may hold a key."""


def settings_of(spec: RunSpec) -> dict[str, str]:
    """The options of a run that differ from the defaults, as the command line reads them, and its basic numbers.

        settings_of(RunSpec.of(job, sync_sgd(), 2, RunOptions(lr=0.1, until="accuracy=0.9")))
        # {"epochs": "20", "batch_size": "32", "lr": "0.1", "seed": "0", "until": "accuracy=0.9"}

    Learning rate, batch, epochs and seed are always there. Logins of URLs, and queries of http(s), are left out.
    """
    options = spec.options
    own: dict[str, object] = {"epochs": spec.epochs, "lr": spec.lr, "seed": spec.seed}
    own |= {"batch_size": spec.batch_size} if options.global_batch_size is None else {}
    asked = {
        name: getattr(options, name)
        for name, row in entries(RunOptions).items()
        if name not in _ELSEWHERE and getattr(options, name) != row.default
    }
    return {name: _text(value) for name, value in {**own, **asked}.items() if value is not None}


def environment_of(options: RunOptions, strategy: Strategy) -> dict[str, str]:
    """Versions, and the kind of device that the run computes on."""
    device = options.device
    if device == "auto":
        device = (accelerator_kind() if may_use_device(options, strategy) else None) or "cpu"
    return versions() | {"device": device}


def versions() -> dict[str, str]:
    """The versions of polytempo, torch and Python, and the platform."""
    return {
        "polytempo": polytempo.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, Mapping):
        pairs = {key: _text(each) for key, each in value.items()}
        return ",".join(f"{key}{'=' if isinstance(key, str) else ':'}{each}" for key, each in pairs.items())
    text = without_secrets(str(value))
    return text if len(text) <= MOST_SETTING else f"{text[: MOST_SETTING - 1]}…"
