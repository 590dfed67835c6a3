"""Seconds of a server to open the secrets of a secure sum, of 1,000 clients with a quarter lost before their vectors.

python benchmarks/federated/shares.py
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys
import time
from itertools import cycle, islice
from typing import Any

from polytempo.federated.secure_sum import Primitives, PublicKeys, secrets_of, split

KINDS = 10
"""Different secrets, each the secret of many clients: their shares take a client a sixth of a second each."""


def main() -> None:
    """Time a server's part of the last phase, without the masks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    count: int = parser.parse_args().clients
    holders, least, lost = range(count), 2 * count // 3 + 1, count // 4

    def digest(secret: bytes) -> bytes:
        return hashlib.sha256(secret).digest()

    unused: Any = None
    crypto = Primitives(public=digest, agree=unused, stream=unused, seal=unused, unseal=unused)
    begun_s = time.perf_counter()
    made = [secrets.token_bytes(32) for _ in range(KINDS)]
    shares = [split(each, least, holders, secrets.token_bytes) for each in made]
    split_s = (time.perf_counter() - begun_s) / KINDS
    kinds = list(islice(cycle(range(KINDS)), count))
    everyone = {u: PublicKeys(b"", digest(made[kind]), digest(made[kind])) for u, kind in enumerate(kinds)}
    survivors = list(holders)[lost:]
    told = {u: {v: shares[kind][u] for v, kind in enumerate(kinds)} for u in survivors}
    begun_s = time.perf_counter()
    found, wrong = secrets_of(everyone, survivors, told, least, crypto)
    open_s = time.perf_counter() - begun_s
    assert not wrong
    assert [found[u] for u in holders] == [made[kind] for kind in kinds]
    print(f"{count:,} clients, {lost:,} lost, {least:,} shares a secret", file=sys.stderr)
    print(f"a client makes the shares of a secret in {split_s:.2f} s; the server opens all secrets in {open_s:.2f} s")


if __name__ == "__main__":
    main()
