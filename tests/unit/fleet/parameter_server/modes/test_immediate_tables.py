"""Tables in the modes without a barrier: each gradient steps its rows at once."""

import pytest

from fleet.errors import RemoteProtocolError
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
