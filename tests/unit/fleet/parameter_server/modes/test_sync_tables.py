"""Tables in the sync mode: what makes a step, what a trainer that comes back sees, and what is refused."""

import threading
from concurrent import futures

import numpy as np
import pytest

from fleet.errors import ConfigurationError, FleetError, RemoteProtocolError, StateLostError
from fleet.parameter_server.modes import Answer, Missing, Sync
from fleet.wire import NO_STEP
from fleet.wire.rows import read_row_gradient
from tests.support.row_modes import Tables, gradient


def test_a_table_is_stepped_by_the_mean_once_every_trainers_gradient_has_come():
    tables = Tables(Sync())
    assert tables.send(1, 0, {3: 4.0, 5: 2.0}) == []
    assert tables.half.missing() == Missing(0, (0,), "table clicks")
    assert tables.rows(1, 0, 3) == [0.0]
    assert tables.send(0, 0, {3: 2.0}) == [Answer(0, 1, (0, 1), of_table=True)]
    assert tables.rows(0, 1, 3, 5, 6) == [-3.0, -1.0, 0.0]
    assert (tables.half.step, tables.half.missing()) == (1, None)


def test_only_what_trainers_ask_for_is_counted_as_looked_up():
    tables = Tables(Sync(), 1)
    tables.send(0, 0, {3: 1.0, 5: 1.0})
    tables.rows(0, 1, 3, 4)
    tables.send(0, 1, {3: 1.0})
    (told,) = tables.store.statistics()
    assert (told["lookedUp"], told["found"]) == (2, 1)


def test_an_empty_gradient_counts_as_one():
    tables = Tables(Sync())
    tables.send(0, 0, {})
    tables.send(1, 0, {3: 4.0})
    assert tables.rows(0, 1, 3) == [-2.0]


def test_the_rows_from_before_the_last_step_are_there_for_a_trainer_that_comes_back():
    tables = Tables(Sync(), 1)
    tables.send(0, 0, {3: 1.0, 7: 1.0})
    tables.send(0, 1, {3: 1.0})
    assert tables.rows(0, 2, 3, 4, 7) == [-2.0, 0.0, -1.0]
    assert tables.rows(0, 1, 3, 4, 7) == [-1.0, 0.0, -1.0]
    with pytest.raises(StateLostError, match="rows of table clicks at step 0, but this server is at step 2"):
        tables.rows(0, 0, 3)


def test_what_a_trainer_sends_again_of_a_step_that_was_made_is_dropped():
    tables = Tables(Sync(), 1)
    tables.send(0, 0, {3: 1.0})
    tables.half.admit(0, 1)
    assert tables.send(0, 0, {3: 1.0}) == [Answer(0, 1, (0,), of_table=True)]
    assert tables.rows(0, 1, 3) == [-1.0]


def test_what_an_earlier_life_has_sent_is_dropped_while_the_step_is_not_made():
    tables = Tables(Sync())
    tables.send(0, 0, {3: 100.0})
    tables.half.admit(0, 1)
    tables.send(0, 0, {3: 2.0})
    tables.send(1, 0, {3: 2.0})
    assert tables.rows(0, 1, 3) == [-2.0]


def test_a_trainer_that_has_finished_is_waited_for_no_more():
    tables = Tables(Sync())
    tables.send(0, 0, {3: 2.0})
    assert tables.half.complete(1) == [Answer(0, 1, (0,), of_table=True)]
    assert tables.rows(0, 1, 3) == [-2.0]


def test_a_step_without_hyper_parameters_is_not_made():
    tables = Tables(Sync())
    tables.send(0, 0, {3: 2.0})
    tables.send(1, 0, {}, hyper=NO_STEP)
    assert (tables.half.step, tables.rows(0, 1, 3)) == (1, [0.0])


@pytest.mark.parametrize(("step", "expected"), [(0, "the next step"), (2, "step 0")])
def test_a_gradient_that_nobody_awaits_is_refused(step, expected):
    tables = Tables(Sync())
    tables.send(0, 0, {3: 2.0})
    with pytest.raises(RemoteProtocolError, match=f"for step {step}, expected {expected}"):
        tables.half.row_gradient(0, 0, step, gradient({3: 2.0}))


@pytest.mark.parametrize("id_", [-1, 10])
def test_an_id_that_is_none_of_the_tables_is_refused_before_anything_is_kept(id_):
    tables = Tables(Sync(), 1)
    with pytest.raises(RemoteProtocolError, match="of table clicks, expected 0 to 9"):
        tables.send(0, 0, {id_: 1.0})
    with pytest.raises(ConfigurationError, match=f"id {id_} at position 0"):
        tables.half.look_up(0, 0, 0, np.array([id_]))


def test_a_step_ends_only_with_a_gradient_of_each_table():
    tables = Tables(Sync())
    with pytest.raises(RemoteProtocolError, match="ends step 0 without a gradient of table clicks"):
        tables.half.end(0, 0, [])
    tables.send(0, 0, {})
    tables.half.end(0, 0, [])


def test_a_step_that_fails_ends_the_server_with_its_reason():
    tables = Tables(Sync(), 1)
    with pytest.raises(FleetError, match="TypeError"):
        tables.send(0, 0, {3: 1.0}, hyper=({"lr": "fast"},))
    with pytest.raises(FleetError, match="could not be stepped"):
        tables.half.missing()


def test_a_gradient_of_a_step_that_nobody_began_ends_the_server_with_its_reason():
    tables = Tables(Sync(), 1)
    tables.half.row_gradient(0, 0, 0, gradient({3: 1.0}))
    with pytest.raises(FleetError, match="KeyError"):
        tables.half.advance(0, of_table=True)
    with pytest.raises(FleetError, match="could not be stepped"):
        tables.half.missing()


def test_a_look_up_holds_up_nobody_who_asks_for_rows_of_another_table(monkeypatch):
    reading, seen = threading.Event(), threading.Event()
    tables = Tables(Sync(), number=2)
    look_up = tables.store.rows

    def wait(table, ids):
        if table == 0:
            reading.set()
            assert seen.wait(60)
        return look_up(table, ids)

    monkeypatch.setattr(tables.store, "rows", wait)
    with futures.ThreadPoolExecutor() as pool:
        first = pool.submit(tables.rows, 0, 0, 3)
        assert reading.wait(60)
        second = pool.submit(tables.half.look_up, 1, 1, 0, np.array([3]))
        try:
            assert second.result(10).tolist() == [[0.0]]
        finally:
            seen.set()
        assert first.result(10) == [0.0]


def test_a_checkpoints_step_is_gone_on_with():
    tables = Tables(Sync(), 1)
    tables.half.resume(7)
    assert tables.send(0, 7, {3: 1.0}) == [Answer(0, 8, (0,), of_table=True)]


def test_more_rows_than_one_frame_tells_are_refused_before_a_step_that_trainers_are_told_of(monkeypatch):
    monkeypatch.setattr("fleet.parameter_server.table_store.most_rows", lambda _: 2)
    Tables(Sync(), 1).send(0, 0, {3: 1.0, 4: 1.0, 5: 1.0})  # trainers look these up
    held = Tables(Sync(), 1, held=True)
    with pytest.raises(FleetError, match=r"also hold table clicks, and 3 of its rows .* expected at most 2"):
        held.send(0, 0, {3: 1.0, 4: 1.0, 5: 1.0})
    assert held.half.step == 0


def refreshed(answers: list[Answer]) -> dict[int, dict[int, float]]:
    """Return by trainer the rows that it is told of."""
    told: dict[int, dict[int, float]] = {}
    for answer in answers:
        ids, rows = read_row_gradient(memoryview(answer.value or b""), 1)
        for trainer in answer.trainers:
            told[trainer] = dict(zip(ids.tolist(), rows[:, 0].tolist(), strict=True))
    return told


def test_a_trainer_is_told_what_a_step_has_changed_of_rows_that_it_had_asked_for_ahead():
    tables = Tables(Sync())
    assert tables.rows(1, 1, 3, 4) == [0.0, 0.0]
    assert tables.rows(1, 1, 5) == [0.0]
    tables.send(1, 0, {5: 2.0, 6: 2.0})
    assert refreshed(tables.send(0, 0, {3: 4.0})) == {0: {}, 1: {3: -2.0, 5: -1.0}}
    tables.send(1, 1, {})
    assert refreshed(tables.send(0, 1, {3: 4.0})) == {0: {}, 1: {}}


def test_what_an_earlier_life_has_asked_for_ahead_is_forgotten():
    tables = Tables(Sync(), 1)
    tables.rows(0, 1, 3)
    tables.half.admit(0, 1)
    assert refreshed(tables.send(0, 0, {3: 4.0})) == {0: {}}


def test_a_trainer_that_asks_ahead_for_ever_costs_no_more_than_the_table_is_large():
    tables = Tables(Sync(), 1)
    for _ in range(1000):
        tables.rows(0, 1, 3, 4)
    assert sum(ids.size for ids in tables.half._tables.rounds[0].ahead[0]) < 200
    assert refreshed(tables.send(0, 0, {3: 4.0})) == {0: {3: -4.0}}
