"""A shard that travels in pieces: however long it takes, and whatever happens to its server meanwhile."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fleet.errors import FleetError
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import calls
from tests.support.parameter_server import Loopback, loopback
from tests.support.processes import wait_for
from tests.support.training import assert_same_bits

SHORT = Settings(heartbeat_seconds=0.05, deadline_seconds=1.5)


def joined(job: Loopback) -> Any:
    """Return a trainer that has joined."""
    trainer, _, _ = job.make_trainer()
    trainer.start()
    return trainer


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that remembers: after a step it has a state."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def tensors_of(found: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of what was fetched: of values by name, of state by name and entry."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in found.items():
        entries = value.items() if isinstance(value, dict) else [("", value)]
        tensors |= {f"{name} {entry}": each for entry, each in entries}
    return tensors


@pytest.mark.parametrize(
    ("of", "fetch"),
    [
        pytest.param("values", lambda trainer: trainer.checkpoints.values(), id="values"),
        pytest.param("optimizer_state", lambda trainer: trainer.fetch_state(), id="state"),
    ],
)
def test_a_shard_that_takes_longer_than_the_deadline_arrives(monkeypatch, of, fetch):
    with loopback(settings=SHORT, optimizer=momentum) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        model(torch.ones(1, 20)).sum().backward()
        trainer.step()
        server = job.servers[0].server
        pieces = getattr(server, of)

        def late() -> Iterator[Any]:
            late_enough = time.monotonic() + 2 * SHORT.deadline_seconds
            begun = pieces()
            yield next(begun)
            wait_for(lambda: time.monotonic() > late_enough, "the deadline to pass")
            yield from begun

        expected = tensors_of(fetch(trainer))
        assert len(expected) == len(list(model.parameters()))
        monkeypatch.setattr(server, of, late)
        assert_same_bits(tensors_of(fetch(trainer)), expected)


def test_a_session_that_ends_between_two_servers_shards_says_so(monkeypatch):
    with loopback(servers=2) as job:
        client = joined(job).session

        def end_with_the_first(*_: object) -> Iterator[Any]:
            client.close()
            return iter(())

        monkeypatch.setattr(calls, "pieces_of", end_with_the_first)
        with pytest.raises(FleetError, match="the session with the parameter servers has ended"):
            list(client.calls.values())


def test_a_shard_of_a_server_that_is_lost_meanwhile_is_not_awaited():
    released = threading.Event()
    with loopback() as job:
        trainer, server = joined(job), job.servers[0].server

        def hangs() -> Iterator[Any]:
            trainer.session.fail(FleetError("the server has vanished for good"))
            released.wait(20)
            return iter(())

        server.values = hangs  # type: ignore[method-assign]
        try:
            with pytest.raises(FleetError, match="has vanished for good"):
                trainer.checkpoints.values()
            assert not released.is_set()
        finally:
            released.set()
