"""A server's part in a trainer's frames about tables, without sockets."""

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes import TabledServer
from fleet.parameter_server.modes.immediate_tables import ImmediateTables
from fleet.parameter_server.server import table_frames
from fleet.parameter_server.server.table_frames import TableFrames
from fleet.wire import Header, Kind
from fleet.wire.rows import pack_ids
from tests.support.row_modes import Tables


class Stream:
    """One to a trainer, which counts what is sent."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, *_: object, **__: object) -> int:
        """Count a frame."""
        self.sent += 1
        return self.sent


def look_up(frames: TableFrames, taken: int) -> None:
    """Let a trainer look three rows up, which has taken so many frames."""
    frames.look_up(Header(Kind.LOOK_UP, 0, 0, 0, block=0, taken=taken), pack_ids(np.array([1, 2, 3])), 8)


def test_a_trainer_that_asks_on_without_taking_answers_is_refused(monkeypatch):
    monkeypatch.setattr(table_frames, "MOST_ROW_BYTES", 24)
    mode = TabledServer(cast("Any", None), Tables(ImmediateTables).half, has_blocks=False)
    stream = Stream()
    frames = TableFrames(mode, 5, cast("Any", stream), nullcontext)
    for taken in (0, 0, 1, 3):
        look_up(frames, taken)
    look_up(frames, 3)
    with pytest.raises(
        RemoteProtocolError, match=r"trainer 5 asks .* not taken 24 bytes .* from 24 bytes on"
    ):
        look_up(frames, 3)
    assert stream.sent == 5
