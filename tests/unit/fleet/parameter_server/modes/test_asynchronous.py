"""The modes without a barrier: each gradient of blocks and rows by itself, in the order of arrival."""

import contextlib
import gc

import pytest
import torch

from fleet.errors import ConfigurationError, FleetError, RemoteProtocolError
from fleet.parameter_server.modes import Answer, Async, Geo, LazyBytes
from fleet.parameter_server.modes.asynchronous import TrainerSteps, compensate_delay
from fleet.parameter_server.store import Origin
from fleet.parameter_server.transport.arena import Arena
from fleet.wire import NO_STEP
from tests.support.modes import OneServer
from tests.support.row_modes import Tables


def async_server(trainers: int = 2, **options: bool) -> OneServer:
    """Return a server whose trainers have pulled and begun step 0."""
    server = OneServer(Async(**options), trainers)
    for trainer in range(trainers):
        server.mode.pull(trainer, 0)
        server.begin(trainer)
    return server


def test_each_gradient_steps_at_once_undivided_and_only_its_trainer_hears_of_it():
    server = async_server()
    assert server.send(1, 0, 4.0) == [Answer(0, 1, (1,))]
    assert (server.value(0), server.sent(1, 0)) == (-4.0, -4.0)
    assert server.send(0, 0, 1.0) == [Answer(0, 1, (0,))]
    assert (server.value(0), server.sent(0, 0)) == (-5.0, -5.0)
    server.begin(1, 1)
    assert server.send(1, 0, 2.0, step=1) == [Answer(0, 2, (1,))]
    assert server.value(0) == -7.0
    assert server.mode.missing() is None


def test_a_trainer_that_joined_other_servers_earlier_loses_no_gradient_here():
    """It goes on at the lowest step at which any of its servers saw it come."""
    server = async_server(1)
    for step in range(25):
        server.begin(0, step)
        server.send(0, 0, 0.0, step=step)
        server.send(0, 1, 0.0, step=step)
    server.mode.admit(1)
    assert server.mode.step_of(1) == 25
    for step in (10, 11):
        server.begin(1, step)
        server.send(1, 0, 1.0, step=step)
    assert server.value(0) == -2.0
    server.send(1, 0, 1.0, step=11)  # again, by a later life of it
    assert server.value(0) == -2.0


def test_a_trainer_is_sent_the_value_as_it_is_when_it_leaves():
    server = async_server()
    server.send(0, 0, 1.0)
    leaving = server.mode.value(0, 0)
    server.send(1, 0, 5.0)
    assert isinstance(leaving, LazyBytes)
    assert (server.sent(0, 0), server.sent(1, 0)) == (-6.0, -6.0)


def test_what_a_trainer_has_seen_does_not_change_while_others_step():
    server = async_server(dc_asgd=True)
    server.send(0, 0, 1.0)
    leaving = server.mode.value(0, 0)
    assert isinstance(leaving, memoryview)
    before = bytes(leaving)
    server.send(1, 0, 5.0)
    assert bytes(leaving) == before
    assert (server.sent(0, 0), server.sent(1, 0)) == (-1.0, server.value(0))


@pytest.mark.parametrize(("dc_asgd", "copies"), [(False, 0), (True, 8)])
def test_a_server_keeps_copies_of_its_values_only_where_delay_is_compensated(dc_asgd, copies):
    shard = async_server().shard
    one_copy = sum(flat.nbytes for flat in Arena(shard.store.extents).flat.values())
    before = bytes_of_tensors()
    mode = Async(dc_asgd=dc_asgd).make_server(shard, 7)
    mode.admit(7)
    for trainer in range(8):
        mode.pull(trainer, 0)
    assert bytes_of_tensors() - before == copies * one_copy


def bytes_of_tensors() -> int:
    """Return the bytes of the memory of all tensors of this process."""
    gc.collect()
    storages = []
    for each in gc.get_objects():
        if type(each) is torch.Tensor:
            with contextlib.suppress(NotImplementedError):  # an undefined one of autograd
                storages.append(each.untyped_storage())
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_the_order_of_arrival_decides_as_momentum_shows():
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    hyper = ({"lr": 1.0, "momentum": 0.5},)
    server = OneServer(Async(), 2, momentum)
    for trainer, gradient in ((1, 4.0), (0, 1.0)):
        server.begin(trainer, hyper=hyper)
        server.send(trainer, 0, gradient)
    # The velocity is 4, then 0.5 * 4 + 1.
    assert server.value(0) == -7.0


def test_each_trainers_own_hyper_parameters_step_its_gradients():
    server = async_server()
    server.begin(1, hyper=({"lr": 0.25},))
    server.send(1, 0, 4.0)
    server.send(0, 0, 4.0)
    assert server.value(0) == -5.0


def test_a_gradient_that_is_absent_brings_the_value_all_the_same():
    server = async_server()
    server.send(1, 1, 3.0)
    server.send(0, 0, 1.0)
    assert list(server.mode.end(0, 0, [1])) == [Answer(1, 1, (0,))]
    assert (server.value(1), server.sent(0, 1)) == (-3.0, -3.0)


def test_the_others_go_on_when_one_completes_or_never_sends():
    server = async_server(3)
    assert list(server.mode.complete(2)) == []
    for step in range(3):
        server.begin(0, step)
        assert server.send(0, 0, 1.0, step) == [Answer(0, step + 1, (0,))]
        server.send(0, 1, 1.0, step)
    assert (server.mode.step_of(0), server.mode.step_of(1), server.mode.step) == (3, 0, 3)


def test_a_trainers_step_counts_when_all_of_it_is_here():
    server = async_server()
    server.send(0, 0, 1.0)
    assert server.mode.step_of(0) == 0
    server.mode.end(0, 0, [1])
    assert server.mode.step_of(0) == 1


def test_a_step_that_an_earlier_life_made_is_not_made_twice():
    server = async_server()
    server.send(0, 0, 1.0)
    server.mode.admit(0)
    server.begin(0)
    assert server.send(0, 0, 1.0) == [Answer(0, 1, (0,))]
    assert (server.value(0), server.sent(0, 0)) == (-1.0, -1.0)
    server.send(0, 1, 1.0)
    assert server.mode.step_of(0) == 1


def test_a_step_that_ends_without_a_word_about_a_block_is_refused():
    server = async_server()
    server.send(0, 0, 1.0)
    with pytest.raises(RemoteProtocolError, match=r"ends step 0 without a gradient of w; .*as absent"):
        server.mode.end(0, 0, [])
    with pytest.raises(RemoteProtocolError, match="1 of the absent blocks are not on this server"):
        server.mode.end(0, 0, [1, 7])


def test_delay_is_compensated_by_what_has_changed_since_the_trainer_got_the_value():
    server = async_server(dc_asgd=True)
    assert server.send(0, 0, 2.0) == [Answer(0, 1, (0,))]  # no delay: g
    assert server.value(0) == -2.0
    server.send(1, 0, 3.0)  # computed at 0, and the value is -2: 3 + 3 * 3 * (-2 - 0)
    assert server.value(0) == -2.0 - (3.0 - 18.0)
    server.begin(0, 1)
    server.send(0, 0, 1.0, step=1)  # computed at -2, and the value is 13: 1 + 1 * 1 * (13 + 2)
    assert server.value(0) == 13.0 - 16.0


def test_the_backup_is_of_each_trainer_and_is_renewed_when_it_pulls():
    server = async_server(dc_asgd=True)
    server.send(0, 0, 2.0)
    server.mode.pull(1, 0)
    server.send(1, 0, 3.0)
    assert server.value(0) == -5.0


def test_without_the_option_delay_is_not_compensated():
    server = async_server()
    server.send(0, 0, 2.0)
    server.send(1, 0, 3.0)
    assert server.value(0) == -5.0


def test_a_gradient_that_fails_to_be_applied_ends_it_for_every_trainer(monkeypatch):
    server = async_server()

    def broken(*_: object) -> None:
        raise ArithmeticError("no root")

    monkeypatch.setattr(server.shard.store, "_rule", broken)
    reason = "a block or table of parameter server a:1 could not be stepped: ArithmeticError: no root"
    with pytest.raises(FleetError, match=reason):
        server.send(0, 0, 1.0)
    monkeypatch.undo()
    with pytest.raises(FleetError, match=reason):
        server.mode.missing()
    with pytest.raises(FleetError, match=reason):
        server.send(1, 0, 1.0)
    assert server.value(0) == 0.0


def test_a_mistake_of_one_trainer_ends_it_for_that_one_only():
    server = async_server()
    server.begin(0, 0, ())
    with pytest.raises(ConfigurationError, match="optimizer has 0 groups"):
        server.send(0, 0, 1.0)
    assert server.mode.missing() is None
    assert server.send(1, 0, 1.0) == [Answer(0, 1, (1,))]


# Tables.


def test_a_gradient_is_applied_whole_when_it_comes():
    tables = Tables(Async())
    assert tables.send(1, 0, {3: 4.0}) == [Answer(0, 1, (1,), of_table=True)]
    assert tables.rows(0, 0, 3, 4) == [-4.0, 0.0]
    assert (tables.half.step_of(0), tables.half.step_of(1), tables.half.step) == (0, 1, 1)


def test_rows_that_an_earlier_life_has_stepped_are_not_stepped_again():
    tables = Tables(Async())
    tables.send(1, 0, {3: 4.0})
    tables.half.admit(1, 1)
    assert tables.send(1, 0, {3: 4.0}) == [Answer(0, 1, (1,), of_table=True)]
    assert tables.rows(0, 0, 3) == [-4.0]


def test_a_step_without_hyper_parameters_changes_nothing():
    tables = Tables(Async())
    tables.send(1, 0, {}, hyper=NO_STEP)
    tables.half.end(1, 0, [])
    assert tables.half.step_of(1) == 1


def test_a_step_ends_only_with_a_gradient_of_each_table():
    with pytest.raises(RemoteProtocolError, match="ends step 0 without a gradient of table clicks"):
        Tables(Async()).half.end(0, 0, [])


def test_one_that_joins_late_begins_at_the_step_of_the_one_ahead():
    tables = Tables(Async())
    tables.send(0, 0, {})
    tables.half.admit(5, 0)
    assert tables.half.step_of(5) == 1
    tables.send(5, 0, {3: 1.0})
    assert tables.rows(5, 1, 3) == [-1.0]


def test_each_trainer_goes_on_at_its_own_step():
    tables = Tables(Async())
    tables.half.resume(3)
    tables.half.resume_each({1: 4})
    assert (tables.half.step_of(0), tables.half.step_of(1)) == (3, 4)


def held() -> Tables:
    """Return a table that two trainers hold too, which have joined."""
    tables = Tables(Async(), held=True)
    for trainer in range(2):
        tables.half.admit(trainer, 0)
    return tables


def test_a_trainer_is_told_of_what_has_changed_since_it_was_told():
    tables = held()
    assert tables.told(0, 0, {3: 1.0}) == {3: -1.0}
    assert tables.told(1, 0, {5: 1.0}) == {3: -1.0, 5: -1.0}
    assert tables.told(1, 1, {}) == {}
    assert tables.told(0, 1, {3: 1.0}) == {3: -2.0, 5: -1.0}


def test_a_trainer_that_joins_again_is_told_of_what_has_changed_since():
    tables = held()
    tables.told(0, 0, {3: 1.0})
    tables.half.admit(1, 1)
    assert tables.told(1, 0, {5: 1.0}) == {5: -1.0}


def test_nothing_is_remembered_for_a_trainer_that_has_finished():
    tables = held()
    tables.half.complete(1)
    for step in range(3):
        tables.told(0, step, {3: 1.0})
    assert (1, 0) not in tables.half._unsent


def test_a_trainer_that_sends_nothing_for_long_costs_no_more_than_the_table_is_large():
    tables = held()
    for step in range(1000):
        tables.told(0, step, {3: 1.0, 4: 1.0})
    assert sum(ids.size for ids in tables.half._unsent[1, 0]) < 200
    assert tables.told(1, 0, {}) == {3: -1000.0, 4: -1000.0}


def test_more_changed_rows_than_one_frame_tells_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("fleet.parameter_server.table_store.most_rows", lambda _: 2)
    tables = held()
    tables.send(0, 0, {3: 1.0, 4: 1.0})
    with pytest.raises(ConfigurationError, match=r"3 of its rows .* use smaller batches"):
        tables.send(1, 0, {5: 1.0})


@pytest.mark.parametrize("held", [False, True], ids=["looked-up", "held-by-trainers"])
def test_in_geo_a_trainer_is_told_of_the_rows_alone_that_it_has_sent(held):
    tables = Tables(Geo(), held=held)
    for trainer in range(2):
        tables.half.admit(trainer, 0)
    assert tables.told(0, 0, {3: 1.0, 4: 1.0}) == {3: -1.0, 4: -1.0}
    assert tables.told(1, 0, {4: 2.0}) == {4: -3.0}
    assert tables.told(1, 0, {4: 2.0}) == {4: -3.0}, "what comes again is not applied again"
    assert tables.half._unsent == {}


# The steps of trainers.


def advance(steps, trainer, step, parts=(7, 8)):
    for part in parts:
        steps.advance(trainer, part, step)


def test_a_trainer_makes_the_step_after_its_last_that_is_wholly_here():
    steps = TrainerSteps((7, 8), 2)
    advance(steps, 0, 0)
    advance(steps, 0, 1, parts=(8,))
    assert (steps.of(0), steps.of(1), steps.ahead) == (1, 0, 1)
    assert steps.parts(0) == {7: 1, 8: 2}
    assert not steps.is_due(0, 8, 1)
    assert steps.is_due(0, 7, 1)


def test_one_that_comes_back_stands_where_it_stood():
    steps = TrainerSteps((7, 8), 1)
    advance(steps, 0, 0)
    steps.hyper[0] = ({"lr": 0.1},)
    assert not steps.admit(0, 3)
    assert steps.of(0) == 1
    assert steps.hyper[0] == ({"lr": 0.1},)
    assert steps.origin(0, 1) == Origin(0, 3, 1)


def test_one_that_comes_late_shares_in_what_is_left_to_do():
    steps = TrainerSteps((7, 8), 1)
    advance(steps, 0, 4)
    assert steps.admit(1, 0)
    assert steps.of(1) == steps.of(0) == 5
    # Another server has seen it come earlier: what it sends of step 2 is due here all the same.
    assert steps.is_due(1, 7, 2)
    assert steps.hyper[1] == ()


def test_all_go_on_at_the_step_of_a_checkpoint_also_those_that_come_late():
    steps = TrainerSteps((7, 8), 2)
    steps.resume(6)
    assert (steps.of(0), steps.of(1)) == (6, 6)
    steps.resume_each({0: 3, 2: 9})
    steps.admit(2, 0)
    steps.admit(3, 0)
    assert [steps.of(trainer) for trainer in range(4)] == [3, 6, 9, 9]


def test_a_server_that_holds_no_part_of_it_has_made_no_step():
    steps = TrainerSteps((), 2)
    assert (steps.of(0), steps.ahead) == (0, 0)
    assert TrainerSteps((7,), 0).ahead == 0


def test_a_gradient_without_delay_is_itself():
    gradient, value = torch.randn(3, 2), torch.randn(3, 2)
    assert torch.equal(compensate_delay(gradient, value, value.clone()), gradient)


def test_the_drift_counts_with_the_square_of_the_gradient():
    found = compensate_delay(torch.tensor([2.0, -3.0]), torch.tensor([1.5, 1.0]), torch.tensor([1.0, 2.0]))
    assert found.tolist() == [2.0 + 4.0 * 0.5, -3.0 + 9.0 * -1.0]


def test_nothing_is_modified():
    tensors = [torch.ones(2), torch.full((2,), 3.0), torch.zeros(2)]
    copies = [each.clone() for each in tensors]
    compensate_delay(*tensors)
    assert all(torch.equal(each, copy) for each, copy in zip(tensors, copies, strict=True))


def test_other_shapes_are_named():
    with pytest.raises(ValueError, match=r"gradient of shape \[2\], a value of \[3\] and .* \[2\]"):
        compensate_delay(torch.ones(2), torch.ones(3), torch.ones(2))
