"""What a replica on this machine needs before it is started."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from fleet_operator.cluster import ClusterError
from fleet_operator.local.log import begin_log, printable, split_time, tail


def test_each_life_of_a_replica_is_read_from_its_own_head_on(tmp_path: Path):
    log = tmp_path / "trainer-0.log"
    log.write_text("an earlier life\n")
    start = begin_log(log, "=== trainer 0 ===")
    assert log.read_text() == "an earlier life\n=== trainer 0 ===\n"
    assert start == log.stat().st_size


@pytest.mark.parametrize(
    ("path", "why"),
    [
        pytest.param("/dev/full", "No space left on device", id="a-full-disk"),
        pytest.param("/no/such/trainer-0.log", "No such file or directory", id="no-folder"),
    ],
)
def test_a_log_that_cannot_be_written_is_named_with_the_remedy(path: str, why: str):
    with pytest.raises(ClusterError, match=rf"the log {path} cannot be written: {why}; .*--log-dir"):
        begin_log(Path(path), "=== trainer 0 ===")


def test_the_last_words_of_a_life_are_without_the_times(tmp_path: Path):
    log = tmp_path / "trainer-0.log"
    log.write_text("earlier\n2026-11-22T18:30:00.123Z Traceback\n2026-11-22T18:30:00.124Z ValueError: 2026\n")
    assert tail(log, len("earlier\n")) == "Traceback\nValueError: 2026"


def test_a_line_says_when_it_was_printed():
    moment = datetime(2026, 11, 22, 18, 30, 0, 123000, tzinfo=UTC)
    assert split_time("2026-11-22T18:30:00.123Z step 1") == (moment, "step 1")
    assert split_time("=== trainer-0 ===") == (None, "=== trainer-0 ===")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        pytest.param("10%\r20%\r30%\r", "30%", id="a-progress-bar"),
        pytest.param("\x1b[1;31mloss\x1b[0m .5", "loss .5", id="colours"),
        pytest.param("\x1b]0;title\x07\x1b[2Jx\x08\x00", "x", id="what-a-terminal-would-obey"),
        pytest.param("a\tb é", "a\tb é", id="text"),
    ],
)
def test_a_line_obeys_nobody_on_a_terminal(line: str, shown: str):
    assert printable(line) == shown
