"""What the benchmark of requests counts, and what it measures."""

import os
import time
from typing import Any

import pytest

from benchmarks import request_price
from benchmarks.price_systems import LOOK_UPS, id_batches
from benchmarks.systems import SYSTEMS


def test_processor_time_is_that_of_the_kernel():
    before, own = request_price.processor_seconds(os.getpid()), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    assert request_price.processor_seconds(os.getpid()) - before == pytest.approx(0.2, abs=0.05)


def test_what_a_process_holds_is_counted(tmp_path):
    before = request_price.held_by(os.getpid())
    with (tmp_path / "file").open("w"):
        held = request_price.held_by(os.getpid())
    assert held.descriptors == before.descriptors + 1
    assert held.threads >= 1
    assert held.megabytes > 10


def test_every_system_is_known():
    for system in request_price.SYSTEMS:
        for workload in request_price.WORKLOADS:
            assert (SYSTEMS[f"{system}_{workload}"].serve is None) is (system == "priceplain")


def test_trainers_look_up_rows_of_their_own():
    one, other = id_batches(0)[0], id_batches(1)[0]
    assert one.shape == (LOOK_UPS,)
    assert not one.equal(other)


def measured(servers_ms: float, trainer_ms: float, server: int, trainer: int) -> dict[str, Any]:
    """Return what a system cost, with the descriptors of a server and of a trainer."""
    prices = {"servers_ms": {"median": servers_ms}, "trainer_ms": {"median": trainer_ms}}
    return prices | {"server": {"descriptors": server}, "trainer": {"descriptors": trainer}}


CASES = {
    "1x1 table": {"pricesync": measured(1.0, 2.0, 30, 20)},
    "1x5 table": {"pricesync": measured(4.0, 3.0, 30, 40)},
    "5x1 table": {"pricesync": measured(0.5, 2.0, 50, 20)},
}
BEATS = {"1x5": {"server": 9.0, "trainer": 1.0}, "5x1": {"server": 2.0, "trainer": 9.0}}


def test_a_large_job_costs_what_its_many_small_requests_cost():
    costs = request_price.cost_of(100, 21, CASES, BEATS)
    assert costs is not None
    server, trainer = costs["server"], costs["trainer"]
    # .8 ms for a trainer, of which many trainers save half; each pays 2 ms every 2 s for its heartbeats.
    assert (server.step_ms, server.beats) == pytest.approx((40.0, 0.1))
    assert server.steps_per_second == pytest.approx(0.9 * 25)
    assert server.descriptors == 30 + 99 * 5
    assert (trainer.step_ms, trainer.beats) == pytest.approx((2.0 + 20 * 0.25, 21 * 0.0005))
    assert trainer.descriptors == 20 + 20 * 5


def test_heartbeats_alone_can_be_too_much_for_a_server():
    costs = request_price.cost_of(2000, 1, CASES, BEATS)
    assert costs is not None
    assert costs["server"].steps_per_second == 0.0


@pytest.mark.parametrize("missing", CASES)
def test_nothing_is_computed_from_too_few_shapes(missing):
    assert (
        request_price.cost_of(9, 9, {case: CASES[case] for case in CASES if case != missing}, BEATS) is None
    )


@pytest.mark.parametrize(
    "flags",
    [
        ["--systems=ddp"],
        ["--workloads=x"],
        ["--shapes=8"],
        ["--heartbeats=0x1"],
        ["--jobs=1x0"],
        ["--rounds=0"],
        ["--steps=0"],
    ],
)
def test_a_bad_flag_ends_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["request_price", *flags])
    with pytest.raises(SystemExit) as ended:
        request_price.main()
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err
