"""Tables in the modes without a barrier: each gradient steps its rows at once."""

from functools import partial

import pytest

from fleet.errors import ConfigurationError, RemoteProtocolError
from fleet.parameter_server.modes import Answer
from fleet.parameter_server.modes.immediate_tables import ImmediateTables
from fleet.wire import NO_STEP
from tests.support.row_modes import Tables


def test_a_gradient_is_applied_whole_when_it_comes():
    tables = Tables(ImmediateTables)
    assert tables.send(1, 0, {3: 4.0}) == [Answer(0, 1, (1,), of_table=True)]
    assert tables.rows(0, 0, 3, 4) == [-4.0, 0.0]
    assert (tables.half.step_of(0), tables.half.step_of(1), tables.half.step) == (0, 1, 1)


def test_what_an_earlier_life_has_brought_is_not_applied_again():
    tables = Tables(ImmediateTables)
    tables.send(1, 0, {3: 4.0})
    tables.half.admit(1, 1)
    assert tables.send(1, 0, {3: 4.0}) == [Answer(0, 1, (1,), of_table=True)]
    assert tables.rows(0, 0, 3) == [-4.0]


def test_a_step_without_hyper_parameters_changes_nothing():
    tables = Tables(ImmediateTables)
    tables.send(1, 0, {}, hyper=NO_STEP)
    tables.half.end(1, 0)
    assert tables.half.step_of(1) == 1


def test_a_step_ends_only_with_a_gradient_of_each_table():
    with pytest.raises(RemoteProtocolError, match="ends step 0 without a gradient of table clicks"):
        Tables(ImmediateTables).half.end(0, 0)


def test_one_that_joins_late_begins_at_the_step_of_the_one_ahead():
    tables = Tables(ImmediateTables)
    tables.send(0, 0, {})
    tables.half.admit(5, 0)
    assert tables.half.step_of(5) == 1
    tables.send(5, 0, {3: 1.0})
    assert tables.rows(5, 1, 3) == [-1.0]


def test_each_trainer_goes_on_at_its_own_step():
    tables = Tables(ImmediateTables)
    tables.half.resume(3)
    tables.half.resume_each({1: 4})
    assert (tables.half.step_of(0), tables.half.step_of(1)) == (3, 4)


def held() -> Tables:
    """Return a table that two trainers hold too, which have joined."""
    tables = Tables(ImmediateTables, held=True)
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
    assert (1, 0) not in tables.half._untold


def test_a_trainer_that_sends_nothing_for_long_costs_no_more_than_the_table_is_large():
    tables = held()
    for step in range(1000):
        tables.told(0, step, {3: 1.0, 4: 1.0})
    assert sum(ids.size for ids in tables.half._untold[1, 0]) < 200
    assert tables.told(1, 0, {}) == {3: -1000.0, 4: -1000.0}


def test_more_changed_rows_than_one_frame_tells_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("fleet.parameter_server.table_store.most_rows", lambda _: 2)
    tables = held()
    tables.send(0, 0, {3: 1.0, 4: 1.0})
    with pytest.raises(ConfigurationError, match=r"3 of its rows .* use smaller batches"):
        tables.send(1, 0, {5: 1.0})


@pytest.mark.parametrize("held", [False, True], ids=["looked-up", "held-by-trainers"])
def test_in_geo_a_trainer_is_told_of_the_rows_alone_that_it_has_sent(held):
    tables = Tables(partial(ImmediateTables, adds=True), held=held)
    for trainer in range(2):
        tables.half.admit(trainer, 0)
    assert tables.told(0, 0, {3: 1.0, 4: 1.0}) == {3: -1.0, 4: -1.0}
    assert tables.told(1, 0, {4: 2.0}) == {4: -3.0}
    assert tables.told(1, 0, {4: 2.0}) == {4: -3.0}, "what comes again is not applied again"
    assert tables.half._untold == {}
