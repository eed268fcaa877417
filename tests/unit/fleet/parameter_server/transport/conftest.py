"""The event loop of connections, started."""

from collections.abc import Iterator

import pytest

from fleet.parameter_server.transport.event_loop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    started = EventLoop(2)
    started.start()
    yield started
    started.close()
