"""Format bytes, seconds and counts with few digits, and parse sizes that a user has typed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from meshcomm.errors import ConfigError

_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}
_BINARY = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def decimal_unit(number: float) -> tuple[str, float]:
    """Return a decimal unit in which `number` bytes can be written with few digits, and the unit's size in bytes."""
    return next((unit, size) for unit, size in _DECIMAL.items() if number >= 0.9995 * size or unit == "B")


def bytes_text(number: float) -> str:
    """Return a number of bytes as text, in a decimal unit.

    >>> bytes_text(512), bytes_text(3_200_000)
    ('512 B', '3.2 MB')
    """
    unit, size = decimal_unit(number)
    return f"{number / size:{'.3g' if number < 1000 * size else ',.0f'}} {unit}"


def size_text(number: int) -> str:
    """Return a number of bytes in a binary unit if it is an integer from 1 to 1,023 in that unit. Otherwise return it like
    `bytes_text`.

    >>> size_text(65536), size_text(64_000_000), size_text(4092)
    ('64 KiB', '64 MB', '4.09 kB')
    """
    for unit, size in _BINARY.items():
        if size <= number < 1024 * size and number % size == 0:
            return f"{number // size} {unit}"
    return bytes_text(number)


def count(number: int, what: str) -> str:
    """Return a number and a noun, with the noun in the plural if necessary.

    >>> count(1, "rank"), count(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """Return a duration as text in seconds, or in milliseconds or microseconds if it is shorter.

    >>> seconds_text(0.00025), seconds_text(12.0)
    ('250 us', '12 s')
    """
    if seconds == 0:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size * 0.9995:
            number = seconds / size
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
    return f"{seconds * 1e6:.2g} us"


def read_bytes(text: str) -> int:
    """Parse a size that a user has typed. Raises ConfigError if it is not a number of bytes.

    >>> read_bytes("64MB"), read_bytes("1.5 MiB"), read_bytes("4096")
    (64000000, 1572864, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.upper(): size for unit, size in (_DECIMAL | _BINARY).items()}
    unit = 0 if match is None else units.get(match[2].upper() or "B", 0)
    size = Fraction(0) if match is None else Fraction(match[1]) * unit
    if size < 1 or size.denominator != 1:
        raise ConfigError(
            f"{text!r} is not a number of bytes",
            given=text,
            expected="an integer of 1 or more, in B, kB, MB, GB, TB, KiB, MiB or GiB",
            hint="--bytes 64MB",
        )
    return int(size)


def assumed_text(facts: Mapping[str, Any], key: str) -> str:
    """Return a note that an H100's value is assumed for `topology.<key>`, or "" if the value was set."""
    if key not in facts["assumed"]:
        return ""
    other = "not of mesh.device cpu, " if facts["device"] == "cpu" else ""
    return f" (of an H100, {other}as topology.{key} is not set)"
