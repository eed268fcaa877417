"""A trainer's part in tables, without servers: what it asks for, and what it takes."""

from concurrent import futures
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from fleet.errors import ConfigurationError, RemoteProtocolError
from fleet.parameter_server.modes import Sync
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import rows as module
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.replies import Replies
from fleet.parameter_server.trainer.rows import TrainerRows
from fleet.plan.tables import TablePlan
from fleet.tables import TableConfig
from fleet.tables.rules import SGD
from fleet.wire import Header, Kind
from fleet.wire.rows import pack_row_gradient, read_ids
from tests.support.modes import plans
from tests.support.processes import wait_for


class Stream:
    """One to a server that answers each look-up at once, with rows of ones."""

    def __init__(self, replies: Replies) -> None:
        self.asked: list[int] = []
        self.answers = True
        self._replies = replies
        self._row_bytes = {table.number: table.row_bytes for table in replies.plan.tables}

    def send(self, kind: Kind, payload: memoryview, *, step: int, block: int, more: bool = False) -> None:
        """Take a frame."""
        if kind is not Kind.LOOK_UP:
            return
        self.asked.append(read_ids(payload, self._row_bytes[block]).size)
        if self.answers:
            self.answer(step, block)

    def answer(self, step: int = 0, block: int = 0) -> None:
        """Answer the look-up that came last."""
        num_rows = self.asked[-1]
        row = np.ones(self._row_bytes[block] // 4, dtype="<f4").tobytes()
        self._replies.rows_landed(0, header(Kind.ROWS, step, block), memoryview(bytearray(row * num_rows)))


def header(kind: Kind, step: int, table: int) -> Header:
    return Header(kind, 0, 0, 0, step=step, block=table)


def rows_of(
    *dimensions: int, own: Parameter | None = None, look_ups_at_once: int = 12
) -> tuple[TrainerRows, Stream]:
    """Return the tables of a trainer with one server, of these dimensions."""
    tables = tuple(
        TablePlan(number, TableConfig(f"t{number}", dimension, SGD()), 0, own)
        for number, dimension in enumerate(dimensions)
    )
    plan = replace(plans(Sync(), 1)[1], tables=tables)
    replies = Replies(plan, Settings(look_ups_at_once=look_ups_at_once), ParameterStore((), {}))
    stream = Stream(replies)
    return TrainerRows([cast("Any", stream)], replies), stream


def test_a_large_table_that_a_trainer_holds_too_is_taken_part_by_part():
    weight = Parameter(torch.zeros(2500, 1 << 12))  # 40 MiB
    rows, stream = rows_of(1 << 12, own=weight)
    rows.take_all()
    assert stream.asked == [1024, 1024, 452]
    assert bool((weight == 1.0).all())


@pytest.mark.parametrize(
    ("table", "num_bytes"),
    [
        pytest.param(1, 12, id="of-another-table-whose-rows-are-shorter"),
        pytest.param(0, 32, id="more-than-were-asked-for"),
    ],
)
def test_rows_that_nobody_has_asked_for_are_refused(table, num_bytes):
    rows, stream = rows_of(4, 3)

    def send(*_: object, **__: object) -> None:
        rows.replies.rows_landed(0, header(Kind.ROWS, 0, table), memoryview(bytearray(num_bytes)))

    stream.send = send  # type: ignore[method-assign]
    with pytest.raises(RemoteProtocolError, match=f"rows of table {table}, expected 1 of table 0"):
        rows.fetch("t0", np.array([5]))


@pytest.mark.parametrize("id_", [-1, 10])
def test_changed_rows_that_a_weight_does_not_have_are_refused(id_):
    rows, _ = rows_of(2, own=Parameter(torch.zeros(10, 2)))
    rows.send({})
    told = pack_row_gradient(np.array([id_]), np.ones((1, 2), dtype=np.float32))
    with pytest.raises(RemoteProtocolError, match=f"rows {id_} to {id_} of table 0, expected 0 to 9"):
        rows.replies.table_stepped(0, header(Kind.STEPPED, 1, 0), told)


def test_a_step_with_more_rows_than_a_frame_takes_is_the_scripts_mistake(monkeypatch):
    monkeypatch.setattr(module, "most_rows", lambda _: 1)
    rows, _ = rows_of(2)
    with pytest.raises(
        ConfigurationError,
        match=r"gradients of 2 rows of table t0 for one server, expected at most 1; use smaller batches, "
        r"more parameter servers, or merge fewer steps \(max_merge_var_num\)",
    ):
        rows.send({"t0": (np.array([3, 4]), torch.ones(2, 2))})


def test_a_server_is_asked_for_no_more_than_may_be_unanswered(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 16)  # two rows
    rows, stream = rows_of(2, look_ups_at_once=3)
    stream.answers = False
    with futures.ThreadPoolExecutor() as pool:
        found = pool.submit(rows.fetch, "t0", np.arange(8))
        wait_for(lambda: len(stream.asked) == 3, "three look-ups")
        stream.answer()
        wait_for(lambda: len(stream.asked) == 4, "the last look-up")
        for _ in range(3):
            stream.answer()
        assert found.result(10).tolist() == [[1.0, 1.0]] * 8


@pytest.mark.parametrize(
    ("at", "asks"),
    [
        pytest.param(0, [2], id="not-in-the-step-in-which-they-were-asked-for"),
        pytest.param(1, [1], id="in-the-next-one-and-others-are-asked-for"),
        pytest.param(2, [2], id="not-later"),
    ],
)
def test_rows_that_were_fetched_ahead_are_those_of_the_next_step(at, asks):
    rows, stream = rows_of(2)
    rows.prefetch("t0", np.array([3, 5, 8]))
    rows.replies.step = at
    stream.asked.clear()
    assert rows.fetch("t0", np.array([5, 7])).tolist() == [[1.0, 1.0]] * 2
    assert stream.asked == asks
