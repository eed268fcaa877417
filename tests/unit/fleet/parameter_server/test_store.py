"""The one place where a server's values change, and what each change says of itself."""

from typing import Any

import pytest
import torch

from fleet.errors import FleetError
from fleet.parameter_server.modes import Async, Mode, Origin, Sync, Target, Update
from fleet.parameter_server.store import DenseStore, Put
from tests.support.modes import OneServer


def recorded(mode: Mode, trainers: int) -> tuple[OneServer, list[Update]]:
    """Return a server, and the updates that its store applies from now on."""
    server, updates = OneServer(mode, trainers), list[Update]()
    rule = server.shard.store._rule

    def record(target: Target, update: Update) -> None:
        updates.append(update)
        rule(target, update)

    server.shard.store._rule = record
    return server, updates


def value_of(store: DenseStore, block: int) -> float:
    into = bytearray(len(store.view(block)))
    store.read(block, memoryview(into))
    return float(torch.frombuffer(into, dtype=torch.float32)[0])


def test_an_update_says_of_which_lives_and_steps_of_which_trainers_it_is_made():
    server, updates = recorded(Sync(), 3)
    server.mode.admit(1, 4)
    for trainer in (2, 1, 0):
        server.begin(trainer)
        server.send(trainer, 0, 1.0)
    assert [update.origins for update in updates] == [(Origin(0, 0, 0), Origin(1, 4, 0), Origin(2, 0, 0))]


def test_updates_are_numbered_in_the_order_in_which_they_are_applied():
    server, updates = recorded(Async(), 2)
    server.mode.admit(1, 1)
    for trainer, block in ((1, 0), (0, 1), (0, 0)):
        server.begin(trainer)
        server.send(trainer, block, 1.0)
    assert [(update.sequence, update.key, update.origins) for update in updates] == [
        (1, 0, (Origin(1, 1, 0),)),
        (2, 1, (Origin(0, 0, 0),)),
        (3, 0, (Origin(0, 0, 0),)),
    ]


def test_what_a_gradient_was_computed_on_is_in_the_update_where_the_rule_needs_it():
    server, updates = recorded(Async(dc_asgd=True), 1)
    server.begin(0)
    server.send(0, 0, 1.0)
    server.begin(0, 1)
    server.send(0, 0, 1.0, step=1)
    first, second = (update.seen for update in updates)
    assert first is second is not None  # the trainer's own copy, renewed with each answer
    without, updates = recorded(Async(), 1)
    without.begin(0)
    without.send(0, 0, 1.0)
    assert updates[0].seen is None


def test_a_value_that_is_put_takes_the_place_of_another_and_brings_its_state():
    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    store = OneServer(Sync(), 1, momentum).shard.store
    store.apply(Put(0, torch.tensor([3.0]), {"momentum_buffer": torch.tensor([2.0])}))
    store.apply(Put(0, torch.tensor([7.0])))
    assert value_of(store, 0) == 7.0
    assert dict(store.state())[0]["momentum_buffer"].tolist() == [2.0]


def test_nothing_is_applied_after_a_rule_has_failed():
    store = OneServer(Sync(), 1).shard.store

    def broken(target: Target, update: Update) -> None:
        raise ArithmeticError("no root")

    store._rule = broken
    for change in (Update(0, torch.ones(1)), Put(0, torch.ones(1))):
        with pytest.raises(FleetError, match="could not be stepped: ArithmeticError: no root"):
            store.apply(change)
    assert value_of(store, 0) == 0.0


def test_a_snapshot_does_not_change_with_the_next_update():
    server = OneServer(Async(), 1)
    copies = server.shard.store.snapshot()
    server.begin(0)
    server.send(0, 0, 1.0)
    assert [float(piece.value.flatten()[0]) for piece in copies] == [0.0, 0.0]
