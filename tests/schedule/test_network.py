"""What a network costs, and how it is written."""

import math

import pytest

from lightning_sparse.schedule.network import DIRECT_BYTES, Network, parse_bandwidth, parse_latency


def test_bandwidths_and_latencies_are_read():
    assert [parse_bandwidth(text) for text in ("1gbit", "2.5gbit", "100mbit", "64kbit")] == [1e9, 2.5e9, 1e8, 64_000]
    assert [parse_bandwidth(text) for text in ("25Gb/s", "25Gbit/s", "25Gbps", "25000Mbps", "25e9")] == [25e9] * 5
    assert [parse_latency(text) for text in ("100us", "0.5ms", "2s", "0")] == pytest.approx([1e-4, 5e-4, 2.0, 0])


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_bandwidth, ["1gib", "1", "gbit", "1 gbit", "-1gbit", "1GB/s", "25", "infgbit", "", "0mbit"]),
        (parse_latency, ["1", "100 us", "-1ms", "1min", "nan"]),
    ],
)
def test_other_texts_are_refused(parse, texts):
    for text in texts:
        with pytest.raises(ValueError, match=parse.__name__.removeprefix("parse_")):
            parse(text)


# 4 workers, 1 Gbit/s, 100 us; 1 MB takes 8 ms on a link.
@pytest.mark.parametrize(
    ("collective", "seconds"),
    [
        ("all_reduce", 6 * 100e-6 + 1.5 * 8e-3),
        ("all_gather", 6 * 100e-6 + 3 * 8e-3),
        ("all_to_all", 2 * 100e-6 + 0.75 * 8e-3),
    ],
)
def test_collectives_cost_what_rings_cost(collective, seconds):
    assert Network(1e9, 100e-6, 4).seconds(collective, 1_000_000) == pytest.approx(seconds)


def test_what_is_short_goes_to_all_workers_at_once():
    network = Network(1e9, 1.0, 4)
    assert network.seconds("all_gather", DIRECT_BYTES / 4) == pytest.approx(2, abs=0.1)
    assert network.seconds("all_gather", DIRECT_BYTES / 4 + 1) == pytest.approx(6, abs=0.1)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("bandwidth", 0.0),
        ("bandwidth", math.nan),
        ("latency", -1e-4),
        ("latency", math.nan),
        ("workers", 1),
        ("workers", 2.5),
    ],
)
def test_networks_that_make_no_sense_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"{argument}="):
        Network(1e9, 0.0, 2)._replace(**{argument: value}).checked()
