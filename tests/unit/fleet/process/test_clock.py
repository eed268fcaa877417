"""The time of a watcher, by a clock that the test turns."""

from fleet.process.clock import WatchClock


def test_time_in_which_the_watcher_was_frozen_does_not_count():
    moments = iter([100.0, 101.0, 106.0, 1006.0, 1007.0])
    clock = WatchClock(5.0, lambda: next(moments))
    assert [clock.now() for _ in range(4)] == [101.0, 106.0, 111.0, 112.0]


def test_on_a_machine_where_every_look_is_late_time_goes_on():
    moments = iter(range(0, 10_000, 50))
    clock = WatchClock(5.0, lambda: float(next(moments)))
    assert [clock.now() for _ in range(4)] == [5.0, 10.0, 15.0, 20.0]
