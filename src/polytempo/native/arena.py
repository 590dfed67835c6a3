"""`Arena`: memory of one process that the other processes of its host can map.

own arena     [ tensor | tensor |  (free)  | staging | … ]     a file without a name, of pages that exist once touched
window        the same pages, mapped by a neighbour

The segment has no name in any file system: it is a `memfd`, or, where the kernel has none, a nameless file in
`/dev/shm`. Neighbours open it through `/proc`, which only lets the same user in. So for every way to kill
processes, the memory is gone with the last process that maps it, and nothing is left in `/dev/shm`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import select
import sys
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.native.address_space import address_space_advice
from polytempo.native.mapping import Mapping

_PAGE_BYTES = mmap.PAGESIZE
_LINE_BYTES = 64
_GIB = 1 << 30
_GIVE_BACK_BYTES = 1 << 20
_SEALS = 1033, 0x0002 | 0x0004  # F_ADD_SEALS: F_SEAL_SHRINK | F_SEAL_GROW, so that no mapping loses its pages


class Block(NamedTuple):
    """A part of an arena."""

    offset: int
    num_bytes: int


class ArenaAddress(NamedTuple):
    """The data for a neighbour to map an arena."""

    pid: int
    descriptor: int
    inode: int
    num_bytes: int


class Arena:
    """This process's own segment. `num_bytes` is address space; memory is used when it is touched.

    Blocks are cut first-fit from a sorted free list; large ones go back to the system when they are freed.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        self._descriptor, self._unlimited = _nameless()
        try:
            self.num_bytes = _reserved(self._descriptor, num_bytes or _physical_bytes())
        except OSError as error:
            os.close(self._descriptor)
            remedy = "; let files be larger (ulimit -f)" if error.errno == errno.EFBIG else ""
            raise OSError(error.errno, f"no shared memory: {os.strerror(error.errno or 0)}{remedy}") from error
        self._mapping = Mapping(self._descriptor, self.num_bytes)
        self._mapping.prefer_large_pages()
        self.base = self._mapping.base
        self._free: list[Block] = [Block(0, self.num_bytes)]
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()  # of `_free` and `used_bytes`
        self._owner = os.getpid()
        self.used_bytes = 0

    @property
    def address(self) -> ArenaAddress:
        """The address for neighbours."""
        return ArenaAddress(self._owner, self._descriptor, os.fstat(self._descriptor).st_ino, self.num_bytes)

    def allocate(self, num_bytes: int) -> Block:
        """A block of zeros, at least `num_bytes` long. Raises MemoryError when the arena or the machine has no more."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"this arena belongs to process {self._owner}, which has forked; use own_arena() here")
        with self._lock:
            self._take_back_all()
            block = self._cut(num_bytes)
        self._settle()  # blocks that were freed meanwhile
        return block

    def _cut(self, num_bytes: int) -> Block:
        unit = _PAGE_BYTES if num_bytes >= _PAGE_BYTES else _LINE_BYTES
        wanted = max(unit, -(-num_bytes // unit) * unit)
        for i, (offset, free_bytes) in enumerate(self._free):
            begin = -(-offset // unit) * unit
            if begin + wanted <= offset + free_bytes:
                self._commit(begin, wanted)
                rest = [Block(offset, begin - offset), Block(begin + wanted, offset + free_bytes - begin - wanted)]
                self._free[i : i + 1] = [block for block in rest if block.num_bytes]
                self.used_bytes += wanted
                return Block(begin, wanted)
        limited = address_space_advice("MemoryError")  # an arena is smaller under such a limit
        raise MemoryError(
            f"shared memory for {num_bytes} bytes: this process's arena has {self.num_bytes} bytes, and "
            f"{self.used_bytes} are in use; {limited or 'free tensors, or use fewer workers on this host'}"
        )

    def free(self, block: Block) -> None:
        """Give a block back. May be called at any time, also by the garbage collector in the midst of `allocate`.

        It never waits: where another thread holds the arena's lock, that thread takes the block back afterwards.
        """
        if os.getpid() == self._owner:  # a forked child has our objects, but the memory is ours
            self._returned.append(block)
            self._settle()

    def _settle(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._take_back_all()
            finally:
                self._lock.release()

    def _take_back_all(self) -> None:
        while self._returned:
            self._take_back(self._returned.popleft())

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros in the arena. Its memory is given back with the last tensor that uses it."""
        shape = (shape,) if isinstance(shape, int) else shape
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        block = self.allocate(count * dtype.itemsize)
        array = self._mapping.array(block.offset, block.num_bytes)
        weakref.finalize(array, self.free, block).atexit = False
        return torch.frombuffer(array, dtype=dtype, count=count).view(shape)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over memory that its caller has allocated and keeps."""
        return _over(self._mapping, offset, shape, dtype)

    def offset_of(self, tensor: Tensor) -> int | None:
        """The offset of a tensor in the arena; None for any other tensor."""
        offset = tensor.data_ptr() - self.base
        return offset if 0 <= offset < self.num_bytes else None

    def _commit(self, offset: int, num_bytes: int) -> None:
        """Fail now, in words, rather than later by a signal, as far as one can tell.

        A memfd's pages are only promised, so this looks at the rest of the machine's and the control groups' (version
        2) memory. Others may take it in the meantime, and limits of version 1 or of a container's parent are not seen.
        """
        try:
            if self._unlimited:
                if num_bytes > 64 << 20 and num_bytes > _available_bytes():
                    raise OSError(errno.ENOSPC, "the machine has no more memory")
            else:
                os.posix_fallocate(self._descriptor, offset, num_bytes)
        except OSError as error:
            raise MemoryError(
                f"shared memory for {num_bytes} bytes: {error.strerror}; {_available_bytes()} bytes of memory are "
                "available. Use fewer workers or a smaller model, or give /dev/shm more room"
            ) from error

    def _take_back(self, block: Block) -> None:
        self.used_bytes -= block.num_bytes
        whole_pages = block.offset % _PAGE_BYTES == 0 and block.num_bytes % _PAGE_BYTES == 0
        if block.num_bytes >= _GIVE_BACK_BYTES and whole_pages:
            given_back = self._mapping.give_back(block.offset, block.num_bytes)
        else:
            given_back = False
        if not given_back:
            ctypes.memset(self.base + block.offset, 0, block.num_bytes)
        insort(self._free, block)
        at = self._free.index(block)
        for left in (at, at - 1):
            if 0 <= left < len(self._free) - 1:
                a, b = self._free[left], self._free[left + 1]
                if a.offset + a.num_bytes == b.offset:
                    self._free[left : left + 2] = [Block(a.offset, a.num_bytes + b.num_bytes)]


class Window:
    """A neighbour's arena, mapped here, and a descriptor that tells when its process has ended (-1: none)."""

    def __init__(self, address: ArenaAddress) -> None:
        self.address = address
        self.num_bytes = address.num_bytes
        # Before the inode is compared: if that is right, this was the right process, and no later one of its number.
        self.pidfd = _pidfd(address.pid)
        if self.pidfd >= 0:
            weakref.finalize(self, os.close, self.pidfd).atexit = False  # threads may still be in the core
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != address.inode:
                raise ProcessLookupError(errno.ESRCH, f"process {address.pid} has ended: another one has its number")
            self._mapping = Mapping(descriptor, address.num_bytes)
        finally:
            os.close(descriptor)
        self._mapping.prefer_large_pages()
        self.base = self._mapping.base

    def process_has_ended(self) -> bool:
        """True if the neighbour has ended, as far as the system tells."""
        return self.pidfd >= 0 and bool(select.select([self.pidfd], [], [], 0)[0])

    def tensor(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, released: Callable[[], None] | None = None
    ) -> Tensor:
        """A tensor over the neighbour's memory; it keeps the mapping alive. `released`: called after its last use."""
        return _over(self._mapping, offset, shape, dtype, released)


def _over(
    mapping: Mapping,
    offset: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    released: Callable[[], None] | None = None,
) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    array = mapping.array(offset, count * dtype.itemsize, released)
    return torch.frombuffer(array, dtype=dtype, count=count).view(shape)


_own: Arena | None = None
_windows: weakref.WeakValueDictionary[ArenaAddress, Window] = weakref.WeakValueDictionary()
_lock = threading.RLock()
"""The lock of these two. The garbage collector may run this code again in the same thread, hence an RLock."""


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_forked)


def own_arena() -> Arena:
    """This process's arena, made when first asked for; a forked child gets one of its own."""
    global _own
    with _lock:
        if _own is None or _own._owner != os.getpid():
            _own = Arena()
            _windows.clear()
        return _own


def shared_empty(shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of zeros in memory that the other workers of this host can read in place.

    Collectives over "polytempo" copy nothing where every rank's tensor is one of these. On a system without shared
    memory it is an ordinary tensor, and everything works all the same.
    """
    return own_arena().empty(shape, dtype) if sys.platform == "linux" else torch.zeros(shape, dtype=dtype)


def window(address: ArenaAddress) -> Window:
    """A window onto the arena at `address`, one for all callers of this process."""
    with _lock:
        found = _windows.get(address)
        if found is None:
            found = _windows[address] = Window(address)
        return found


def _nameless() -> tuple[int, bool]:
    """A file without a name, only for this user, and whether no mount limits it (a memfd)."""
    try:
        descriptor = os.memfd_create("polytempo", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(descriptor, 0o600)
        return descriptor, True
    except (OSError, AttributeError) as error:
        _check_room(error)
    try:
        return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), False  # noqa: S108
    except (OSError, AttributeError) as error:
        _check_room(error)
        raise OSError(
            getattr(error, "errno", None) or errno.ENOSYS,
            "this system has neither memfd_create nor a /dev/shm with nameless files, so workers cannot share memory; "
            "mount a tmpfs at /dev/shm, or set POLYTEMPO_NATIVE=0 to use gloo",
        ) from error


def _check_room(error: OSError | AttributeError) -> None:
    """Raise where the system has the call, but this process or the machine is at its limit."""
    code = getattr(error, "errno", None)
    if code == errno.EMFILE:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            code,
            f"this process has as many files open as it may, {most}, and shared memory takes one for each process of "
            "a run; allow more (ulimit -n 4096), close some, or use fewer workers and restarts",
        ) from error
    if code in (errno.ENFILE, errno.ENOMEM):
        raise OSError(code, f"no shared memory: {os.strerror(code)}; end other programs of this machine") from error


def _reserved(descriptor: int, num_bytes: int) -> int:
    """Make the file as long as asked for, or as long as limits allow; its pages come when they are touched."""
    wanted = -(-num_bytes // _GIB) * _GIB
    while True:
        try:
            os.ftruncate(descriptor, wanted)
            Mapping(descriptor, wanted)  # address space may be limited (ulimit -v)
        except OSError:
            if wanted <= 64 << 20:
                raise
            os.ftruncate(descriptor, 0)
            wanted //= 2
            continue
        with suppress(OSError):  # a file in /dev/shm has no seals
            fcntl.fcntl(descriptor, *_SEALS)
        return wanted


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES


def _available_bytes() -> int:
    """The machine's free memory, or, where that is less, the rest of a limit on this process's control groups."""
    machine = _table(Path("/proc/meminfo")).get("MemAvailable:")
    return min(_physical_bytes() if machine is None else machine << 10, *_left_by_limits())


def _left_by_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """limit - use + droppable file cache of each control group (version 2) with a limit."""
    left = [sys.maxsize]
    with suppress(OSError, ValueError):
        path = next((line[3:].strip("/") for line in own.read_text().splitlines() if line.startswith("0::")), "")
        for folder in [root / path, *(root / path).parents]:
            if not folder.is_relative_to(root):
                break
            with suppress(OSError, ValueError):  # the root has no such files; without a limit the number is "max"
                limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
                cache = _table(folder / "memory.stat")
                left.append(max(0, limit - used + cache.get("inactive_file", 0) + cache.get("active_file", 0)))
    return left


def _table(file: Path) -> dict[str, int]:
    lines = file.read_text(encoding="ascii").splitlines()
    return {name: int(number) for name, number, *_ in map(str.split, lines)}


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1
