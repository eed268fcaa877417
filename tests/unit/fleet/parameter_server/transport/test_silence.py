"""When an idle data connection is given up: the acknowledgements of its kernels are no sign of life."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleet.parameter_server.transport.sockets import BytesMoved
from fleet.parameter_server.transport.stream import SilenceWatchdog
from fleet.parameter_server.transport.tls import RECORD_BYTES
from fleet.wire import HEADER_BYTES, Kind


class Stream:
    """A stream of which only the counters of the kernel are known."""

    def __init__(self) -> None:
        self.moved = BytesMoved(1000, 1000)
        self.peer = "parameter server a:1"
        self.taken = 0
        self.sent: list[Kind] = []
        self.given_up = False

    def bytes_moved(self) -> BytesMoved:
        return self.moved

    def send(self, kind: Kind) -> None:
        self.sent.append(kind)

    def hang_up(self) -> None:
        self.given_up = True


@pytest.fixture
def watched() -> SimpleNamespace:
    stream = Stream()
    watchdog = SilenceWatchdog(cast("Any", stream), limit_seconds=10.0)
    watchdog.look(0.0)
    watchdog.look(5.0)
    assert stream.sent == [Kind.CONFIRM], "the server is probed"
    return SimpleNamespace(stream=stream, watchdog=watchdog)


@pytest.mark.parametrize(
    ("acknowledged", "received", "given_up"),
    [
        pytest.param(0, 0, True, id="nobody-takes-the-probe"),
        pytest.param(HEADER_BYTES, 0, True, id="a-kernel-takes-the-probe"),
        pytest.param(HEADER_BYTES + RECORD_BYTES, 0, True, id="a-kernel-takes-the-probe-encrypted"),
        pytest.param(2 * HEADER_BYTES, 0, False, id="what-was-sent-before-the-probe-is-taken-too"),
        pytest.param(HEADER_BYTES, HEADER_BYTES, False, id="the-server-answers"),
    ],
)
def test_what_counts_as_a_sign_of_life(watched, acknowledged: int, received: int, given_up: bool):
    watched.stream.moved = BytesMoved(1000 + acknowledged, 1000 + received)
    watched.watchdog.look(10.0)
    assert watched.stream.given_up is given_up
