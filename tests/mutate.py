"""Damage such as disks, networks and attackers cause, for tests of everything that decodes bytes."""

from __future__ import annotations

import random

PAGE_BYTES = 4096
#: lengths that an attacker may claim
LENGTHS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x7FFF_FFFF_FFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF)


def mutations(data: bytes, rng: random.Random) -> bytes:
    """The data with one to three kinds of damage; always changed, unless it was empty."""
    damaged = data
    while damaged == data:
        for _ in range(rng.randint(1, 3)):
            damaged = rng.choice(_KINDS)(damaged, rng)
        if not data:
            break
    return damaged


def _flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4) if data else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] if data else data


def _zero_page(data: bytes, rng: random.Random) -> bytes:
    """Zero a page, as a crash of a file system does; if the data are shorter than a page, a part of them."""
    size = min(PAGE_BYTES, max(1, len(data) // 4))
    start = rng.randrange(len(data) // size + 1) * size
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def _set_length(data: bytes, rng: random.Random) -> bytes:
    """Write a number of 1 to 8 bytes, which may be read as a length, at a random place or at the very beginning."""
    width = rng.choice((1, 2, 4, 8))
    start = rng.choice((0, rng.randrange(len(data) + 1)))
    claimed = rng.choice(LENGTHS) & (1 << 8 * width) - 1
    return data[:start] + claimed.to_bytes(width, rng.choice(("little", "big"))) + data[start + width :]


def _set_digits(data: bytes, rng: random.Random) -> bytes:
    """Replace a digit in a text by something else: a negative, fractional or huge number, or not a number at all."""
    places = [at for at, byte in enumerate(data[:65536]) if chr(byte).isdigit()]
    if not places:
        return _flip_bits(data, rng)
    start = rng.choice(places)
    other = rng.choice((b"-1", b"1.5", b"1e999", b"9" * 30, b"null", b'"x"', b"[]", b"{}", b"true"))
    return data[:start] + other + data[start + 1 :]


def _move(data: bytes, rng: random.Random) -> bytes:
    """Copy a part of the data to another place, over the bytes there or before them."""
    start, target = (rng.randrange(len(data) + 1) for _ in range(2))
    part = data[start : start + rng.randint(1, 64)]
    return data[:target] + part + data[target + len(part) * rng.randint(0, 1) :]


def _remove(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randint(1, 64) :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    found = rng.choice((rng.randbytes(rng.randint(1, 16)), b"[" * rng.choice((8, 5000)), b"\xff\xfe", b"\n", b"\0"))
    return data[:start] + found + data[start:]


_KINDS = (_flip_bits, _truncate, _zero_page, _set_length, _set_digits, _move, _remove, _insert)
