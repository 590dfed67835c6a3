"""Devices: everything that the library knows of memory other than the host's.

An *accelerator* is torch's (`torch.accelerator`): CUDA, XPU, MPS, or a backend that a program has registered under
a name of its own. A process has at most one kind, and may see several devices of it. Functions that act on "the
accelerator" do nothing where there is none, and leave one alone that this process has not begun to use: looking at it
takes memory there. `torch.accelerator` alone is asked, so a kind that torch learns needs no line here.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""torch then looks for devices without beginning to use them: a launcher looks, and forks its workers afterwards."""
HOST = torch.device("cpu")
_ONE_GENERATOR = frozenset({"mps"})
"""Kinds with one device, and with functions in torch that take no number of it."""
_AUTOGRAD_THREAD = re.compile(r"pt_autograd_\d+\s*")


# ---------------------------------------------------------------------- which devices there are


def is_host(tensor: Tensor) -> bool:
    """True if the native core can read the tensor: it is in the host's memory."""
    return tensor.is_cpu


def on_accelerator(tensor: Tensor) -> bool:
    """True if the tensor has memory, and not the host's."""
    return not (tensor.is_cpu or tensor.is_meta)


def accelerator_kind() -> str | None:
    """The kind of the accelerator that this process can use: "cuda", "xpu", "mps", …; None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def num_devices() -> int:
    """The number of devices of the accelerator that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def accelerator_in_use() -> bool:
    """True if this process has begun to use the accelerator."""
    return _used() is not None


def gradients_after_fork() -> bool:
    """False if processes that are forked from this one can compute no gradients, on the host neither.

    Where a process sees an accelerator, its first backward pass starts autograd's threads for devices, also for
    tensors of the host, and autograd ends each backward pass of a later fork in an error. Torch names the threads; no
    function of it tells. Always True without `/proc` (macOS).
    """
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended
            if _AUTOGRAD_THREAD.fullmatch(path.read_text()):
                return False
    return True


def current_device() -> torch.device | None:
    """The device that `torch.empty(…, device=accelerator_kind())` takes; None where none is in use."""
    return None if (used := _used()) is None else torch.device(used[0], torch.accelerator.current_device_index())


def use_device(number: int) -> None:
    """Make the visible device of this number the current one of this thread."""
    torch.accelerator.set_device_index(number)


def device_number(device: str, local: int) -> int:
    """The number of the visible device for an option `device`: its own number, else round robin by `local`.

    Errors: ValueError for a device that this process does not see.
    """
    found, count = accelerator_kind(), num_devices()
    kind, _, number = device.partition(":")
    if found is None or kind not in ("auto", found):
        has = "no accelerator" if found is None else f"{count} of {found}"
        raise ValueError(f"device={device} is not here: torch sees {has}; give device=auto or cpu")
    if number and int(number) >= count:
        raise ValueError(f"device={device} is not here: there are {count}, numbered from 0; give one of these")
    return int(number) if number else local % count


def device_name(device: torch.device) -> str:
    """The device's own name, such as "NVIDIA H100"; its kind where torch has none. Begins to use the device."""
    found = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return str(found(device)) if found is not None else device.type


def out_of_memory(error: BaseException) -> bool:
    """True if an allocation on a device has failed: the error, or the error behind it."""
    return any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__cause__))


def total_memory(device: torch.device) -> int:
    """Bytes of the device's memory; 0 where torch does not say. Begins to use the device."""
    try:
        return int(torch.accelerator.get_memory_info(device)[1])
    except (AttributeError, NotImplementedError, RuntimeError):
        return 0


def visible_devices() -> list[str]:
    """Names of the devices that this process may use, equal for two processes of a host where the device is the same.

    The current one alone, once the accelerator is in use. No device is touched.
    """
    if (found := accelerator_kind()) is None:
        return []
    listed = os.environ.get(f"{found.upper()}_VISIBLE_DEVICES", "").split(",")
    numbers = [listed[n].strip() if any(listed) and n < len(listed) else str(n) for n in range(num_devices())]
    if accelerator_in_use():
        numbers = [numbers[torch.accelerator.current_device_index()]]
    return [f"{found}:{number}" for number in numbers]


def one_device_for_each(hosts: Sequence[str], devices: Sequence[Sequence[str]]) -> bool:
    """True if every rank may have a device of its own: each host shows as many as it has ranks.

    `hosts[r]`: rank r's host; `devices[r]`: the names of the devices that it may use, the current one where it has
    begun to use it.
    """
    for host in set(hosts):
        here = [set(shown) for shown, of in zip(devices, hosts, strict=True) if of == host]
        if not all(here) or len(set().union(*here)) < len(here):
            return False
    return True


def _used() -> tuple[str, Any] | None:
    """The accelerator's kind and torch's module for it, if this process has begun to use it."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    module = torch.get_device_module(found.type)
    begun = getattr(module, "is_initialized", None) or module.is_available
    forked = getattr(module, "_is_in_bad_fork", None)
    return (found.type, module) if begun() and not (forked and forked()) else None


# ---------------------------------------------------------------------- groups of processes


def backend_name(device_kind: str | None) -> str | None:
    """The name of torch's backend between devices of a kind, also where this torch was built without it."""
    name = dist.Backend.default_device_backend_map.get(device_kind or "")
    return None if device_kind == HOST.type or name == "gloo" else name


def backend_of(device_kind: str | None) -> str | None:
    """torch.distributed's backend between devices of a kind: "nccl" for CUDA. None where this torch has none.

    gloo is none: it takes bytes through the host, which `interop.backend.staged` does as well.
    """
    if (name := backend_name(device_kind)) is None:
        return None
    built_in: dict[str, Any] = {"nccl": dist.is_nccl_available, "xccl": getattr(dist, "is_xccl_available", None)}
    there = built_in.get(name, lambda: True)
    return name if there is not None and there() else None


def with_backend(host_backend: str) -> str:
    """The argument of `init_process_group` for `host_backend` on the host, and the accelerator's own on it."""
    found = accelerator_kind()
    backend = backend_of(found)
    return host_backend if backend is None else f"{HOST.type}:{host_backend},{found}:{backend}"


def device_group(device_kind: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """`backend_of(device_kind)` over these ranks, one for each device, made by all of them. ValueError without one."""
    name = backend_of(device_kind)
    if name is None:
        raise ValueError(f"this torch has no process group between devices of the kind {device_kind}")
    place = PrefixStore(device_kind, store)
    if (plugin := dist.Backend._plugins.get(name.upper())) is None:
        built_in = getattr(dist, f"ProcessGroup{name.upper()}")
        options = built_in.Options()
        options._timeout = timeout
        return built_in(place, rank, size, options)
    if not plugin.extended_api:
        return plugin.creator_fn(place, rank, size, timeout)
    given = _DistributedBackendOptions()
    given.store, given.group_rank, given.group_size, given.timeout = place, rank, size, timeout
    return plugin.creator_fn(given, None)


def nccl_version() -> tuple[int, int, int]:
    """NCCL's in this torch, (0, 0, 0) without it."""
    if not dist.is_nccl_available():
        return 0, 0, 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major), int(minor), int(patch)


# ---------------------------------------------------------------------- streams and events


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that takes this thread's work for the device."""
    return torch.accelerator.current_stream(device)


@cache
def side_stream(device: torch.device) -> torch.Stream:
    """A stream for copies, beside the computing stream: one for each device."""
    return torch.Stream(device=device)


def marked(device: torch.device) -> torch.Event:
    """An event behind all work that this thread has given the device."""
    return current_stream(device).record_event()


def time_mark() -> torch.Event | None:
    """An event behind all work that this thread has given its device, with a time; None where none is in use."""
    if (device := current_device()) is None:
        return None
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


class StreamPauses:
    """Seconds that a device's stream stands still while its program waits for other ranks.

        program   launches ──▶ a ── waits ─── b ── launches ──▶     the host's wait: a to b
        stream    ──────── computes ────── A ─── B ── computes      the device's: A to B

    A and B are events that the program puts into the stream at a and b. Where the host waits, its device may still
    compute; where the stream alone waits, as for NCCL, the host goes on. So a rank waits from A to B in both cases.
    A pause counts once the device has passed it: later than the program, by as many seconds at each reading.
    """

    def __init__(self) -> None:
        self._pauses: deque[tuple[torch.Event, torch.Event]] = deque()

    def add(self, begin: torch.Event, end: torch.Event) -> float:
        """Note a pause, and get the seconds of all pauses that the device has passed since the last call."""
        self._pauses.append((begin, end))
        seconds = 0.0
        while self._pauses and self._pauses[0][1].query():
            begin, end = self._pauses.popleft()
            seconds += begin.elapsed_time(end) / 1000
        return seconds


# ---------------------------------------------------------------------- random numbers

RandomStates = tuple[Tensor, ...]
"""The states of the host's generator and, if it is in use, of each visible device's."""


def seed_generators(number: int, *, unused_too: bool = False) -> None:
    """Seed torch's generators, the host's and the accelerator's.

    Costs 1 µs where no accelerator is in use. `unused_too`: also an accelerator that this process will use later; torch
    keeps the seed for it, in 1 ms.
    """
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` takes 1 ms to note that it was called
    if (used := _used()) is not None:
        (getattr(used[1], "manual_seed_all", None) or used[1].manual_seed)(number)
    elif unused_too and accelerator_kind() is not None:
        torch.manual_seed(number)


def random_states() -> RandomStates:
    """The states of torch's generators: the host's first."""
    return (torch.get_rng_state(), *(module.get_rng_state(*which) for module, which in _generators()))


def own_random_state() -> Tensor:
    """The states of the generators that this thread draws from, the host's and the current device's, in one tensor."""
    states, device = random_states(), current_device()
    return states[0] if device is None else torch.cat([states[0], states[1:][device.index or 0]])


def set_random_states(states: RandomStates) -> None:
    """Go on from `states`. A device that was not in use when they were taken stays as it is."""
    torch.set_rng_state(states[0])
    for (module, which), state in zip(_generators(), states[1:], strict=False):
        module.set_rng_state(state, *which)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """torch's generators are at the end of the block as they were at its begin."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def _generators() -> list[tuple[Any, tuple[int, ...]]]:
    """torch's module of the accelerator in use, and the arguments that choose a device's generator."""
    if (used := _used()) is None:
        return []
    name, module = used
    return [(module, () if name in _ONE_GENERATOR else (number,)) for number in range(num_devices())]


# ---------------------------------------------------------------------- modes of a thread


def autocast_enabled() -> dict[str, bool]:
    """Kind of device -> whether this thread casts there: on the host, and on the accelerator in use."""
    kinds = (HOST.type,) if (used := _used()) is None else (HOST.type, used[0])
    return {each: torch.is_autocast_enabled(each) for each in kinds}


@contextmanager
def first_modes() -> Iterator[None]:
    """Compute gradients, cast nothing, and make tensors on the host, as in a new process.

    The caller may be inside `no_grad()`, `inference_mode()` or `autocast()`, and may have set a default device.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))  # it enables gradients, too
        for kind in [each for each, casts in autocast_enabled().items() if casts]:
            modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != HOST:
            modes.enter_context(HOST)
        yield


class Autocast:
    """The autocast of the thread that makes it, on the host and on the accelerator, for other threads."""

    __slots__ = ("_modes",)

    def __init__(self) -> None:
        kinds = (HOST.type,) if (used := _used()) is None else (HOST.type, used[0])
        self._modes = [(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)) for each in kinds]

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set it here."""
        with ExitStack() as modes:
            for each, dtype, enabled in self._modes:
                modes.enter_context(torch.autocast(each, dtype=dtype, enabled=enabled))
            yield


# ---------------------------------------------------------------------- memory


class Memory(NamedTuple):
    """Bytes of tensors on a device."""

    allocated: int
    peak: int


def device_memory(device: torch.device) -> Memory:
    """Now, and the most since `forget_peak`. Zeros for the host, and where torch does not count them."""
    if device.type == HOST.type or device.type in _ONE_GENERATOR:
        return Memory(0, 0)
    return Memory(torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device))


def forget_peak(device: torch.device) -> None:
    """Count the peak from here."""
    if device.type != HOST.type and device.type not in _ONE_GENERATOR:
        torch.accelerator.reset_peak_memory_stats(device)


def pinned_like(tensor: Tensor) -> Tensor:
    """Host memory for a contiguous copy of a device's tensor, which the device reads and writes without the host."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type not in _ONE_GENERATOR)


class HostCopy:
    """Device tensors on their way to the host, on a stream beside the computing one.

    `tensors` are the copies, contiguous and in pinned memory. Only after `wait` may the host read them. The device
    copies the originals once the work that computes them is over; they may change only after `wait`, or immediately
    where `overwritten` is True: then later work on the device waits for the copy.
    """

    def __init__(
        self, given: Sequence[Tensor], device: torch.device | None = None, *, overwritten: bool = False
    ) -> None:
        device = given[0].device if device is None else device
        self.tensors = [pinned_like(tensor) for tensor in given]
        stream, here = side_stream(device), current_stream(device)
        stream.wait_stream(here)
        with stream:
            for copy, tensor in zip(self.tensors, given, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            self._there = stream.record_event()
        if overwritten:
            here.wait_event(self._there)

    def wait(self) -> list[Tensor]:
        """The copies, once they are there."""
        self._there.synchronize()
        return self.tensors


class DeviceCopy:
    """A host tensor on its way to a device, on a stream beside the computing one.

    `tensor` is on the device: work that this thread gives it from now on waits for the copy, the host does not. Keep
    this object until such work is over, as the device may still read pinned memory.
    """

    def __init__(self, given: Tensor, device: torch.device) -> None:
        self._pinned = given if device.type in _ONE_GENERATOR or given.is_pinned() else given.pin_memory()
        stream, here = side_stream(device), current_stream(device)
        with stream:
            self.tensor = self._pinned.to(device, non_blocking=True)
            self._there = stream.record_event()
        here.wait_event(self._there)
        self.tensor.record_stream(here)

    @property
    def done(self) -> bool:
        """True if the device has read the host's memory."""
        return self._there.query()


def copied_back(given: Sequence[Tensor], targets: Sequence[Tensor]) -> torch.Event:
    """Copy host tensors into device tensors beside the computing stream; the event is behind the copies.

    `given` stay as they are until the event is over, and no work that is under way uses `targets`.
    """
    stream = side_stream(targets[0].device)
    with stream:
        for target, source in zip(targets, given, strict=True):
            target.copy_(source, non_blocking=True)
        return stream.record_event()
