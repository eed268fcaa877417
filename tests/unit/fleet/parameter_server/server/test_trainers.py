"""The frames of a server's trainers, without sockets."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes import Sync
from fleet.parameter_server.server import trainers as trainers_module
from fleet.parameter_server.server.trainer_session import TrainerSession
from fleet.parameter_server.server.trainers import Serving, Trainers
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport.connection import Frame
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.wire import Header, Hello, Identity, Kind
from fleet.wire.rows import pack_ids
from tests.support.modes import OneServer


class Stream:
    """A stream to a trainer that counts what is sent."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, *_: object, **__: object) -> int:
        """Count a frame."""
        self.sent += 1
        return self.sent


def test_a_trainer_that_looks_up_more_rows_without_reading_answers_is_refused(monkeypatch):
    monkeypatch.setattr(trainers_module, "MOST_ROW_BYTES", 24)
    server, stream, unused = OneServer(Sync(), 6), Stream(), cast("Any", None)
    monkeypatch.setattr(server.mode, "look_up", lambda *_: torch.zeros(3, 1))
    trainers = Trainers(
        server.shard, server.mode, unused, {}, {}, Settings(), Serving(), unused, unused, unused, unused
    )
    session = TrainerSession(
        Identity(0, 5, 0),
        server.shard,
        server.mode.turn,
        Hello("", 2),
        "",
        None,
        EventLoop(1),
        deliver=trainers.take,
        on_connected=trainers.connected,
    )
    session.begun, session.row_bytes = True, {0: 4}
    monkeypatch.setattr(session, "stream", stream)

    def look_up(taken: int) -> None:
        header = Header(Kind.LOOK_UP, 0, 0, 0, block=0, taken=taken)
        trainers.take(session, Frame(header, pack_ids(np.arange(3))), in_pool=True)

    for taken in (0, 0, 1, 3):
        look_up(taken)
    look_up(3)
    with pytest.raises(
        RemoteProtocolError, match=r"trainer 5 requests more rows .* read 24 bytes .* at most 24 unread bytes"
    ):
        look_up(3)
    assert stream.sent == 5
