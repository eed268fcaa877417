"""The sync mode of a server: when a block is stepped, with whose gradients, and who hears of it."""

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError, FleetError, RemoteProtocolError, StateLostError
from fleet.parameter_server import receive_buffers
from fleet.parameter_server.modes import Answer, Missing, Sync
from fleet.parameter_server.modes.sync import SyncServer
from fleet.wire import NO_STEP
from tests.support.modes import RATE_OF_ONE as HYPER
from tests.support.modes import OneServer, sgd
from tests.support.processes import wait_for

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sync_server(trainers: int, optimizer: MakeOptimizer = sgd) -> OneServer:
    """Return a server whose trainers have all begun step 0."""
    server = OneServer(Sync(), trainers, optimizer)
    for trainer in range(trainers):
        server.begin(trainer)
    return server


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_gradients_are_summed_in_trainer_order_whatever_their_arrival(order):
    setup = sync_server(3)
    gradients = {0: 1e8, 1: -1e8, 2: 1.0}  # any other order of summing loses the 1
    *early, last = [setup.send(trainer, 0, gradients[trainer]) for trainer in order]
    assert early == [[], []]
    assert last == [Answer(block=0, step=1, trainers=(0, 1, 2))]
    assert setup.value(0) == -np.float32(1.0 / 3)


def test_a_block_does_not_wait_for_other_blocks():
    setup = sync_server(2)
    setup.send(0, 1, 2.0)
    assert setup.send(1, 1, 4.0) == [Answer(1, 1, (0, 1))]
    assert setup.value(1) == -3.0
    assert setup.mode.step == 0
    setup.send(0, 0, 0.0)
    setup.send(1, 0, 0.0)
    assert setup.mode.step == 1


def test_absent_on_one_trainer_counts_as_zeros_with_the_same_divisor():
    setup = sync_server(2)
    setup.send(0, 0, 3.0)
    setup.send(0, 1, 3.0)
    assert setup.mode.end(0, 0, []) == []
    assert setup.send(1, 0, 5.0) == [Answer(0, 1, (0, 1))]
    assert list(setup.mode.end(1, 0, [1])) == [Answer(1, 1, (0, 1))]
    assert (setup.value(0), setup.value(1)) == (-4.0, -1.5)


def test_absent_on_all_trainers_is_not_stepped():
    setup = sync_server(2)
    for trainer in range(2):
        setup.send(trainer, 0, 1.0)
    assert setup.mode.end(0, 0, [1]) == []
    assert list(setup.mode.end(1, 0, [1])) == [Answer(1, 1, (0, 1), changed=False)]
    assert setup.value(1) == 0.0
    assert setup.mode.step == 1


def test_a_completed_trainer_is_waited_for_no_more_and_leaves_the_divisor():
    setup = sync_server(2)
    setup.send(0, 0, 3.0)
    setup.send(0, 1, 3.0)
    assert list(setup.mode.complete(1)) == [Answer(0, 1, (0,)), Answer(1, 1, (0,))]
    assert setup.value(0) == -3.0


def test_the_log_says_once_over_whom_the_mean_is_when_a_trainer_has_finished(caplog):
    setup = sync_server(3)
    for trainer in range(3):
        setup.send(trainer, 0, 3.0)
        setup.send(trainer, 1, 3.0)
    setup.mode.complete(1)
    assert caplog.text == ""  # nobody may follow: where all finish together there is nothing to say
    for trainer in (0, 2):
        setup.begin(trainer, 1)
        setup.send(trainer, 0, 3.0, step=1)
        setup.send(trainer, 1, 3.0, step=1)
    assert [record.getMessage() for record in caplog.records] == [
        "from step 1 on, gradients are averaged over trainers 0 and 2: the other trainers have completed"
    ]
    assert setup.value(0) == -6.0


def test_when_the_last_trainer_completes_nothing_is_stepped():
    setup = sync_server(1)
    assert list(setup.mode.complete(0)) == []
    assert setup.mode.step == 0


def test_what_a_dead_life_sent_is_dropped_unless_it_was_applied():
    setup = sync_server(2)
    setup.send(0, 0, 1.0)
    setup.send(1, 0, 1.0)
    setup.send(1, 1, 100.0)
    setup.mode.admit(1)
    assert setup.pulled(1, 0) == [0.0, 0.0]
    assert setup.send(0, 1, 2.0) == []
    setup.mode.begin(1, 0, HYPER)
    assert setup.send(1, 0, 50.0) == [Answer(0, 1, (1,))]  # applied already: the present value comes back
    assert setup.value(0) == -1.0
    assert setup.send(1, 1, 4.0) == [Answer(1, 1, (0, 1))]
    assert setup.value(1) == -3.0


def test_what_is_absent_in_a_step_that_was_made_is_answered_too():
    setup = sync_server(2)
    for trainer in range(2):
        setup.send(trainer, 0, 1.0)
        setup.send(trainer, 1, 1.0)
    setup.mode.admit(1)
    setup.mode.begin(1, 0, HYPER)
    assert list(setup.mode.end(1, 0, [0, 1])) == [Answer(0, 1, (1,)), Answer(1, 1, (1,))]


def test_other_hyper_parameters_are_named_with_both_trainers():
    setup = sync_server(1)
    setup.mode.begin(0, 1, ({"lr": 0.5, "momentum": 0.0},))
    with pytest.raises(
        ConfigurationError, match=r"step 1: .* of trainer 1 .* of trainer 0: lr=0\.25 instead of lr=0\.5 in"
    ):
        setup.mode.begin(1, 1, ({"lr": 0.25, "momentum": 0.0},))


@pytest.mark.parametrize("skipping", [0, 1])
def test_nobody_steps_where_one_trainer_has_no_finite_gradients(skipping):
    setup = OneServer(Sync(), 2)
    other = 1 - skipping
    for trainer in range(2):
        setup.mode.begin(trainer, 0, NO_STEP if trainer == skipping else HYPER)
    setup.send(other, 0, 5.0)
    assert setup.mode.end(other, 0, [1]) == []
    answers = list(setup.mode.end(skipping, 0, [0, 1]))
    assert answers == [Answer(block, 1, (0, 1), changed=False) for block in (0, 1)]
    assert setup.value(0) == 0.0
    for trainer in range(2):
        setup.begin(trainer, 1)
        setup.send(trainer, 0, 2.0, step=1)
    assert setup.value(0) == -2.0


def test_hyper_parameters_are_compared_past_a_trainer_that_skips():
    setup = sync_server(3)
    setup.mode.begin(0, 1, NO_STEP)
    setup.mode.begin(1, 1, ({"lr": 0.5},))
    with pytest.raises(ConfigurationError, match=r"trainer 2 .* trainer 1: lr=0\.25 instead of lr=0\.5"):
        setup.mode.begin(2, 1, ({"lr": 0.25},))


def test_another_number_of_param_groups_is_named():
    setup = sync_server(1)
    with pytest.raises(ConfigurationError, match="2 param groups instead of 1"):
        setup.mode.begin(1, 0, ({"lr": 1.0}, {"lr": 1.0}))


def test_hyper_parameters_of_the_step_are_used():
    setup = sync_server(1)
    setup.send(0, 0, 1.0)
    setup.send(0, 1, 1.0)
    setup.mode.begin(0, 1, ({"lr": 0.25},))
    setup.send(0, 0, 1.0, step=1)
    assert setup.value(0) == -1.25


@pytest.mark.parametrize("step", [1, 5])
def test_a_gradient_from_the_future_is_refused(step):
    setup = sync_server(2)
    with pytest.raises(RemoteProtocolError, match=rf"gradient of b for step {step}, expected step 0"):
        setup.send(0, 0, 1.0, step=step)


def test_a_gradient_sent_twice_is_refused():
    setup = sync_server(2)
    setup.send(0, 0, 1.0)
    with pytest.raises(RemoteProtocolError, match="gradient of b for step 0, expected the next step"):
        setup.send(0, 0, 1.0)


def test_a_step_that_ends_without_a_word_about_a_block_is_refused():
    setup = sync_server(2)
    setup.send(0, 0, 1.0)
    with pytest.raises(RemoteProtocolError, match="ends step 0 without a gradient of w"):
        setup.mode.end(0, 0, [])


def test_absent_blocks_of_another_server_are_refused():
    setup = sync_server(2)
    with pytest.raises(RemoteProtocolError, match="1 of the absent blocks are not on this server"):
        setup.mode.end(0, 0, [0, 1, 2])


def test_who_is_missing_is_known_once_somebody_waits():
    setup = sync_server(3)
    assert setup.mode.missing() is None
    setup.send(1, 1, 1.0)
    assert setup.mode.missing() == Missing(0, (0, 2), "w")


def test_a_trainer_that_is_further_behind_than_a_restart_explains_is_refused():
    setup = sync_server(2)
    setup.mode.resume(7)
    assert setup.send(1, 0, 1.0, step=6) == [Answer(0, 7, (1,))]  # of a life before
    with pytest.raises(RemoteProtocolError, match=r"trainer 0 is at step 5 of b, expected step 7 or 6"):
        setup.send(0, 0, 1.0, step=5)
    with pytest.raises(RemoteProtocolError, match="loaded after this trainer joined"):
        setup.mode.end(0, 0, [1])


def test_nobody_waits_for_a_step_that_has_failed(monkeypatch):
    setup = sync_server(1)

    def broken(*_: object) -> None:
        raise ConfigurationError("no such group")

    monkeypatch.setattr(setup.shard.store, "_rule", broken)
    with pytest.raises(ConfigurationError, match="no such group"):
        setup.send(0, 0, 1.0)
    for call in (lambda: setup.mode.admit(0), setup.mode.missing):
        with pytest.raises(ConfigurationError, match="could not be stepped: no such group"):
            call()


def test_what_a_step_failed_of_is_what_everybody_is_told(monkeypatch, caplog):
    setup = sync_server(2)

    def broken(*_: object) -> None:
        raise OSError("no scratch space")

    monkeypatch.setattr(setup.shard.store, "_rule", broken)
    setup.send(0, 0, 1.0)
    reason = "a block or table of parameter server a:1 could not be stepped: OSError: no scratch space"
    with pytest.raises(FleetError, match=reason):
        setup.send(1, 0, 1.0)
    assert "Traceback" in caplog.text
    monkeypatch.undo()
    with pytest.raises(FleetError, match=reason):
        setup.mode.missing()


def test_a_resumed_mode_counts_on_from_the_step_of_its_checkpoint():
    setup = sync_server(1)
    setup.mode.resume(7)
    assert setup.mode.step == 7
    assert setup.pulled(0, 7) == [0.0, 0.0]
    setup.mode.begin(0, 7, HYPER)
    assert setup.send(0, 0, 1.0, step=7) == [Answer(0, 8, (0,))]


def test_what_is_in_a_sum_stands_when_its_trainer_comes_back():
    setup = sync_server(3)
    setup.send(0, 0, 1.0)
    setup.send(1, 0, 2.0)
    setup.mode.admit(1)
    setup.mode.begin(1, 0, HYPER)
    assert setup.send(1, 0, 99.0) == []
    assert setup.send(2, 0, 3.0) == [Answer(0, 1, (0, 1, 2))]
    assert setup.value(0) == -2.0


def test_a_step_is_made_without_what_a_trainer_that_came_back_sends_again():
    setup = sync_server(3)
    setup.send(0, 1, 1.0)
    setup.send(1, 1, 2.0)
    setup.mode.admit(0)
    before = setup.pulled_arrays(0, 0)[1]
    assert setup.send(2, 1, 3.0) == [Answer(1, 1, (1, 2))]
    assert before[0] == 0.0  # what it computes on does not change
    setup.mode.begin(0, 0, HYPER)
    assert setup.send(0, 1, 99.0) == [Answer(1, 1, (0,))]
    assert setup.value(1) == -2.0


def test_a_sum_of_nobody_else_is_dropped_with_the_life_that_gave_it():
    setup = sync_server(2)
    setup.send(0, 0, 99.0)
    setup.mode.admit(0)
    setup.mode.begin(0, 0, HYPER)
    assert setup.send(1, 0, 3.0) == []
    assert setup.send(0, 0, 1.0) == [Answer(0, 1, (0, 1))]
    assert setup.value(0) == -2.0


def test_a_trainer_may_come_back_with_a_schedule_that_its_earlier_life_did_not_have():
    setup = sync_server(1)
    setup.mode.admit(0)
    setup.mode.begin(0, 0, ({"lr": 0.5},))
    setup.send(0, 0, 1.0)
    assert setup.value(0) == -0.5


def test_the_bits_and_the_progress_depend_on_no_order_of_blocks_or_trainers(monkeypatch):
    """Buffers hold two gradients of the larger block, and four trainers send as they like."""
    monkeypatch.setattr(receive_buffers, "_LEAST_BYTES", 0)
    chance, trainers, steps = random.Random(5), 4, 40  # noqa: S311
    gradients = [[chance.uniform(-1e8, 1e8) for _ in range(trainers)] for _ in range(steps)]
    orders = [[chance.sample([0, 1], 2) for _ in range(trainers)] for _ in range(steps)]
    setup = sync_server(trainers)
    made = threading.Barrier(trainers)

    def train(trainer: int) -> None:
        for step in range(steps):
            setup.begin(trainer, step)
            for block in orders[step][trainer]:
                setup.send(trainer, block, gradients[step][trainer], step)
            made.wait(60.0)

    with ThreadPoolExecutor(trainers) as pool:
        list(pool.map(train, range(trainers)))
    expected = np.float32(0.0)
    for of_step in gradients:
        total = np.float32(0.0)
        for gradient in of_step:
            total += np.float32(gradient)
        expected -= total * np.float32(0.25)
    assert [setup.value(0), setup.value(1)] == [float(expected)] * 2


def test_who_is_held_up_by_a_lower_rank_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(receive_buffers, "_LEAST_BYTES", 0)
    setup = sync_server(3)
    setup.send(2, 1, 1.0)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(setup.send, 1, 1, 1.0)
        wait_for(lambda: setup.shard.buffers.held == {1}, "trainer 1 to be held up")
        assert setup.mode.missing() == Missing(0, (0,), "w")
        first = setup.send(0, 1, 1.0)
        assert [first, held.result(60.0)].count([]) == 1
    assert setup.value(1) == -1.0


# What a trainer computes on that comes back in the middle of a step.


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
        "trainer 1 (attempt 3) receives the values of step 1, which 1 of 2 blocks here have already made"
        in caplog.text
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
    assert len(server.mode._aside) == aside


@pytest.mark.parametrize("asked", [0, 3])
def test_a_step_of_which_nobody_has_the_values_is_refused_by_name(asked):
    server = sync_server(1)
    for number in (0, 1):
        step(server, number, 1.0)
    with pytest.raises(StateLostError, match=rf"requests b at step {asked}, .* at step 2 and no longer has"):
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
        stepping = server.mode._rounds[1]
        stepping.stepping = True
        pulled = pool.submit(server.pulled, 1, 0)
        assert not pulled.done()
        with server.shard.buffers.changed:
            stepping.stepping = False
            server.shard.buffers.changed.notify_all()
        assert pulled.result(60.0) == [0.0, 0.0]
