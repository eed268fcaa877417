"""How the supervisor writes down what a process prints."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

from fleet_operator.local.log import without_times
from fleet_operator.local.supervisor import Log


class Disk(io.RawIOBase):
    """A file on a disk that may be full."""

    def __init__(self) -> None:
        self.full = False
        self.written = b""

    def write(self, data: Any) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += data
        return len(data)


def test_what_found_no_room_is_counted_in_the_log_once_there_is_room():
    disk = Disk()
    log = Log(disk)
    for full, text in ((False, b"kept\n"), (True, b"lost\n"), (True, b"lost, and"), (False, b" the rest\n")):
        disk.full = full
        os.write(log.writer, text)
        assert log.take()
    os.close(log.writer)
    assert not log.take()
    assert log.ended
    stamp = len("2026-11-22T18:30:00.000Z ")
    lost = len("lost\nlost, and") + 2 * stamp
    expected = f"kept\n\n=== {lost} bytes are missing here: no room ===\n the rest\n"
    assert without_times(disk.written.decode()) == expected
