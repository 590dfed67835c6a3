"""Keys: two pairs for a run, in a file that only their owner can read, and nowhere else."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import zmq

from polytempo.wire.keys import Keys, make_keys, read_keys, write_keys

KEYS = make_keys()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "private"
    path.mkdir(mode=0o700)
    return path


def test_each_run_has_its_own_two_pairs() -> None:
    assert len({KEYS.server_secret, KEYS.client_secret, KEYS.server_public, KEYS.client_public}) == 4
    assert zmq.curve_public(KEYS.client_secret) == KEYS.client_public
    assert make_keys() != KEYS


def test_nothing_shows_a_key() -> None:
    shown = f"{KEYS!r} {KEYS} {[KEYS]} {KEYS!s:>9}"
    for name in ("server_public", "server_secret", "client_public", "client_secret"):
        assert getattr(KEYS, name).decode() not in shown


def test_what_is_written_is_read(folder: Path) -> None:
    umask = os.umask(0)
    try:
        write_keys(folder / "keys", KEYS)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(os.stat(folder / "keys").st_mode) == 0o600
    assert read_keys(folder / "keys") == KEYS


def test_keys_travel_as_plain_text_and_come_back() -> None:
    plain = KEYS.to_plain()
    assert Keys.from_plain(json.loads(json.dumps(plain))) == KEYS
    with pytest.raises(ValueError, match="these are not CURVE key pairs"):
        Keys.from_plain(plain | {"server_secret": plain["client_secret"]})


def test_a_file_that_is_there_already_stays(folder: Path) -> None:
    (folder / "keys").write_text("somebody's")
    with pytest.raises(FileExistsError):
        write_keys(folder / "keys", KEYS)
    assert (folder / "keys").read_text() == "somebody's"


def test_links_are_not_followed(folder: Path) -> None:
    write_keys(folder / "keys", KEYS)
    (folder / "link").symlink_to(folder / "keys")
    (folder / "dangling").symlink_to(folder / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        read_keys(folder / "link")
    with pytest.raises(FileExistsError):
        write_keys(folder / "dangling", KEYS)
    assert not (folder / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o700 | 0o010])
def test_a_file_that_others_can_get_at_is_refused(folder: Path, mode: int) -> None:
    write_keys(folder / "keys", KEYS)
    (folder / "keys").chmod(mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}: others could"):
        read_keys(folder / "keys")


def test_a_file_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_keys(folder / "keys", KEYS)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=f"belongs to user {owner} "):
        read_keys(folder / "keys")


def test_a_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    folder.chmod(0o711)
    with pytest.raises(ValueError, match="mode 0711"):
        write_keys(folder / "keys", KEYS)
    assert not (folder / "keys").exists()


def test_a_pipe_in_place_of_the_file_does_not_hold_anybody_up(folder: Path) -> None:
    os.mkfifo(folder / "keys", 0o600)
    with pytest.raises(ValueError, match="plain file"):
        read_keys(folder / "keys")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n\n",
        b"x" * 163,
        b"\n".join([b"x" * 40] * 4),
        b"\n".join([KEYS.server_public, KEYS.client_secret, KEYS.client_public, KEYS.server_secret]),
    ],
    ids=["empty", "empty lines", "no lines", "no keys", "keys that are no pairs"],
)
def test_a_file_that_holds_no_keys_is_refused_without_being_shown(folder: Path, content: bytes) -> None:
    (folder / "keys").write_bytes(content)
    (folder / "keys").chmod(0o600)
    with pytest.raises(ValueError, match=r"holds no keys|not CURVE key pairs") as refusal:
        read_keys(folder / "keys")
    assert KEYS.server_public.decode() not in str(refusal.value)


def test_keys_that_do_not_fit_each_other_are_none() -> None:
    with pytest.raises(ValueError, match="make_keys"):
        Keys(KEYS.server_public, KEYS.client_secret, KEYS.client_public, KEYS.client_secret)
