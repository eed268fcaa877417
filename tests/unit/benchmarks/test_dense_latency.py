"""What the latency benchmark makes of its measurements."""

import json

import pytest

from benchmarks import dense_latency
from benchmarks.systems import rpc_part
from benchmarks.workload import TINY_WIDTHS, Config, count_parameters


def test_percentiles_are_milliseconds():
    found = dense_latency.percentiles([step / 1000 for step in range(101)])
    assert list(found) == pytest.approx([50.0, 99.0])


def test_ratios_are_taken_within_a_round():
    measured = {"rpc 2x2": [(2.0, 4.0), (20.0, 40.0)], "fleet 2x2": [(1.0, 1.0), (10.0, 10.0)]}
    summary = dense_latency.report(measured, steps=300)
    assert summary["ratios"]["fleet/rpc p50"]["median"] == 0.5
    assert summary["ratios"]["fleet/rpc p99"]["median"] == 0.25
    json.dumps(summary, allow_nan=False)


def test_the_model_is_tiny():
    assert 9_000 < 4 * count_parameters(TINY_WIDTHS) < 11_000


@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_every_layer_is_on_one_server(num_servers):
    config = Config("rpc", "server", 0, num_servers, 2, (), TINY_WIDTHS)
    parts = [rpc_part(config, index) for index in range(num_servers)]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    assert sum(parameter.numel() for parameter in parameters) == count_parameters(TINY_WIDTHS)
    assert all(list(part.parameters()) for part in parts)
