"""Hostile files, frames, strings and kills, many of them; each must end as documented.

python benchmarks/attacks/attacks.py [--seed 1] [--minutes 30] [--frames 1000000] [--kills 400] [--bits 1500] …

    frames      messages with something done to them  ─▶ Malformed, or a whole message
    kills       of a process that saves                ─▶ the newest checkpoint and snapshot are whole, the next save is
    bits        flipped in checkpoints and snapshots   ─▶ CheckpointError, SnapshotError
    manifests   with right hashes and wrong values     ─▶ the same, or the written values
    strings     of strategies                          ─▶ a strategy, or ValueError

A search returns its findings, one line each; `tests/unit/test_attacks.py` makes each of them a few times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from polytempo.engines.processes.fork import die_with, fork
from polytempo.runs.served.run_snapshot import resumed
from polytempo.server import message as messages
from polytempo.server.snapshots import snapshot
from polytempo.server.snapshots.snapshot import SnapshotError
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, commit, read_manifest, read_part, write_part
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError, latest
from polytempo.wire.frames import VERSION, FrameLimits, Malformed, decode, encode

LIMITS = FrameLimits(total_bytes=1 << 20, header_bytes=1 << 16, num_frames=16)
SLOW_S = 10.0
"""No single input may take so long."""
MOST_DELAY_S = 0.05
RANKS, SHARDS = 2, 2

Search = Callable[[random.Random, Path], str | None]
"""One attack in an empty folder; its finding, or None."""

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    10**9,
    1.5,
    "",
    "x",
    "../x",
    b"\xff",
    [],
    {},
    [[]],
    "9" * 400,
)


# ------------------------------------------------------------------------------------------------------------- frames


def _valid() -> list[list[bytes]]:
    push = messages.Push(0, 1, 2, 3, 4, 5, (0.1,), (7,), torch.arange(5.0), (), None)
    ticket = messages.Ticket(1, 2, 3)
    kinds = [
        messages.Beat(1, 2, 3),
        push,
        messages.Replicate(0, 1, 2, push),
        messages.Pulled(0, 1, 2, 3, 4, torch.zeros(3)),
        messages.Deal(0, 0, 1, "train", (ticket,)),
        messages.Ask(0, 1, 2, (3,), (b"{}",)),
        messages.View(1, ((1, 2),), ((0, 0),)),
        messages.Statistics(0, 0, 0, 1, 1, 1, {1: 2}, 0, 0, 0, ((1, 2),)),
        messages.Install(0, 1, 2, b"state", (torch.ones(2),)),
    ]
    return [[bytes(frame) for frame in encode(kind)] for kind in kinds]


def changed(chance: random.Random, value: Any) -> Any:
    """`value` with one part replaced, removed, or doubled."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        match chance.randrange(4):
            case 0:
                return {other: part for other, part in value.items() if other != key}
            case 1:
                return {**value, "more": chance.choice(VALUES)}
            case _:
                return {**value, key: changed(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        match chance.randrange(4):
            case 0:
                return [*value[:at], *value[at + 1 :]]
            case 1:
                return [*value[:at], value[at], *value[at:]]
            case _:
                return [*value[:at], changed(chance, value[at]), *value[at + 1 :]]
    return chance.choice(VALUES)


def hostile_frames(chance: random.Random, valid: list[list[bytes]]) -> list[bytes]:
    """A message with its header, its bytes, or its tensors changed."""
    head, *rest = chance.choice(valid)
    match chance.randrange(4):
        case 0:
            header = changed(chance, msgspec.msgpack.decode(head[1:]))
            return [bytes([VERSION]) + msgspec.msgpack.encode(header), *rest]
        case 1:
            at = chance.randrange(len(head))
            return [head[:at] + chance.randbytes(chance.randrange(8)) + head[at + chance.randrange(4) :], *rest]
        case 2:
            bit = chance.randrange(8 * len(head))
            flipped = bytearray(head)
            flipped[bit // 8] ^= 1 << bit % 8
            return [bytes(flipped), *rest]
        case _:
            return [head, *(chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(4)))]


def frames() -> Search:
    """Any bytes are a message or `Malformed`."""
    valid = _valid()

    def once(chance: random.Random, folder: Path) -> str | None:
        given = hostile_frames(chance, valid)
        try:
            encode(decode(given, LIMITS))
        except Malformed:
            return None
        except Exception as error:
            return f"{type(error).__name__} ({error}) from {given!r}"
        return None

    return once


# -------------------------------------------------------------------------------------------------------------- files


def save(folder: Path, step: int) -> None:
    """A checkpoint and a snapshot with the step's number as values."""
    root = folder / "checkpoint"
    part = CheckpointPart({"weight": torch.full((2000,), float(step))}, {"epoch": step})
    commit(root, step, [write_part(root, step, rank, part) for rank in range(RANKS)], {"job": "attack"})
    for shard in range(SHARDS):
        snapshot.write(root, step, shard, b"%d" % step, [torch.full((2000,), float(step))])


def read(folder: Path) -> tuple[int, int]:
    """The step of the newest checkpoint, and the number of the newest whole snapshot; all values must be theirs."""
    root = folder / "checkpoint"
    newest, number = latest(root), snapshot.newest_whole(root, SHARDS)
    manifest = None if newest is None else read_manifest(newest)
    step = 0 if manifest is None else manifest.step
    for rank in range(0 if manifest is None else len(manifest.parts)):
        part = read_part(root / f"step-{step:08d}", rank)
        assert part.scalars == {"epoch": step}
        assert bool((part.tensors["weight"] == step).all())
    for shard in range(SHARDS if number is not None else 0):
        found = snapshot.read(root, number or 0, shard)
        assert found.state == b"%d" % (number or 0)
        assert bool((found.tensors[0] == number).all())
    return step, number or 0


def killed_save(chance: random.Random, folder: Path) -> str | None:
    """Kill a process that saves without end: at most the save under way is lost."""
    reading, writing = os.pipe()
    parent = os.getpid()

    def saving() -> None:
        die_with(parent)
        for step in range(1, 10_000):
            save(folder, step)
            os.write(writing, b"%08d" % step)

    process = fork(saving)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        first = said.read(8)
        time.sleep(chance.random() * MOST_DELAY_S)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        last = int((first + said.read())[-8:])
    step, number = read(folder)
    if step < last or number < last:
        return f"saved {last}, and found checkpoint {step}, snapshot {number}"
    snapshot.discard_beyond(folder / "checkpoint", number)
    save(folder, step + 1)
    if read(folder) != (step + 1, step + 1):
        return f"after a kill in save {step}, the next one was not found"
    return None


def saved_files(folder: Path) -> list[Path]:
    """The files of one checkpoint and one snapshot; they are written once, and copied."""
    written = folder.parent / "written"
    if not written.exists():
        save(written, 1)
    shutil.copytree(written, folder)
    return sorted(path for path in (folder / "checkpoint").rglob("*") if path.is_file())


def refused(folder: Path, what: str) -> str | None:
    """A finding unless reading raises the documented errors, or gives the written values."""
    try:
        read_all(folder)
    except (CheckpointError, SnapshotError) as error:
        return None if str(folder) in str(error) else f"{what}: no file is named in {error}"
    except AssertionError:
        return f"{what}: other values were read"
    except Exception as error:
        return f"{what}: {type(error).__name__} ({error})"
    return f"{what}: not noticed"


def read_all(folder: Path) -> None:
    """Read as `read` does, but a damaged snapshot is an error."""
    for shard in range(SHARDS):
        snapshot.read(folder / "checkpoint", 1, shard)
    read(folder)


def flipped_bit(chance: random.Random, folder: Path) -> str | None:
    """Flip any bit of a checkpoint or a snapshot."""
    path = chance.choice(saved_files(folder))
    content = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return refused(folder, f"bit {bit} of {path.name}")


def hashed(body: dict[str, Any], key: str, indent: int | None) -> bytes:
    """A manifest with its right hash."""
    own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, key: own}, indent=indent).encode() + b"\n"


def forged(chance: random.Random, folder: Path) -> str | None:
    """Change values of a manifest, and hash it again: it is refused, or its checkpoint is as written."""
    saved_files(folder)
    paths = {"sha256": folder / "checkpoint" / "step-00000001" / "manifest.json"}
    paths["manifest_sha256"] = folder / "checkpoint" / "snapshot-00000001-shard-0.json"
    key = chance.choice(sorted(paths))
    body = json.loads(paths[key].read_bytes())
    del body[key]
    for _ in range(chance.randrange(1, 3)):
        body = changed(chance, body)
    try:
        content = hashed(body if isinstance(body, dict) else {"body": body}, key, 1 if key == "sha256" else None)
    except TypeError:  # JSON has no such value
        return None
    paths[key].write_bytes(content)
    found = refused(folder, f"{paths[key].name} {content!r}")
    return None if found is not None and found.endswith("not noticed") else found  # it was about nothing


def forged_standing(chance: random.Random, folder: Path) -> str | None:
    """Change values of the launcher's part of a snapshot, or a shard's state, and hash it again."""
    folder /= "checkpoint"
    snapshot.write(folder, 1, 0, msgspec.msgpack.encode(changed(chance, [1, [2], {"x": 3}])), [torch.ones(2)])
    body = {"number": 1, "generation": 0, "step": 1, "facts": {"shards": 1}, "dealer": "", "seconds": 0.0}
    try:
        standing = json.dumps(changed(chance, body)).encode()
    except TypeError:
        return None
    sha256 = hashlib.sha256(standing).hexdigest()
    head = json.dumps({"format": "polytempo-run-snapshot", "version": 1, "sha256": sha256})[:-1].encode()
    (folder / "snapshot-00000001-run.json").write_bytes(head + b', "standing": ' + standing + b"}")
    with suppress(SnapshotError, ValueError):
        resumed(folder, 1, {})
    return None


# ------------------------------------------------------------------------------------------------------------ strings

WORDS = re.findall(
    r"\S+",
    """sync_sgd local_sgd downpour(replicas=1) period = 8 ( ) , [ ] { } ' " \\ None true -1 1e999 nan inf 0x10 top_k
    power_sgd rank lambda : __import__ os . system ; easgd every codec feedback(one_bit()) 99999999999999999999 0.5 é
    mean diloco robust_sgd krum ssp bound shards adasum gossip hogwild flexrr softsync n = \x00 terngrad""",
)


def hostile_string(chance: random.Random) -> str:
    """Words of the language in any order, calls with wrong arguments, and noise."""
    match chance.randrange(4):
        case 0:
            return "".join(chance.choice(WORDS) for _ in range(chance.randrange(12)))
        case 1:
            name, key, value, other = (chance.choice(WORDS).strip() for _ in range(4))
            return f"{name}({key}={value}, {other})"
        case 2:
            return chance.choice(WORDS) + "(" * chance.randrange(300) + ")" * chance.randrange(300)
        case _:
            return "".join(chr(chance.randrange(32, 0x2FF)) for _ in range(chance.randrange(40)))


def string(chance: random.Random, folder: Path) -> str | None:
    """A strategy, or ValueError."""
    text = hostile_string(chance)
    try:
        parse_strategy(text)
    except ValueError as error:
        return None if str(error) else f"{text!r}: an error without a word"
    except Exception as error:
        return f"{text!r}: {type(error).__name__} ({error})"
    return None


# ------------------------------------------------------------------------------------------------------------- search

SEARCHES: dict[str, tuple[Callable[[], Search], int]] = {
    "frames": (frames, 1_000_000),
    "kills": (lambda: killed_save, 400),
    "bits": (lambda: flipped_bit, 1_500),
    "manifests": (lambda: forged, 2_000),
    "standings": (lambda: forged_standing, 2_000),
    "strings": (lambda: string, 20_000),
}
"""Each search with how often `make soak` makes it."""
_FILES = {"kills", "bits", "manifests", "standings"}


def search(name: str, times: int, seed: int, until_s: float = float("inf")) -> tuple[int, list[str]]:
    """The number of attacks until `until_s` (of `time.monotonic`), and their findings."""
    chance = random.Random(f"{name}/{seed}")
    once = SEARCHES[name][0]()
    findings: list[str] = []
    done = 0
    with tempfile.TemporaryDirectory() as home:
        while done < times and time.monotonic() < until_s:
            folder = Path(home) / str(done)
            since_s = time.monotonic()
            try:
                found = once(chance, folder)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if found is None and time.monotonic() - since_s > SLOW_S:
                found = f"took {time.monotonic() - since_s:.0f} s"
            if found is not None:
                findings.append(f"{name} {done} of seed {seed}: {found}")
            if name in _FILES:
                shutil.rmtree(folder, ignore_errors=True)
            done += 1
    return done, findings


def main() -> None:
    """All searches one after the other; exit code 1 if any found something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    for name, (_, times) in SEARCHES.items():
        parser.add_argument(f"--{name}", type=int, default=times)
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    until_s, total = time.monotonic() + 60 * given["minutes"], 0
    for name in SEARCHES:
        since_s = time.monotonic()
        done, findings = search(name, given[name], given["seed"], until_s)
        total += len(findings) + (done < given[name])
        print(f"{name}: {done:,} of {given[name]:,} in {time.monotonic() - since_s:.0f} s, {len(findings)} findings")
        print(*findings[:10], sep="\n", flush=True)
    sys.exit(total > 0)


if __name__ == "__main__":
    main()
