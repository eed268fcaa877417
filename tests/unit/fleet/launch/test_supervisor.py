"""The launchers' rules, case by case, and what they show of a failed process."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleet.launch.supervisor import (
    SERVER_SECONDS,
    STOP_SECONDS,
    TAIL_LINES,
    Action,
    Command,
    Decision,
    Process,
    Stop,
    decide,
)
from tests.support.afterwards import DESTROY, TERMINATE, TRACKER

TRACE = """\
Traceback (most recent call last):
  File "/work/train.py", line 3, in <module>
    main()
train.NoData: label 1001 is out of range
"""
BY_RANK = "".join(f"[rank1]: {line}\n" for line in TRACE.splitlines())
NO_DATA = "train.NoData: label 1001 is out of range"
FAILED = "worker 1 failed with exit status 1"
ABORTED = "worker 1 was ended by signal 6"
LAUNCH = """
import sys
from fleet.launch.supervisor import Command, run

command = Command("worker 1", is_server=False, argv=[sys.executable, "-c", sys.argv[1]], environ={})
sys.exit(run([command], None))
"""
"""A launcher in a process of its own: it kills every child of its process, so those of the tests as well."""
NO_PROCESS: Any = None
"""The rules look at no process itself."""


def server(status: int | None = None, at: float | None = None, index: int = 0) -> Process:
    return Process(Command(f"server {index}", True, [], {}), NO_PROCESS, None, status, at)


def worker(status: int | None = None, at: float | None = None, index: int = 0) -> Process:
    return Process(Command(f"worker {index}", False, [], {}), NO_PROCESS, None, status, at)


STOPPING = Stop("worker 0 failed with exit status 7", 7, since=100.0)

CASES = [
    pytest.param([server(), worker()], None, 5.0, Decision(Action.WAIT), id="all-run"),
    pytest.param([server(0, 9.0), worker(0, 9.0)], None, 9.0, Decision(Action.END), id="all-ended-well"),
    pytest.param(
        [server(), worker(7, 5.0), worker(index=1)],
        None,
        5.0,
        Decision(Action.STOP, "worker 0 failed with exit status 7", 7, worker(7, 5.0)),
        id="a-failed-worker-stops-the-others",
    ),
    pytest.param(
        [server(1, 5.0), worker()],
        None,
        5.0,
        Decision(Action.STOP, "server 0 failed with exit status 1", 1, server(1, 5.0)),
        id="a-failed-server-stops-the-others",
    ),
    pytest.param(
        [worker(91, 5.2), worker(137, 5.1, index=1)],
        None,
        5.3,
        Decision(Action.STOP, "worker 1 was ended by signal 9", 137, worker(137, 5.1, index=1)),
        id="the-earliest-failure-is-the-cause",
    ),
    pytest.param(
        [worker(0, 5.0), worker(3, 6.0, index=1)],
        None,
        6.0,
        Decision(Action.STOP, "worker 1 failed with exit status 3", 3, worker(3, 6.0, index=1)),
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
        Decision(Action.STOP, "every worker ended with status 0; server 0 still ran 30 s later"),
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
    ("status", "how"),
    [
        pytest.param(1, "failed with exit status 1", id="an-error"),
        pytest.param(128, "failed with exit status 128", id="no-signal"),
        pytest.param(137, "was ended by signal 9", id="sigkill"),
        pytest.param(255, "failed with exit status 255", id="of-exit-minus-one"),
    ],
)
def test_an_exit_status_of_a_signal_is_named_as_one(status, how):
    assert decide([worker(status, 5.0)], None, 5.0).reason == f"worker 0 {how}"


def logged(path: Path) -> list[str]:
    return Process(Command("worker 0", False, [], {}), NO_PROCESS, path).last_lines()


def test_the_end_of_a_log_is_shown_without_reading_all_of_it(tmp_path):
    path = tmp_path / "workerlog.0"
    lines = [f"line {number}" for number in range(100)]
    with path.open("wb") as file:
        file.truncate(1 << 40)  # without blocks: it takes no disk, and would take as much memory to be read
        file.seek(1 << 40)
        file.write(b"\n" + "\n".join(lines).encode())
    assert logged(path) == lines[-TAIL_LINES:]


def test_a_short_log_is_shown_whole(tmp_path):
    path = tmp_path / "workerlog.0"
    path.write_bytes(b"first\nnot utf-8: \xff\n")
    assert logged(path) == ["first", "not utf-8: \ufffd"]


@pytest.mark.parametrize(
    ("log", "end", "said"),
    [
        pytest.param(BY_RANK, "sys.exit(1)", f"{FAILED}: {NO_DATA}", id="behind-the-rank"),
        pytest.param(
            BY_RANK + DESTROY, "sys.exit(1)", f"{FAILED}: {NO_DATA}", id="before-a-warning-of-torch"
        ),
        pytest.param(TRACE + TRACKER, "sys.exit(1)", f"{FAILED}: {NO_DATA}", id="before-a-warning-of-python"),
        pytest.param(
            TRACE + "Exception ignored in: <f>\n" + TRACE.replace("1001", "7"),
            "sys.exit(1)",
            f"{FAILED}: {NO_DATA}",
            id="before-what-python-passes-over",
        ),
        pytest.param(
            "x\n" * 99 + TRACE.replace("main()", "main()\n    ^^^^" * 12),
            "sys.exit(1)",
            f"{FAILED}: {NO_DATA}",
            id="whose-head-is-further-up",
        ),
        pytest.param(BY_RANK + TERMINATE, "os.abort()", f"{ABORTED}: {NO_DATA}", id="before-an-abort"),
        pytest.param(TERMINATE, "os.abort()", ABORTED, id="not-of-an-abort-without-one"),
        pytest.param(
            TRACE,
            "os.kill(os.getpid(), 9)",
            "worker 1 was ended by signal 9",
            id="not-before-a-kill-from-outside",
        ),
        pytest.param("Traceback\n  no\n  data\n\n", "sys.exit(1)", f"{FAILED}: data", id="none"),
    ],
)
def test_the_exception_of_the_process_that_failed_is_the_launchers_last_word(tmp_path, log, end, said):
    environ = {**os.environ, "FLEET_TERMINATION_LOG": str(tmp_path / "words")}
    script = f"import os, sys; sys.stderr.write({log!r}); sys.stderr.flush(); {end}"
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCH, script], env=environ, capture_output=True, timeout=30, check=False
    )
    assert ended.returncode != 0
    assert (tmp_path / "words").read_text().splitlines()[-1] == said


MANY = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
{LAUNCH}
"""


@pytest.mark.skipif(
    -1 < resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="so many files may not be open"
)
def test_a_launcher_may_have_more_than_a_thousand_open_files():
    script = "import sys; sys.stderr.write('here'); sys.exit(7)"
    ended = subprocess.run(
        [sys.executable, "-c", MANY, script], capture_output=True, timeout=30, check=False, text=True
    )
    assert (ended.returncode, ended.stderr[:4]) == (7, "here")
