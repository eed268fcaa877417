"""The launchers' rules, case by case."""

import pytest

from fleet.launch.decision import (
    SERVER_SECONDS,
    STOP_SECONDS,
    Action,
    Decision,
    Observed,
    Stop,
    decide,
    is_of_signal,
)


def server(status: int | None = None, at: float | None = None, index: int = 0) -> Observed:
    return Observed(f"server {index}", True, status, at)


def worker(status: int | None = None, at: float | None = None, index: int = 0) -> Observed:
    return Observed(f"worker {index}", False, status, at)


STOPPING = Stop("worker 0 failed with exit status 7", 7, since=100.0)

CASES = [
    pytest.param([server(), worker()], None, 5.0, Decision(Action.WAIT), id="all-run"),
    pytest.param([server(0, 9.0), worker(0, 9.0)], None, 9.0, Decision(Action.END), id="all-ended-well"),
    pytest.param(
        [server(), worker(7, 5.0), worker(index=1)],
        None,
        5.0,
        Decision(Action.STOP, "worker 0 failed with exit status 7", 7, "worker 0"),
        id="a-failed-worker-stops-the-others",
    ),
    pytest.param(
        [server(1, 5.0), worker()],
        None,
        5.0,
        Decision(Action.STOP, "server 0 failed with exit status 1", 1, "server 0"),
        id="a-failed-server-stops-the-others",
    ),
    pytest.param(
        [worker(91, 5.2), worker(137, 5.1, index=1)],
        None,
        5.3,
        Decision(Action.STOP, "worker 1 was ended by signal 9", 137, "worker 1"),
        id="the-earliest-failure-is-the-cause",
    ),
    pytest.param(
        [worker(0, 5.0), worker(3, 6.0, index=1)],
        None,
        6.0,
        Decision(Action.STOP, "worker 1 failed with exit status 3", 3, "worker 1"),
        id="a-failure-counts-when-nothing-runs-any-more",
    ),
    pytest.param(
        [server(0, 1.0), worker()],
        None,
        2.0,
        Decision(Action.WAIT),
        id="a-server-that-ended-well-is-no-failure",
    ),
    pytest.param(
        [server(), worker(0, 10.0), worker(0, 12.0, index=1)],
        None,
        13.0,
        Decision(Action.WAIT, until=12.0 + SERVER_SECONDS),
        id="servers-get-time-after-the-last-worker",
    ),
    pytest.param(
        [server(), worker(0, 12.0)],
        None,
        12.0 + SERVER_SECONDS,
        Decision(Action.STOP, "every worker ended well; server 0 still ran 30 s later"),
        id="a-server-that-stays-is-stopped-without-failing-the-job",
    ),
    pytest.param(
        [worker(7, 100.0), worker(index=1)],
        STOPPING,
        101.0,
        Decision(Action.WAIT, STOPPING.reason, 7, until=100.0 + STOP_SECONDS),
        id="sigterm-gets-its-time",
    ),
    pytest.param(
        [worker(7, 100.0), worker(index=1)],
        STOPPING,
        100.0 + STOP_SECONDS,
        Decision(Action.END, STOPPING.reason, 7),
        id="then-what-still-runs-is-killed",
    ),
    pytest.param(
        [worker(index=1)],
        Stop("SIGTERM", 143, since=100.0, seconds=25.0),
        124.0,
        Decision(Action.WAIT, "SIGTERM", 143, until=125.0),
        id="a-launcher-that-is-stopped-gives-as-long-as-it-was-given",
    ),
    pytest.param(
        [worker(7, 100.0), worker(143, 100.5, index=1)],
        STOPPING,
        100.6,
        Decision(Action.END, STOPPING.reason, 7),
        id="the-status-is-the-first-failure's",
    ),
]


@pytest.mark.parametrize(("observed", "stop", "now", "expected"), CASES)
def test_decide(observed, stop, now, expected):
    assert decide(observed, stop, now) == expected


@pytest.mark.parametrize(
    ("status", "is_one"),
    [
        pytest.param(1, False, id="an-error"),
        pytest.param(128, False, id="no-signal"),
        pytest.param(137, True, id="sigkill"),
        pytest.param(255, False, id="of-exit-minus-one"),
    ],
)
def test_the_exit_status_of_a_signal(status, is_one):
    assert is_of_signal(status) is is_one
