"""The pretend accelerator, as a module: `register()` gives torch the device "pretend" and the process group "pccl".

Cards: `$PRETEND_DEVICES` (2). `$PRETEND_LATE`: non-blocking copies land as late as a stream may make them.
`$PRETEND_STRICT`: messages outside of a batch are refused. `device.build` compiles it, and writes torch's entry point
for a folder of `$PYTHONPATH`, so that processes which are started have the device as soon as torch is imported.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

NAME = "pretend"


def register() -> None:
    """Give torch the device, once in a process. `$PRETEND_BUILD` is the folder with the compiled module."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    _load(Path(os.environ["PRETEND_BUILD"]) / "pretend_device.so")
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("pccl", _group, extended_api=True, devices=[NAME])


def _load(path: Path) -> None:
    """Load the compiled module, and let `Device` call it."""
    loader = importlib.machinery.ExtensionFileLoader("pretend_device", str(path))
    spec = importlib.util.spec_from_loader("pretend_device", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    Device.compiled = module


def _group(options: Any, _: Any = None) -> Any:
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return Device.compiled.pccl(gloo, bool(os.environ.get("PRETEND_STRICT")))


def _card(device: Any = None) -> int:
    if isinstance(device, int):
        number: int | None = device if device >= 0 else None
    else:
        number = None if device is None else torch.device(device).index
    return Device.compiled.current_device() if number is None else number


class _Chosen:
    """Inside, this card is the current one."""

    def __init__(self, device: Any) -> None:
        self.card = _card(device)

    def __enter__(self) -> None:
        self.before = Device.compiled.current_device()
        Device.compiled.set_device(self.card)

    def __exit__(self, *_: object) -> None:
        Device.compiled.set_device(self.before)


class Device:
    """`torch.pretend`: the functions that `torch.cuda` has, too."""

    compiled: Any = ModuleType("pretend_device")
    device = _Chosen
    Stream, Event = torch.Stream, torch.Event

    @classmethod
    def is_available(cls) -> bool:
        return cls.device_count() > 0

    @classmethod
    def hide(cls, yes: bool) -> None:
        """True: this process sees no card from now on, as if it had none."""
        cls.compiled.hide(yes)

    @classmethod
    def is_initialized(cls) -> bool:
        return cls.compiled.is_touched()

    @staticmethod
    def init() -> None:
        """Nothing: the first allocation does it."""

    _lazy_init = init

    @classmethod
    def _is_in_bad_fork(cls) -> bool:
        return cls.compiled.is_forked()

    @classmethod
    def device_count(cls) -> int:
        return cls.compiled.device_count()

    @classmethod
    def current_device(cls) -> int:
        return cls.compiled.current_device()

    @classmethod
    def set_device(cls, device: Any) -> None:
        cls.compiled.set_device(_card(device))

    @classmethod
    def synchronize(cls, device: Any = None) -> None:
        cls.compiled.synchronize()

    @staticmethod
    def stream(stream: torch.Stream) -> torch.Stream:
        return stream  # it is its own context

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def manual_seed(cls, seed: int) -> None:
        cls.compiled.default_generator(-1).manual_seed(seed)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        for card in range(cls.device_count()):
            cls.compiled.default_generator(card).manual_seed(seed)

    @classmethod
    def get_rng_state(cls, device: Any = None) -> torch.Tensor:
        return cls.compiled.default_generator(_card(device)).get_state()

    @classmethod
    def set_rng_state(cls, state: torch.Tensor, device: Any = None) -> None:
        cls.compiled.default_generator(_card(device)).set_state(state)

    @classmethod
    def memory_allocated(cls, device: Any = None) -> int:
        return cls.compiled.memory_allocated(_card(device))

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        return cls.compiled.max_memory_allocated(_card(device))

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        cls.compiled.reset_peak(_card(device))

    @staticmethod
    def empty_cache() -> None:
        """Nothing is cached."""
