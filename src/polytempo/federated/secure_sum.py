"""Secure sums: a server learns the sum of clients' vectors, and of one client only numbers that look random.

    phase        client u                                                      server
    0 keys       two key pairs, c and s, and SHA-256 of bᵤ           ──────▶   hands all public keys out
    1 shares     bᵤ; Shamir shares of sᵤ and bᵤ, sealed for each v   ──────▶   passes them on
    2 vector     yᵤ = xᵤ + PRG(bᵤ) + Σ_{v>u} PRG(sᵤᵥ) - Σ_{v<u} PRG(sᵤᵥ)  ─▶   names the clients that sent one
    3 unmasking  a share of b of each that sent yᵥ, of s of the others  ───▶   Σ y - Σ PRG(b) ± Σ PRG(s) = Σ x

Masks are added mod 2^bits, so they cancel to the bit. A client may leave after any phase, as long as `threshold` stay.
sᵤᵥ is a hash of the pair's shared key and of `agreed`: masks of clients that were told different facts do not cancel.

Source: K. Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", 2017, figure 4,
without signatures and the consistency check: for a server that keeps to the protocol and is curious.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polytempo.core.calls.refusals import refuse

Words = NDArray[Any]
"""Unsigned integers of 32 or 64 bits."""
Random = Callable[[int], bytes]

_FIELD = 2**256 + 297
"""A prime above all secrets of 32 bytes."""
_KEY_BYTES, _SHARE_BYTES, _TAG_BYTES = 32, 33, 16
_MOST_TRIES = 200
PHASES = ("keys", "shares", "vector", "unmasking")


class Primitives(NamedTuple):
    """The cryptography of a secure sum. Keys and secrets have 32 bytes."""

    public: Callable[[bytes], bytes]
    """The public key of a private one."""
    agree: Callable[[bytes, bytes], bytes]
    """agree(private, public of the other): the same key on both sides."""
    stream: Callable[[bytes, int], bytes]
    """stream(key, length): pseudo-random bytes."""
    seal: Callable[[bytes, bytes, bytes], bytes]
    """seal(key, nonce of 12 bytes, message): encrypted, and 16 bytes longer."""
    unseal: Callable[[bytes, bytes, bytes], bytes]
    """The message; an error where it was changed."""


def primitives() -> Primitives:
    """X25519, ChaCha20 and ChaCha20-Poly1305 by `cryptography`. `Incompatible` (PT2514) where it is not installed."""
    try:
        x25519: Any = import_module("cryptography.hazmat.primitives.asymmetric.x25519")
        ciphers: Any = import_module("cryptography.hazmat.primitives.ciphers")
        sealed: Any = import_module("cryptography.hazmat.primitives.ciphers.aead").ChaCha20Poly1305
    except ImportError:
        refuse({"secure sum", "no cryptography"})
        raise
    private = x25519.X25519PrivateKey.from_private_bytes

    def agree(own: bytes, other: bytes) -> bytes:
        return hashlib.sha256(private(own).exchange(x25519.X25519PublicKey.from_public_bytes(other))).digest()

    def stream(key: bytes, length: int) -> bytes:
        cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None)
        return bytes(cipher.encryptor().update(bytes(length)))

    return Primitives(
        public=lambda own: bytes(private(own).public_key().public_bytes_raw()),
        agree=agree,
        stream=stream,
        seal=lambda key, nonce, message: bytes(sealed(key).encrypt(nonce, message, None)),
        unseal=lambda key, nonce, message: bytes(sealed(key).decrypt(nonce, message, None)),
    )


@dataclass(frozen=True)
class FixedPoint:
    """Numbers as integers mod 2^bits: round(x · 2^fraction). A sum of n is wrong by at most n / 2^(fraction + 1)."""

    bits: Literal[32, 64] = 32
    fraction: int = 16

    def __post_init__(self) -> None:
        if self.bits not in (32, 64) or not 0 <= self.fraction < self.bits:
            raise ValueError(f"bits are 32 or 64, and fraction below them; got {self.bits} and {self.fraction}")

    def encode(self, values: NDArray[Any], clients: int) -> Words:
        """ValueError for NaN, and for values so large that a sum of `clients` ones could overflow."""
        bound = 2.0 ** (self.bits - 1 - self.fraction) / clients
        largest = float(np.abs(values).max(initial=0.0))
        if not largest < bound:
            raise ValueError(
                f"a sum of {clients} vectors with {self.bits} bits, {self.fraction} of them a fraction, takes values "
                f"below {bound:g}, and one is {largest:g}; give fewer bits of fraction, or bits=64"
            )
        scaled = np.rint(np.asarray(values, np.float64) * 2.0**self.fraction).astype(np.int64)
        return scaled.astype(self.words)

    def decode(self, words: Words) -> NDArray[np.float64]:
        """The numbers of a sum."""
        return words.view(np.dtype(f"i{self.bits // 8}")).astype(np.float64) / 2.0**self.fraction

    @property
    def words(self) -> np.dtype[Any]:
        """The unsigned integers that travel."""
        return np.dtype(f"<u{self.bits // 8}")


class PublicKeys(NamedTuple):
    """A client's message of phase 0."""

    sealing: bytes
    masking: bytes
    own: bytes
    """SHA-256 of bᵤ, so that wrong shares of it are noticed."""


class WrongShares(ValueError):
    """Shares are not a client's, or do not give its secret."""

    def __init__(self, why: str, clients: Collection[int]) -> None:
        """`clients`: clients with wrong shares."""
        super().__init__(why)
        self.clients = frozenset(clients)


def as_keys(content: bytes) -> PublicKeys:
    """A client's keys from their bytes, one after the other. ValueError for another number of bytes."""
    if len(content) != keys_bytes():
        raise ValueError(f"its keys have {len(content)} bytes, not {keys_bytes()}")
    return PublicKeys(*(content[begin : begin + _KEY_BYTES] for begin in range(0, keys_bytes(), _KEY_BYTES)))


def keys_bytes() -> int:
    """Bytes of a client's keys."""
    return len(PublicKeys._fields) * _KEY_BYTES


def share_bytes() -> int:
    """Bytes of a share."""
    return _SHARE_BYTES


def sealed_bytes() -> int:
    """Bytes of the sealed shares for another client."""
    return 2 * _SHARE_BYTES + _TAG_BYTES


class SecureClient:
    """A client's side; one call for each phase, each in the order of phases."""

    def __init__(self, number: int, crypto: Primitives, random: Random = secrets.token_bytes) -> None:
        self._number, self._crypto, self._random, self._threshold = number, crypto, random, 0
        self._sealing, self._masking, self._own = random(32), random(32), random(32)
        self._everyone: Mapping[int, PublicKeys] = {}
        self._agreed = b""
        self._held: dict[int, bytes] = {}

    def keys(self) -> PublicKeys:
        """Phase 0."""
        own = hashlib.sha256(self._own).digest()
        return PublicKeys(self._crypto.public(self._sealing), self._crypto.public(self._masking), own)

    def shares(self, everyone: Mapping[int, PublicKeys], threshold: int, agreed: bytes = b"") -> dict[int, bytes]:
        """Phase 1: for each other client, a share of sᵤ and one of bᵤ, sealed so that it alone can read them.

        `agreed`: facts of the sum, which are the same for all of its clients, or their masks do not cancel.
        """
        self._threshold, self._agreed = threshold, agreed
        _enough(everyone, self._threshold, "keys")
        if 2 * self._threshold <= len(everyone):
            raise ValueError(
                f"threshold {self._threshold} of {len(everyone)} clients lets a server unmask two halves; take more "
                "than half"
            )
        self._everyone = everyone
        of_key = split(self._masking, self._threshold, everyone, self._random)
        of_own = split(self._own, self._threshold, everyone, self._random)
        self._held[self._number] = of_key[self._number] + of_own[self._number]
        return {
            other: self._crypto.seal(self._key(other), _nonce(self._number, other), of_key[other] + of_own[other])
            for other in everyone
            if other != self._number
        }

    def masked(self, received: Mapping[int, bytes], vector: Words) -> Words:
        """Phase 2: `vector` with a mask of its own, and one with each client that has sent shares.

        `WrongShares` for shares that are not from their client.
        """
        wrong = []
        for other, sealed in received.items():
            try:
                self._held[other] = self._crypto.unseal(self._key(other), _nonce(other, self._number), sealed)
            except Exception:  # InvalidTag, which has no text
                wrong.append(other)
        if wrong:
            raise WrongShares(f"the shares of clients {wrong} were changed, or are not theirs", wrong)
        _enough(self._held, self._threshold, "shares")
        total = vector + mask(self._own, vector, self._crypto)
        for other in received:
            key = _pair_key(self._crypto, self._masking, self._everyone[other], self._agreed)
            _add_(total, key, self._number < other, self._crypto)
        return total

    def unmasking(self, survivors: Collection[int]) -> dict[int, bytes]:
        """Phase 3: a share of bᵥ for each survivor v, of sᵥ for the others; never both, and only once."""
        if not self._held or not set(survivors) <= self._held.keys():
            raise ValueError("shares are given once, of the clients that sent theirs in this round")
        _enough(survivors, self._threshold, "vector")
        held, self._held = self._held, {}
        return {v: both[_SHARE_BYTES:] if v in survivors else both[:_SHARE_BYTES] for v, both in held.items()}

    def _key(self, other: int) -> bytes:
        return self._crypto.agree(self._sealing, self._everyone[other].sealing)


def unmasked(
    everyone: Mapping[int, PublicKeys],
    vectors: Mapping[int, Words],
    told: Mapping[int, Mapping[int, bytes]],
    threshold: int,
    crypto: Primitives,
) -> Words:
    """The server's part of phase 3: the sum of the vectors that it has, mod 2^bits.

    `told` has the shares that each client of phase 3 gave, of the clients that had sent shares. ValueError where fewer
    than `threshold` gave some; `WrongShares` where a client's give no secret. Cost: a mask for each client, and one for
    each pair of a lost client and a survivor.
    """
    return without_masks(everyone, vectors, secrets_of(everyone, vectors, told, threshold, crypto)[0], crypto)


def secrets_of(
    everyone: Mapping[int, PublicKeys],
    vectors: Collection[int],
    told: Mapping[int, Mapping[int, bytes]],
    threshold: int,
    crypto: Primitives,
) -> tuple[dict[int, bytes], frozenset[int]]:
    """The secrets that `told` opens, b of clients with vectors and s of the others, and the clients that told wrong
    shares of them, as far as these were needed.

    Errors: as of `unmasked`. `WrongShares` names a client if its shares alone give no secret, and some holders could be
    spared. If none could, or the shares of several clients give none, holders may tell wrong ones, and it names none.
    """
    _enough(vectors, threshold, "vector")
    _enough(told, threshold, "unmasking")
    found, wrong, closed, spare = dict[int, bytes](), set[int](), list[int](), False
    for client in next(iter(told.values())):
        keys, survives = everyone[client], client in vectors

        def right(secret: bytes) -> bool:
            made = hashlib.sha256(secret).digest() if survives else crypto.public(secret)  # noqa: B023 # used here alone
            return made == (keys.own if survives else keys.masking)  # noqa: B023

        shares = {holder: each[client] for holder, each in told.items() if holder not in wrong}
        opened = _opened(shares, threshold, right)
        if opened is None:
            closed.append(client)
            spare |= len(shares) > threshold
            if len(closed) > 1:
                break
            continue
        found[client] = opened[0]
        wrong |= opened[1]
    if closed:
        raise WrongShares(
            f"the shares of clients {closed} do not give their keys", closed if spare and len(closed) == 1 else ()
        )
    return found, frozenset(wrong)


def without_masks(
    everyone: Mapping[int, PublicKeys],
    vectors: Mapping[int, Words],
    found: Mapping[int, bytes],
    crypto: Primitives,
    agreed: bytes = b"",
) -> Words:
    """The sum of the vectors, mod 2^bits, by the secrets of `secrets_of`. `agreed`: as of the clients' `shares`."""
    first = next(iter(vectors.values()))
    total = sum(vectors.values(), np.zeros_like(first))
    for client, secret in found.items():
        if client in vectors:
            total -= mask(secret, first, crypto)
            continue
        for survivor in vectors:
            key = _pair_key(crypto, secret, everyone[survivor], agreed)
            _add_(total, key, client < survivor, crypto)
    return total


def _opened(
    shares: Mapping[int, bytes], threshold: int, right: Callable[[bytes], bool]
) -> tuple[bytes, set[int]] | None:
    """The secret of shares that may be wrong in part, and the holders of the wrong ones; None where none is `right`.

    The first shares give it if they are right. Else other ones are tried, `_MOST_TRIES` times: with a third of shares
    to spare a try leaves one wrong share out with probability 1/3, two with 1/9.
    """
    holders, draw = list(shares), random.Random(0)
    if len(holders) < threshold:
        return None
    for tried in range(_MOST_TRIES if len(holders) > threshold else 1):
        some = draw.sample(holders, threshold) if tried else holders[:threshold]
        secret = joined({holder: shares[holder] for holder in some}, threshold)
        if right(secret):
            rest = [holder for holder in holders if tried and holder not in some]
            base = {holder: shares[holder] for holder in some[1:]}
            return secret, {each for each in rest if joined({**base, each: shares[each]}, threshold) != secret}
    return None


def secure_sum(
    vectors: Sequence[NDArray[Any]],
    threshold: int | None = None,
    point: FixedPoint = FixedPoint(),
    leave: Mapping[int, int] = {},
    crypto: Primitives | None = None,
    random: Random = secrets.token_bytes,
) -> NDArray[np.float64]:
    """The sum of clients' vectors as a server learns it, by all four phases in this process.

        pt.federated.secure_sum([np.array([0.5, 1.0]), np.array([0.25, -2.0]), np.array([1.0, 1.0])])

    `leave` has clients that are lost, and the first phase, 0 to 3, without a message of theirs. The sum is of the
    clients that sent their vector. `threshold`: the clients that must stay, by default two thirds of all and one.

    Cost for n clients and K numbers: each computes n masks of K numbers and sends `secure_bytes(n, K)` bytes; the
    server computes n + lost · n masks. The extra `secure` brings X25519 and ChaCha20.

    Errors: ValueError where fewer than `threshold` stay, and for values too large for `point`; `Incompatible` (PT2514).
    """
    count, crypto = len(vectors), crypto or primitives()
    most = 2 * count // 3 + 1 if threshold is None else threshold
    words = [point.encode(vector, count) for vector in vectors]
    clients = {u: SecureClient(u, crypto, random) for u in range(count)}

    def stay(phase: int) -> list[int]:
        return [u for u in clients if leave.get(u, len(PHASES)) > phase]

    everyone = {u: clients[u].keys() for u in stay(0)}
    shares = {u: clients[u].shares(everyone, most) for u in stay(1)}
    sent = {u: clients[u].masked({v: each[u] for v, each in shares.items() if v != u}, words[u]) for u in stay(2)}
    told = {u: clients[u].unmasking(sent) for u in stay(3)}
    return point.decode(unmasked(everyone, sent, told, most, crypto))


def secure_bytes(clients: int, numel: int, bits: int = 32) -> int:
    """Bytes that a client sends in a secure sum: keys, shares for the others, the vector, and shares to unmask."""
    return keys_bytes() + (clients - 1) * sealed_bytes() + numel * bits // 8 + clients * _SHARE_BYTES


def secure_down_bytes(clients: int) -> int:
    """Bytes that a client receives for a secure sum: the keys of all, and the others' shares for it."""
    return clients * keys_bytes() + (clients - 1) * sealed_bytes()


def split(secret: bytes, threshold: int, holders: Collection[int], random: Random) -> dict[int, bytes]:
    """Shares of a secret of 32 bytes: any `threshold` of them give it again, fewer tell nothing (Shamir, 1979).

    The share of holder u is f(u + 1), f a random polynomial of degree threshold - 1 with f(0) the secret.
    """
    factors = [int.from_bytes(secret, "big"), *(int.from_bytes(random(48), "big") for _ in range(threshold - 1))]
    found = {}
    for holder in holders:
        value = 0
        for factor in reversed(factors):
            value = (value * (holder + 1) + factor) % _FIELD
        found[holder] = value.to_bytes(_SHARE_BYTES, "big")
    return found


def joined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret of at least `threshold` shares, by holder: Lagrange's polynomial at 0.

    Cost: a product a share; the factors of holders are computed once, see `lagrange_factors`.
    """
    _enough(shares, threshold, "unmasking")
    some = dict(list(shares.items())[:threshold])
    factors = _known_factors(tuple(some))
    secret = sum(int.from_bytes(share, "big") * factor for share, factor in zip(some.values(), factors, strict=True))
    return (secret % _FIELD).to_bytes(_SHARE_BYTES, "big")[-_KEY_BYTES:]


def lagrange_factors(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Each holder's factor in f(0) = Σ factor · f(holder + 1), for a polynomial of a degree below their number.

    Cost: t² products for t holders.
    """
    found = []
    for holder in holders:
        above, below = 1, 1
        for other in holders:
            if other != holder:
                above, below = above * (other + 1) % _FIELD, below * (other - holder) % _FIELD
        found.append(above * pow(below, -1, _FIELD) % _FIELD)
    return tuple(found)


_known_factors = lru_cache(maxsize=32)(lagrange_factors)
"""All secrets of a sum have the same holders, but for wrong shares."""


def mask(key: bytes, like: Words, crypto: Primitives) -> Words:
    """PRG(key), as long as `like`."""
    return np.frombuffer(crypto.stream(key, like.nbytes), like.dtype)


def _pair_key(crypto: Primitives, own: bytes, other: PublicKeys, agreed: bytes) -> bytes:
    """The key of a pair's mask."""
    return hashlib.sha256(crypto.agree(own, other.masking) + agreed).digest()


def _add_(total: Words, key: bytes, plus: bool, crypto: Primitives) -> None:
    """Add a pair's mask to the side of the smaller number; take it off on the other."""
    pair = mask(key, total, crypto)
    (np.add if plus else np.subtract)(total, pair, out=total)


def _nonce(sender: int, receiver: int) -> bytes:
    """Keys are of a pair and a round, so that the direction is enough."""
    return sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")


def _enough(clients: Collection[int], threshold: int, phase: str) -> None:
    if len(clients) < threshold:
        raise ValueError(
            f"{len(clients)} clients are left in the phase {phase!r} of a secure sum, and it needs {threshold}; sum "
            "again with the clients left, or take a smaller threshold"
        )
