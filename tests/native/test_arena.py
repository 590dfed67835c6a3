"""The arena: freed memory is merged and given back, and nothing has a name that could outlive its owner."""

from __future__ import annotations

import errno
import gc
import os
import resource
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from polytempo.native import arena as arenas
from polytempo.native.arena import Arena, Window, own_arena, window
from some_cases import examples

SEED = 20261120
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Arena:
    """An arena of 64 KiB."""
    monkeypatch.setattr(arenas, "_GIB", 64 * KIB)
    return Arena(64 * KIB)


@pytest.fixture(params=["memfd", "/dev/shm"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Arena:
    """An arena of a gigabyte of addresses, of each kind."""
    if request.param == "/dev/shm":
        monkeypatch.setattr(os, "memfd_create", refusing(errno.ENOSYS))
    return Arena(GIB)


def refusing(number: int) -> Any:
    """A function that fails as a system call does."""

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def committed_bytes(arena: Arena) -> int:
    """Memory that the arena's file takes up."""
    return os.fstat(arena.address.descriptor).st_blocks * 512


def filled(arena: Arena, num_bytes: int, value: int = 7) -> Tensor:
    """A tensor of bytes of the arena, all of one value."""
    return arena.empty(num_bytes, torch.uint8).fill_(value)


def test_blocks_of_any_order_merge_again() -> None:
    @seed(SEED)
    @settings(max_examples=examples(60))
    @given(st.lists(st.tuples(st.integers(0, 9 * KIB), st.randoms(use_true_random=False)), max_size=30))
    def law(steps: list[tuple[int, Any]]) -> None:
        arena = Arena(MIB)
        held: list[arenas.Block] = []
        for num_bytes, random in steps:
            block = arena.allocate(num_bytes)
            assert block.num_bytes >= num_bytes
            assert all(
                block.offset + block.num_bytes <= other.offset or other.offset + other.num_bytes <= block.offset
                for other in held
            )
            held.append(block)
            if random.random() < 0.5:
                arena.free(held.pop(random.randrange(len(held))))
        for block in held:
            arena.free(block)
        whole = arena.allocate(arena.num_bytes - 4 * KIB)
        assert arena.used_bytes == whole.num_bytes

    print("seed", SEED)
    law()


def test_memory_goes_back_to_the_system(either: Arena) -> None:
    before = committed_bytes(either)
    tensors = [filled(either, 8 * MIB) for _ in range(3)]
    assert committed_bytes(either) - before >= 24 * MIB
    del tensors
    assert committed_bytes(either) - before < MIB
    assert either.used_bytes == 0


def test_threads_never_get_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "_commit", lambda *_: os.sched_yield())  # another thread's turn, before it is cut
    arena = Arena(64 * MIB)
    with ThreadPoolExecutor(4) as threads:
        blocks = sorted(threads.map(lambda _: arena.allocate(8 * KIB), range(400)))
    assert [block.offset for block in blocks] == [8 * KIB * i for i in range(400)]
    for block in blocks:
        arena.free(block)
    assert arena.used_bytes == 0


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"a/b": (1000, 900, 30, 5), "a": (2000, 1990, 0, 1)}, [135, 11]),
        ({"a/b": ("max", 900, 0, 0), "a": (2000, 2100, 0, 0)}, [0]),
        ({}, []),
    ],
)
def test_limits_of_control_groups_are_seen(
    files: dict[str, tuple[int | str, int, int, int]], left: list[int], tmp_path: Path
) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("1:cpu:/else\n0::/a/b\n")
    for name, (limit, used, inactive, active) in files.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "memory.max").write_text(f"{limit}\n")
        (root / name / "memory.current").write_text(f"{used}\n")
        (root / name / "memory.stat").write_text(f"anon 7\ninactive_file {inactive}\nactive_file {active}\n")
    assert arenas._left_by_limits(root, own) == [sys.maxsize, *left]


@pytest.mark.parametrize("num_bytes", [1, 100, 5 * KIB, 3 * MIB])
def test_what_is_used_again_is_zero(either: Arena, num_bytes: int) -> None:
    address = filled(either, num_bytes).data_ptr()
    again = either.empty(num_bytes, torch.uint8)
    assert again.data_ptr() == address
    assert not again.any()


def test_a_view_keeps_its_tensors_memory(small: Arena) -> None:
    view = filled(small, 32 * KIB)[100:200].view(10, 10)
    gc.collect()
    with pytest.raises(MemoryError):
        small.allocate(48 * KIB)
    assert (view == 7).all()
    del view
    assert small.allocate(48 * KIB).num_bytes == 48 * KIB


@pytest.mark.parametrize(
    ("shape", "dtype"), [(3, torch.float32), ((2, 0, 5), torch.float64), ((), torch.int64), ((3, 5), torch.bfloat16)]
)
def test_tensors_have_any_shape_and_dtype(small: Arena, shape: Any, dtype: torch.dtype) -> None:
    tensor = small.empty(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (torch.empty(shape).shape, dtype)
    assert not tensor.any()


def test_offsets_tell_what_lies_in_it(small: Arena) -> None:
    first, second = small.empty(16), small.empty(2000)
    assert small.offset_of(first) == 0
    assert small.offset_of(second[10:]) == 4 * KIB + 40
    assert small.offset_of(torch.empty(5)) is None


def test_a_full_arena_says_how_full(small: Arena) -> None:
    small.allocate(40 * KIB)
    with pytest.raises(MemoryError, match=r"for 32768 bytes: .* has 65536 bytes, and 40960 are in use; free tensors"):
        small.allocate(32 * KIB)


def test_a_full_arena_under_a_limit_of_address_space_names_the_limit(
    small: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2_500_000_000, resource.RLIM_INFINITY))
    with pytest.raises(MemoryError, match=r"for 131072 bytes: .* 2\.50 GB of address space \(ulimit -v\): raise"):
        small.allocate(128 * KIB)


def test_a_machine_without_memory_says_so(either: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_available_bytes", lambda: 65 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
    with pytest.raises(MemoryError, match=r"for 104857600 bytes: .*; 68157440 bytes .* available\. Use fewer"):
        either.allocate(100 * MIB)
    monkeypatch.undo()
    assert either.allocate(100 * MIB).offset == 0


def test_without_memfd_and_without_dev_shm_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refusing(errno.ENOSYS))
    monkeypatch.setattr(os, "open", refusing(errno.ENOENT))
    with pytest.raises(OSError, match="mount a tmpfs at /dev/shm, or set POLYTEMPO_NATIVE=0"):
        Arena(MIB)


def test_too_many_open_files_are_not_taken_for_a_system_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refusing(errno.EMFILE))
    with pytest.raises(OSError, match=r"as many files open as it may, \d+, .*\(ulimit -n 4096\)") as raised:
        Arena(MIB)
    assert raised.value.errno == errno.EMFILE
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(os, "open", refusing(errno.ENFILE))
    with pytest.raises(OSError, match=r"no shared memory: Too many open files in system; end other programs"):
        Arena(MIB)


def test_an_old_python_without_memfd_uses_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert (filled(Arena(MIB), 100) == 7).all()


def test_a_limited_address_space_makes_it_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.ftruncate

    def limited(descriptor: int, length: int) -> None:
        if length > 200 * MIB:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        real(descriptor, length)

    monkeypatch.setattr(os, "ftruncate", limited)
    assert Arena(GIB).num_bytes == 128 * MIB


def test_a_limit_on_files_is_named_and_no_descriptor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "ftruncate", refusing(errno.EFBIG))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="ulimit -f"):
        Arena(MIB)
    assert os.listdir("/proc/self/fd") == before


def test_only_this_user_may_read_it_and_it_has_no_name(either: Arena) -> None:
    filled(either, 100)
    status = os.fstat(either.address.descriptor)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    assert [name for name in os.listdir("/dev/shm") if "polytempo" in name] == []
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{either.address.descriptor}")


def test_its_length_is_sealed() -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(Arena(GIB).address.descriptor, 0)


# ------------------------------------------------------------------------------------------------------- processes


@pytest.fixture
def child(either: Arena) -> tuple[Arena, Tensor]:
    """An arena with a tensor; its forked child frees it, allocates, and exits."""
    tensor = filled(either, 2 * MIB)
    pid = os.fork()
    if not pid:
        try:
            del tensor
            either.free(either._free[0])
            mine = own_arena()
            assert mine is not either
            with pytest.raises(RuntimeError, match="which has forked"):
                either.allocate(1)
            filled(mine, 2 * MIB, 9)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return either, tensor


def test_a_forked_child_cannot_harm_it(child: tuple[Arena, Tensor]) -> None:
    arena, tensor = child
    assert (tensor == 7).all()
    assert arena.allocate(MIB).offset >= 2 * MIB


def test_a_forked_child_has_an_arena_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_own", None)
    mine = own_arena()
    assert own_arena() is mine
    pid = os.fork()
    if not pid:
        os._exit(own_arena() is mine)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_window_shows_the_same_memory(either: Arena) -> None:
    seen = Window(either.address)
    tensor = either.empty((3, 4))
    offset = either.offset_of(tensor)
    assert offset is not None
    tensor.fill_(5)
    view = seen.tensor(offset, (3, 4), torch.float32)
    del seen
    gc.collect()
    assert torch.equal(view, tensor)
    view[0, 0] = 1
    assert tensor[0, 0] == 1


def test_windows_are_shared(either: Arena) -> None:
    assert window(either.address) is window(either.address)


def test_another_process_under_the_same_number_is_not_taken_for_it(either: Arena) -> None:
    with pytest.raises(ProcessLookupError, match="has ended: another one has its number"):
        Window(either.address._replace(inode=either.address.inode + 1))


def test_a_process_that_is_gone_is_told(either: Arena) -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(FileNotFoundError):
        Window(either.address._replace(pid=pid))
