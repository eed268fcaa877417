"""What a snapshot gives out is the table as of its beginning, whatever happens meanwhile."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.tables import (
    BFloat16,
    Constant,
    CountFilter,
    LeastRecentlyUsed,
    LocalDisk,
    Memory,
    Table,
    TableConfig,
    TableRows,
    TimeToLive,
    Uniform,
    row_log,
    storage,
)
from fleet.tables import snapshot as module
from fleet.tables.export import apply_delta
from fleet.tables.ids import SHARDS
from fleet.tables.rows import join
from fleet.tables.rules import SGD, Adagrad
from tests.support.tables import assert_equal, crowd, updates


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_BYTES", 100)
        patch.setattr(storage, "_MIN_ROWS", 8)
        patch.setattr(row_log, "_SEGMENT_BYTES", 400)
        yield


IDS = crowd(30, (0, 3, 90, 255))
CONFIG = TableConfig(
    "t",
    3,
    Adagrad(),
    first_values=Uniform(-1.0, 1.0),
    row_type=BFloat16(),
    admission=CountFilter(2),
    eviction=(TimeToLive(6), LeastRecentlyUsed(15 * SHARDS)),
)


def trained(config=CONFIG, steps=10):
    table = Table(config)
    for ids, gradient, step in updates(IDS, steps, config.dimension):
        table.update(ids, gradient, step)
    return table


@settings(deadline=None, max_examples=10)
@pytest.mark.parametrize("where", [Memory(), LocalDisk(1)], ids=["in-memory", "on-disk"])
@given(pauses=st.lists(st.integers(0, 8), max_size=8), seed=st.integers(0, 100))
def test_updates_admissions_evictions_and_loads_meanwhile_do_not_show(where, pauses, seed):
    table = trained(replace(CONFIG, storage=where))
    expected = table.rows()
    later = updates(IDS, 1 + len(pauses), 3, seed)
    snapshot, parts = table.snapshot(), []
    for at, part in enumerate(snapshot.parts()):
        for _ in range(pauses.count(at)):
            ids, gradient, step = next(later)
            table.update(ids, gradient, 10 + step)
        if at == 4:
            table.load(TableRows(IDS[::7], torch.ones(IDS[::7].size, 3), {}))
        parts.append(part)
    whole = join(parts)
    assert snapshot.num_rows == whole.ids.size
    assert len(parts) > 8
    assert_equal(TableRows(whole.ids, whole.values, whole.state, whole.marks, snapshot.policies), expected)


def test_a_snapshot_takes_the_memory_of_what_changes_meanwhile(monkeypatch):
    table = Table(TableConfig("t", 16, Adagrad(), first_values=Constant(0.0)))
    table.update(np.arange(50_000), torch.ones(50_000, 16), 1)
    monkeypatch.setattr(module, "PART_BYTES", 60_000)
    snapshot = table.snapshot()
    for step in range(2, 30):
        table.update(np.arange(1000), torch.ones(1000, 16), step)
    assert snapshot.nbytes < table.nbytes / 20
    parts = snapshot.parts()
    for _ in range(80):
        next(parts)
    table.update(np.arange(50_000), torch.ones(50_000, 16), 30)
    assert snapshot.nbytes < table.nbytes / 2
    assert sum(part.ids.size for part in parts) > 0
    assert snapshot.is_done
    assert snapshot.nbytes < 20_000


def test_one_that_is_closed_sets_nothing_aside():
    table = trained()
    snapshot = table.snapshot()
    snapshot.close()
    before = snapshot.nbytes
    table.update(IDS, torch.ones(IDS.size, 3), 11)
    assert snapshot.nbytes == before
    table.snapshot().close()


def test_a_second_one_waits_for_the_first():
    table = trained()
    table.snapshot()
    with pytest.raises(ConfigurationError, match=r"a snapshot of step 10 is still in progress"):
        table.snapshot()


def test_rows_changed_and_ids_removed_since_a_step_make_the_later_table_of_the_earlier():
    table = trained(steps=20)
    first = table.snapshot()
    then = join(list(first.parts()))
    for ids, gradient, step in updates(IDS, 4, 3, seed=5):
        table.update(ids[ids % 3 > 0], gradient[torch.from_numpy(ids % 3 > 0)], 20 + step)
    now = table.rows()
    delta = table.snapshot(first.step)
    changed = join(list(delta.parts()))
    assert delta.num_rows == changed.ids.size < now.ids.size
    assert delta.removed.size
    assert not np.isin(delta.removed, now.ids).any()
    served = apply_delta(then, changed, torch.from_numpy(delta.removed))
    assert np.array_equal(served.ids, now.ids)
    assert torch.equal(served.values, now.values)
    # And a later one begins where this one ended.
    table.update(IDS[:2], torch.ones(2, 3), 25)
    last = table.snapshot(delta.step)
    assert np.isin(join(list(last.parts())).ids, IDS[:2]).all()


def test_an_id_that_comes_back_is_not_removed():
    table = Table(TableConfig("t", 1, SGD(), first_values=Constant(0.0), eviction=(TimeToLive(1),)))
    ids = crowd(2, (7,))
    table.update(ids, torch.ones(2, 1), 1)
    table.snapshot().close()
    table.update(ids[:1], torch.ones(1, 1), 5)
    table.update(ids[1:], torch.ones(1, 1), 6)
    assert table.snapshot(1).removed.tolist() == []


@pytest.mark.parametrize(
    ("whole_at", "said"),
    [(None, r"and there is none"), (10, r"and the last one is of step 10")],
)
def test_a_step_of_which_nobody_knows_what_went_is_refused(whole_at, said):
    table = trained()
    if whole_at:
        table.snapshot().close()
    with pytest.raises(ConfigurationError, match=rf"a snapshot since step 3 needs .*{said}"):
        table.snapshot(3)


def test_what_went_is_forgotten_with_each_snapshot_of_the_whole():
    table = Table(TableConfig("t", 1, SGD(), first_values=Constant(0.0), eviction=(TimeToLive(1),)))
    sizes = []
    for step in range(1, 40):
        table.update(np.arange(step * 100, step * 100 + 100), torch.ones(100, 1), step)
        table.snapshot().close()
        sizes.append(table.removed._steps.nbytes)
    assert max(sizes) < 2000


def test_ids_that_come_and_go_are_forgotten_once_they_outnumber_the_rows_there_were(monkeypatch):
    monkeypatch.setattr(module, "_MIN_REMOVED", 150)
    table = Table(TableConfig("t", 1, SGD(), first_values=Constant(0.0), eviction=(TimeToLive(1),)))
    table.snapshot().close()
    known = []
    for step in range(1, 40):
        table.update(np.arange(step * 100, step * 100 + 100), torch.ones(100, 1), step)
        known.append(table.removed.knows(0))
    assert known[0]
    assert not known[-1]
    assert table.removed.nbytes < 2000
    assert table.snapshot().num_rows == len(table)


def test_the_memory_of_ids_that_have_gone_is_told():
    table = Table(TableConfig("t", 1, SGD(), first_values=Constant(0.0)))
    table.update(np.arange(1000), torch.ones(1000, 1), 1)
    table.snapshot().close()
    before = table.nbytes
    table.remove(np.arange(1000))
    assert table.nbytes > before + 1000 * (8 + 4)


@pytest.mark.parametrize("storage_", [Memory(), LocalDisk(1)], ids=["in-memory", "on-disk"])
def test_rows_are_counted_part_by_part_as_they_were_while_updates_go_on(storage_):
    config = replace(CONFIG, storage=storage_)
    table, other = trained(config), trained(config)
    for each in (table, other):
        each.snapshot().close()
        for ids, gradient, step in updates(IDS[:40], 3, 3):
            each.update(ids, gradient, 10 + step)
    expected = join(list(other.snapshot(10).parts()))
    snapshot, step = table.snapshot(10), 13
    while snapshot.count_on():
        step += 1
        table.update(IDS, torch.ones(IDS.size, 3), step)
    assert step > 16
    assert snapshot.num_rows == expected.ids.size > 0
    assert_equal(join(list(snapshot.parts())), expected)
