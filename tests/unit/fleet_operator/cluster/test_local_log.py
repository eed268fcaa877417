"""What a replica on this machine needs before it is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_operator.cluster.interface import ClusterError
from fleet_operator.cluster.local_log import begin_log


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
