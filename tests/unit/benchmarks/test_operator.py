"""What the operator's benchmark makes of its measurements."""

import json

import pytest

from benchmarks import operator
from benchmarks.bare_client import NUM_PODS, job_manifest, objects
from fleet_operator.api import parse_job

FIGURES = ("created_per_s", "running_per_s", "running_p50_s", "running_p99_s")


def figures(value: float) -> dict[str, float]:
    return dict.fromkeys(FIGURES, value)


def test_ratios_are_taken_within_a_round():
    rounds = [{"bare": figures(each), "fleet": figures(each / 2)} for each in (1.0, 10.0, 1000.0)]
    found = operator.report(rounds)
    assert found["ratios"] == figures(0.5)
    assert found["bare"] == figures(10.0)
    json.dumps(found, allow_nan=False)


def test_a_single_job_has_percentiles_too():
    assert operator._percentile([2.0], 99) == 2.0
    assert operator._percentile(list(range(101)), 99) == pytest.approx(99)


def test_the_bare_client_creates_what_the_operator_does():
    made = list(objects(parse_job(job_manifest("job-0", "default"))))
    assert [plural for plural, _ in made] == ["services", *["pods"] * NUM_PODS]
    assert {manifest["metadata"]["name"] for plural, manifest in made if plural == "pods"} == {
        f"job-0-{role}-{index}" for role in ("pserver", "trainer") for index in (0, 1)
    }
    assert all(1500 < len(json.dumps(manifest)) < 6000 for plural, manifest in made if plural == "pods")
