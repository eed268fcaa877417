"""What the launchers show of a failed process."""

import sys

import pytest

from fleet.launch.supervisor import TAIL_LINES, Command, last_lines, run
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


def test_the_end_of_a_log_is_shown_without_reading_all_of_it(tmp_path):
    path = tmp_path / "workerlog.0"
    lines = [f"line {number}" for number in range(100)]
    with path.open("wb") as file:
        file.truncate(1 << 40)  # without blocks: it takes no disk, and would take as much memory to be read
        file.seek(1 << 40)
        file.write(b"\n" + "\n".join(lines).encode())
    assert last_lines(path) == lines[-TAIL_LINES:]


def test_a_short_log_is_shown_whole(tmp_path):
    path = tmp_path / "workerlog.0"
    path.write_bytes(b"first\nnot utf-8: \xff\n")
    assert last_lines(path) == ["first", "not utf-8: \ufffd"]


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
def test_the_exception_of_the_process_that_failed_is_the_launchers_last_word(
    tmp_path, monkeypatch, log, end, said
):
    monkeypatch.setenv("FLEET_TERMINATION_LOG", str(tmp_path / "words"))
    script = f"import os, sys; sys.stderr.write({log!r}); sys.stderr.flush(); {end}"
    run([Command("worker 1", is_server=False, argv=[sys.executable, "-c", script], environ={})], None)
    assert (tmp_path / "words").read_text().splitlines()[-1] == said
