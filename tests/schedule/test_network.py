"""What a network costs, and how it is written."""

import math

import pytest

from lightning_sparse.schedule.cost.network import DIRECT_BYTES, Network, parse_bandwidth, parse_latency


@pytest.mark.parametrize(
    ("text", "bandwidth"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("100mbit", 1e8), ("64kbit", 64_000), ("25gbit", 25e9)]
)
def test_bandwidths_are_read(text, bandwidth):
    assert parse_bandwidth(text) == bandwidth


@pytest.mark.parametrize(("text", "latency"), [("100us", 1e-4), ("1ms", 1e-3), ("0.5ms", 5e-4), ("2s", 2.0), ("0", 0)])
def test_latencies_are_read(text, latency):
    assert parse_latency(text) == pytest.approx(latency)


REFUSED = {
    parse_bandwidth: ["1gib", "1", "gbit", "1 gbit", "-1gbit", "1gbps", "1e9", "infgbit", "", "0mbit"],
    parse_latency: ["1", "100 us", "-1ms", "1min", "nan"],
}


@pytest.mark.parametrize(("parse", "text"), [(parse, text) for parse, texts in REFUSED.items() for text in texts])
def test_other_texts_are_refused(parse, text):
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
    ("network", "message"),
    [
        (Network(0.0, 0.0, 2), r"bandwidth=0.0 must be finite bits per second above 0"),
        (Network(math.inf, 0.0, 2), r"bandwidth=inf must be finite"),
        (Network(math.nan, 0.0, 2), r"bandwidth=nan must be finite"),
        (Network(1e9, -1e-4, 2), r"latency=-0.0001 must be finite seconds, at least 0"),
        (Network(1e9, math.nan, 2), r"latency=nan must be finite"),
        (Network(1e9, 0.0, 1), r"workers=1 must be a whole number of processes, at least 2"),
        (Network(1e9, 0.0, 2.5), r"workers=2.5 must be a whole number"),
    ],
)
def test_networks_that_make_no_sense_are_refused(network, message):
    with pytest.raises(ValueError, match=message):
        network.checked()
