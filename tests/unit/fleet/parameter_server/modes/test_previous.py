"""What a trainer computes on that comes back in the middle of a step: what its earlier life had."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fleet.errors import StateLostError
from fleet.parameter_server.modes import Answer, Sync
from fleet.parameter_server.modes.sync import SyncServer
from fleet.wire import NO_STEP
from tests.support.modes import OneServer, sgd

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sync_server(trainers: int, optimizer: MakeOptimizer = sgd) -> OneServer:
    """Return a server whose trainers have all begun step 0."""
    server = OneServer(Sync(), trainers, optimizer)
    for trainer in range(trainers):
        server.begin(trainer)
    return server


def step(server: OneServer, number: int, *gradients: float) -> None:
    """Make a whole step, with a gradient of each trainer for both blocks."""
    for trainer, gradient in enumerate(gradients):
        server.begin(trainer, number)
        for block in (0, 1):
            server.send(trainer, block, gradient, number)


@pytest.mark.parametrize(
    "optimizer",
    [sgd, partial(torch.optim.SGD, lr=1.0, momentum=0.5), partial(torch.optim.Adam, lr=1.0)],
    ids=["sgd", "momentum", "adam"],
)
def test_a_block_that_is_a_step_ahead_is_given_with_its_value_from_before(optimizer, caplog):
    server = sync_server(2, optimizer)
    step(server, 0, 1.0, 3.0)
    made = [server.value(block) for block in (0, 1)]
    server.begin(0, 1)
    server.begin(1, 1)
    server.send(0, 0, 5.0, 1)
    server.send(1, 0, 7.0, 1)
    assert server.value(0) != made[0]
    server.mode.admit(1, 3)
    with caplog.at_level("INFO"):
        assert server.pulled(1, 1) == made
    assert (
        "trainer 1 (attempt 3) takes the values of step 1, which 1 of 2 blocks here have made" in caplog.text
    )
    server.begin(1, 1)
    ahead = server.value(0)
    assert server.send(1, 0, 7.0, 1) == [Answer(0, 2, (1,))]
    assert server.value(0) == ahead


def test_the_value_from_before_stays_until_who_has_come_back_begins():
    server = sync_server(2)
    step(server, 0, 1.0, 3.0)
    server.mode.admit(1)  # of its step everything is here; it has not heard of that
    value = server.pulled_arrays(1, 0)[0]
    server.begin(0, 1)
    server.send(0, 0, 4.0, 1)
    server.send(0, 1, 4.0, 1)
    assert server.pulled(1, 0) == [0.0, 0.0]
    assert value[0] == 0.0  # it is sent by another thread, at any time
    server.begin(1, 0)
    assert server.mode.end(1, 0, [0, 1]) == [Answer(0, 1, (1,)), Answer(1, 1, (1,))]
    server.begin(1, 1)
    assert server.send(1, 0, 4.0, 1) == [Answer(0, 2, (0, 1))]
    assert server.value(0) == -6.0


def test_a_block_that_the_step_has_not_changed_is_given_as_it_is():
    server = sync_server(2)
    step(server, 0, 2.0, 2.0)
    for trainer in (0, 1):
        server.mode.begin(trainer, 1, NO_STEP)
    server.mode.end(0, 1, [0, 1])
    server.mode.end(1, 1, [0, 1])
    server.mode.admit(0)
    assert server.pulled(0, 1) == server.pulled(0, 2) == [-2.0, -2.0]


def test_the_value_from_before_is_kept_where_a_sum_began_with_an_early_gradient():
    server = sync_server(2)
    step(server, 0, 1.0, 1.0)
    server.begin(0, 1)
    server.begin(1, 1)
    server.send(1, 1, 6.0, 1)  # early, and first in the sum, as it turns out
    server.send(1, 0, 2.0, 1)
    server.send(0, 0, 2.0, 1)
    server.mode.end(0, 1, [1])
    assert (server.value(0), server.value(1)) == (-3.0, -4.0)
    server.mode.admit(1)
    assert server.pulled(1, 1) == [-1.0, -1.0]


@pytest.mark.parametrize(("trainers", "aside"), [(1, 1), (2, 0), (3, 0)])
def test_values_from_before_take_the_places_of_sums_and_a_block_beside_where_one_gradient_is_the_sum(
    trainers, aside
):
    server = sync_server(trainers)
    buffers, gradients = server.shard.buffers, [1.0] * trainers
    step(server, 0, *gradients)
    places = dict(buffers._sums)
    step(server, 1, *gradients)
    step(server, 2, *gradients)
    assert buffers._sums == places
    assert isinstance(server.mode, SyncServer)
    assert len(server.mode._previous._aside) == aside


def test_a_sum_is_in_the_order_of_the_trainers_wherever_it_lies():
    """In the order of arrival it would be another number."""
    server = sync_server(3)
    for trainer in range(3):
        server.begin(trainer)
    for trainer, gradient in ((2, 1.0), (1, -1e8), (0, 1e8)):
        server.send(trainer, 0, gradient)
    assert server.value(0) == -np.float32(1.0) * np.float32(1 / 3)


@pytest.mark.parametrize("asked", [0, 3])
def test_a_step_of_which_nobody_has_the_values_is_refused_by_name(asked):
    server = sync_server(1)
    for number in (0, 1):
        step(server, number, 1.0)
    with pytest.raises(StateLostError, match=rf"asks for b of step {asked}, .* at step 2, does not"):
        server.mode.pull(0, asked)


def test_who_comes_back_waits_for_a_block_that_is_being_stepped(monkeypatch):
    """It is told the value from before the step, and not the one that is half made."""
    server = sync_server(2)
    server.send(0, 0, 1.0)
    server.send(1, 0, 1.0)
    server.mode.admit(1)  # of block 1 nothing is here yet
    server.begin(1)
    server.send(1, 1, 1.0)
    server.mode.admit(1)
    server.begin(1)
    assert isinstance(server.mode, SyncServer)
    with ThreadPoolExecutor() as pool:
        stepping = server.mode._rounds.of[1]
        stepping.stepping = True
        pulled = pool.submit(server.pulled, 1, 0)
        assert not pulled.done()
        with server.shard.buffers.changed:
            stepping.stepping = False
            server.shard.buffers.changed.notify_all()
        assert pulled.result(60.0) == [0.0, 0.0]
