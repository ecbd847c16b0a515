"""What a link looks like: how rates and delays are written, and what follows from them."""

import re
from collections.abc import Mapping

_BITS_PER_SECOND = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MICROSECONDS = {"us": 1, "ms": 10**3, "s": 10**6}


def parse_rate(rate: str) -> int:
    """Return bits per second.

    Raises:
        ValueError: unless ``rate`` is a number above zero with ``kbit``, ``mbit`` or ``gbit``.

    Example::

        >>> parse_rate("2.5gbit")
        2500000000
    """
    bits_per_second = _parse(rate, _BITS_PER_SECOND, "rate", "1gbit")
    if not bits_per_second:
        raise ValueError(f"rate {rate!r} must be above zero")
    return bits_per_second


def parse_delay(delay: str) -> int:
    """Return microseconds.

    Raises:
        ValueError: unless ``delay`` is ``0``, or a number with ``us``, ``ms`` or ``s``.

    Example::

        >>> parse_delay("0.5ms")
        500
    """
    return 0 if delay == "0" else _parse(delay, _MICROSECONDS, "delay", "100us")


def burst_bytes(bits_per_second: int) -> int:
    """Return how much may pass at once after a pause: 128 KiB for each Gbit/s, 32 KiB on links below 1 Gbit/s."""
    return (128 << 10) * bits_per_second // 10**9 if bits_per_second >= 10**9 else 32 << 10


def _parse(text: str, units: Mapping[str, int], kind: str, example: str) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
    if match is None:
        raise ValueError(f"{kind} {text!r} must be a number and one of {', '.join(units)}, such as {example!r}")
    return round(float(match[1]) * units[match[2]])
