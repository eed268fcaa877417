"""A server's session with a trainer, without sockets."""

from typing import Any, cast

import pytest

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes import Sync
from fleet.parameter_server.server import trainer_session
from fleet.parameter_server.server.trainer_session import TrainerSession
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.wire import Header, Hello, Identity, Kind
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
    monkeypatch.setattr(trainer_session, "MOST_ROW_BYTES", 24)
    server, stream = OneServer(Sync(), 6), Stream()

    def nothing(*_: object) -> None:
        pass

    identity = Identity(0, 5, 0)
    session = TrainerSession(
        identity,
        server.shard,
        server.mode,
        Hello("", 2),
        "",
        None,
        EventLoop(1),
        deliver=nothing,
        on_connected=nothing,
    )
    monkeypatch.setattr(session, "_stream", cast("Any", stream))

    def look_up(taken: int) -> None:
        header = Header(Kind.LOOK_UP, 0, 0, 0, block=0, taken=taken)
        session.check_unread(header)
        session.send_rows(header, memoryview(bytes(12)))

    for taken in (0, 0, 1, 3):
        look_up(taken)
    look_up(3)
    with pytest.raises(
        RemoteProtocolError, match=r"trainer 5 requests more rows .* read 24 bytes .* at most 24 unread bytes"
    ):
        look_up(3)
    assert stream.sent == 5
