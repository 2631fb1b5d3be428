"""Quantities as people write them: 1gbit, 0.2ms, 7MiB."""

from __future__ import annotations

import re

from tether.errors import UsageError

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BITS_PER_SECOND = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def seconds(text: str | float, what: str = "a time") -> float:
    """'0.2ms' as 0.0002."""
    return _read(text, _SECONDS, what, "0.2ms or 1.5s")


def byte_count(text: str | float, what: str = "a size") -> int:
    """'7MiB' as 7340032."""
    return int(_read(text, _BYTES, what, "7MiB or 300MB"))


def bytes_per_second(text: str | float, what: str = "a bandwidth") -> float:
    """'1gbit' as 125000000.0; a bare number is bytes per second."""
    units = {"": 1.0, **{unit: n / 8 for unit, n in _BITS_PER_SECOND.items()}}
    return _read(text, units, what, "1gbit or 100mbit")


def _read(text: str | float, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    if isinstance(text, int | float):
        value, unit = float(text), ""
    else:
        match = re.fullmatch(r"\s*(-?[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
        if match is None or match[2] not in units:
            known = ", ".join(unit for unit in units if unit)
            raise UsageError(f"{what} cannot be {text!r}; write a number and a unit ({known}), such as {example}")
        try:
            value, unit = float(match[1]), match[2]
        except ValueError:
            raise UsageError(f"{what} cannot be {text!r}; write a number such as {example}") from None
    if value < 0:
        raise UsageError(f"{what} cannot be negative: {text!r}")
    return value * units[unit]
