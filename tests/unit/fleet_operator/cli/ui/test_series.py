from __future__ import annotations

from fleet_operator.cli.ui.series import Series, thin


def test_a_restart_drops_the_points_of_its_own_replica_only():
    series = Series()
    for step in range(1, 6):
        series.add("trainer-0", step, {"loss": float(step)})
        series.add("trainer-1", step, {"loss": float(step)})
    series.drop("trainer-0", 3)
    series.add("trainer-0", 3, {"loss": 30.0})
    curves = series.thinned()["loss"]
    assert curves["trainer-0"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert len(curves["trainer-1"]) == 5


def test_a_step_is_added_once():
    series = Series()
    series.add("trainer-0", 2, {"loss": 1.0})
    series.add("trainer-0", 2, {"loss": 9.0})
    series.add("trainer-0", 1, {"loss": 9.0})
    assert series.thinned() == {"loss": {"trainer-0": [(2, 1.0)]}}


def test_a_thinned_curve_keeps_its_ends_and_its_spikes():
    curve = [(step, 1.0) for step in range(10_000)]
    curve[4321] = (4321, 50.0)
    curve[7777] = (7777, -50.0)
    thinned = thin(curve, 100)
    assert len(thinned) <= 100
    assert {(0, 1.0), (4321, 50.0), (7777, -50.0), (9999, 1.0)} <= set(thinned)
    assert list(thinned) == sorted(thinned)
