"""What a link looks like: how rates and delays are written, and what follows from them."""

from lightning_sparse.cli.estimate import read_rate, read_seconds


def parse_rate(rate: str) -> int:
    """Return bits per second.

    Raises:
        ValueError: unless ``rate`` is a number above zero with a unit such as ``mbit`` or ``gbit``.

    Example::

        >>> parse_rate("2.5gbit")
        2500000000
    """
    return round(read_rate(rate, "rate"))


def parse_delay(delay: str) -> int:
    """Return microseconds.

    Raises:
        ValueError: unless ``delay`` is ``0``, or a number with ``us``, ``ms`` or ``s``.

    Example::

        >>> parse_delay("0.5ms")
        500
    """
    return round(read_seconds(delay, "delay") * 1e6)


def slower_rate(rate: str, slower: float) -> str:
    """Return a rate divided by a factor.

    Example::

        >>> slower_rate("1gbit", 8)
        '125mbit'
    """
    return f"{parse_rate(rate) / slower / 1e6:g}mbit"


def slower_delay(delay: str, slower: float) -> str:
    """Return a delay times a factor.

    Example::

        >>> slower_delay("100us", 8)
        '800us'
    """
    return f"{parse_delay(delay) * slower:g}us"


def burst_bytes(bits_per_second: int) -> int:
    """Return how much may pass at once after a pause: 128 KiB for each Gbit/s, 32 KiB on links below 1 Gbit/s."""
    return (128 << 10) * bits_per_second // 10**9 if bits_per_second >= 10**9 else 32 << 10
