"""The times of the launcher's part of a snapshot, and of the removal of parts that hosts have left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polytempo.runs.served.lost_launcher import LauncherPart, LeavingCopy, number_after


class Saves:
    """Takes notes."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def write(self, number: int, now_s: float) -> None:
        self.done.append(f"write {number} at {now_s:g}")

    def remove(self, number: int) -> None:
        self.done.append(f"remove {number}")

    def discard(self, number: int) -> None:
        self.done.append(f"discard {number}")


def test_a_snapshot_of_a_lost_launcher_is_later_than_any_that_its_run_orders() -> None:
    assert [number_after(last) for last in (0, 7, 999_999, 1_000_000, 1_000_001)] == [
        1_000_000,
        1_000_000,
        1_000_000,
        2_000_000,
        2_000_000,
    ]


def test_a_launcher_that_lives_removes_what_hosts_have_saved_that_took_it_for_lost() -> None:
    saves = Saves()
    part = LauncherPart(saves, 9)
    for now_s in (0.0, 0.5, 1.0, 1.5):
        part.look(now_s)
    part.remove()
    assert saves.done == ["discard 9", "write 9 at 0", "discard 9", "write 9 at 1", "discard 9", "remove 9"]


def test_one_that_has_stood_still_leaves_it_alone_for_a_minute() -> None:
    saves = Saves()
    part = LauncherPart(saves, 9)
    for now_s in (0.0, *range(30, 92)):
        part.look(float(now_s))
    written = [f"write 9 at {now_s}" for now_s in range(30, 90)]
    assert saves.done == [
        *("discard 9", "write 9 at 0", *written),
        *("discard 9", "write 9 at 90", "discard 9", "write 9 at 91"),
    ]


class Machine:
    """Does nothing."""

    finished = False

    def receive(self, now_s: float, source: int, message: Any) -> list[Any]:
        return []

    def tick(self, now_s: float) -> list[Any]:
        return []

    def wait_s(self, now_s: float) -> float:
        return 5.0

    def flops(self, message: Any) -> float:
        return 0.0


def leaving(tmp_path: Path, place: int, **more: Any) -> tuple[LeavingCopy, Any, list[str]]:
    node: Any = SimpleNamespace(
        **{"node": 4 + place, "chain": (4, 5), "index": 3, "blank": False, "shard": SimpleNamespace(number=0), **more}
    )
    saved: list[str] = []
    return LeavingCopy(Machine(), node, tmp_path, 9, lambda: saved.append("saved")), node, saved


def ticks(copy: LeavingCopy, begin_s: float, end_s: float) -> float | None:
    """Tick whenever it is time; when the machine finished."""
    now_s = begin_s
    while now_s <= end_s:
        copy.tick(now_s)
        if copy.finished:
            return round(now_s, 2)
        now_s += max(0.01, copy.wait_s(now_s))
    return None


def test_a_copy_that_is_not_ordered_goes_on(tmp_path: Path) -> None:
    copy, _, saved = leaving(tmp_path, 0)
    assert (ticks(copy, 0.0, 60.0), saved, copy.wait_s(0.0)) == (None, [], 5.0)


def test_the_first_copy_saves_when_its_shard_is_at_rest(tmp_path: Path) -> None:
    copy, node, saved = leaving(tmp_path, 0)
    copy.order()
    assert ticks(copy, 0.0, 0.4) is None
    node.index += 1
    assert ticks(copy, 0.42, 0.9) is None
    assert saved == []
    assert ticks(copy, 0.91, 2.0) is not None
    assert saved == ["saved"]


def test_a_shard_that_does_not_come_to_rest_is_saved_all_the_same(tmp_path: Path) -> None:
    copy, node, saved = leaving(tmp_path, 0)
    copy.order()
    ended_s = None
    for tenth in range(100):
        node.index += 1
        ended_s = ended_s or ticks(copy, tenth / 10, tenth / 10)
    assert (ended_s, saved) == (3.0, ["saved"])


@pytest.mark.parametrize(("names", "ended_s", "saves"), [((), 6.0, True), (("safetensors.partial",), None, False)])
def test_a_copy_behind_saves_only_where_the_first_has_not_begun(
    names: tuple[str, ...], ended_s: float | None, saves: bool, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / f"snapshot-00000009-shard-0.{name}").touch()
    copy, _, saved = leaving(tmp_path, 1)
    copy.order()
    found_s = ticks(copy, 0.0, 30.0)
    assert (found_s and round(found_s, 1), bool(saved)) == (ended_s, saves)


def test_a_copy_behind_leaves_once_the_first_has_saved(tmp_path: Path) -> None:
    copy, _, saved = leaving(tmp_path, 1)
    copy.order()
    for name in ("safetensors", "json"):
        (tmp_path / f"snapshot-00000009-shard-0.{name}").touch()
    assert (ticks(copy, 0.0, 1.0), saved) == (0.0, [])


@pytest.mark.parametrize("more", [{"blank": True}, {"chain": (7, 8)}], ids=["blank", "not in the chain"])
def test_a_copy_without_a_state_leaves_without_saving(more: dict[str, Any], tmp_path: Path) -> None:
    copy, _, saved = leaving(tmp_path, 0, **more)
    copy.order()
    assert (ticks(copy, 0.0, 1.0), saved) == (0.0, [])
