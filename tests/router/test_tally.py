"""The cheap metrics read like prometheus_client's own."""

import prometheus_client

from router import tally

BOUNDS = (0.005, 0.1, 2)
VALUES = [0.001, 0.005, 0.0051, 0.1, 1.5, 2.0, 2.5, 1000.0]


def exposition(*collectors) -> list[str]:
    registry = prometheus_client.CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    text = prometheus_client.generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


def test_a_histogram_shows_what_prometheus_client_would_show():
    theirs = prometheus_client.Histogram("wait_seconds", "Waiting", buckets=BOUNDS, registry=None)
    ours = tally.Histogram("wait_seconds", "Waiting", BOUNDS)
    for value in VALUES:
        theirs.observe(value)
        ours.observe(value)
    assert exposition(ours) == exposition(theirs)
    assert 'wait_seconds_bucket{le="0.005"} 2.0' in exposition(ours)  # a value on a bound is within it


def test_a_counter_shows_what_prometheus_client_would_show():
    theirs = prometheus_client.Counter("tokens_total", "Tokens", registry=None)
    ours = tally.Counter("tokens", "Tokens")
    theirs.inc(7)
    ours.value += 7
    assert exposition(ours) == exposition(theirs)
