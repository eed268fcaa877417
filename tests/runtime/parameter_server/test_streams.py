"""A shard that travels in pieces: however long it takes, and whatever happens to its server meanwhile."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fleet.errors import FleetError
from fleet.parameter_server.settings import Settings
from tests.support.parameter_server import Loopback, loopback
from tests.support.processes import wait_for

SHORT = Settings(heartbeat_seconds=0.05, deadline_seconds=0.5)


def joined(job: Loopback) -> Any:
    """Return a trainer that has joined."""
    trainer, _, _ = job.make_trainer()
    trainer.start()
    return trainer


@pytest.mark.parametrize(
    ("of", "fetch"),
    [
        pytest.param("values", lambda trainer: trainer.checkpoints.values(), id="values"),
        pytest.param("optimizer_state", lambda trainer: trainer.fetch_state(), id="state"),
    ],
)
def test_a_shard_that_takes_longer_than_the_deadline_arrives(monkeypatch, of, fetch):
    with loopback(settings=SHORT) as job:
        trainer, server = joined(job), job.servers[0].server
        pieces = getattr(server, of)

        def late() -> Iterator[Any]:
            late_enough = time.monotonic() + 2 * SHORT.deadline_seconds
            yield from pieces()
            wait_for(lambda: time.monotonic() > late_enough, "the deadline to pass")

        expected = fetch(trainer)
        monkeypatch.setattr(server, of, late)
        assert fetch(trainer).keys() == expected.keys()


def test_a_shard_of_a_server_that_is_lost_meanwhile_is_not_awaited():
    released = threading.Event()
    with loopback() as job:
        trainer, server = joined(job), job.servers[0].server

        def hangs() -> Iterator[Any]:
            trainer.checkpoints._client.fail(FleetError("the server has vanished for good"))
            released.wait(20)
            return iter(())

        server.values = hangs  # type: ignore[method-assign]
        try:
            with pytest.raises(FleetError, match="has vanished for good"):
                trainer.checkpoints.values()
            assert not released.is_set()
        finally:
            released.set()
