"""Rows in GEO mode: only what was touched travels, and all trainers end with the servers' rows."""

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables import Constant, CountFilter, Table, TableConfig, geo
from fleet.tables.geo import GeoRows, server_config
from fleet.tables.rules import SGD, Momentum

EVERY = np.arange(-5, 30)


def config(rule=None, **options):
    # Numbers of which every sum and half is exact.
    return TableConfig("t", 2, rule or SGD(), first_values=Constant(8.0), options={"lr": 0.5, **options})


def gradients(count, seed):
    drawn = torch.randint(-8, 8, (count, 2), generator=torch.Generator().manual_seed(seed))
    return drawn.float()


def exchange(trainer, server, step):
    leaving = trainer.leaving(step)
    server.update(leaving.ids, leaving.values.clone(), step)
    trainer.arrived(leaving.ids, server.look_up(leaving.ids), step)
    return leaving


def test_a_trainer_alone_has_what_its_rule_makes_and_so_has_the_server():
    trainer, server, own = GeoRows(config(), 1), Table(server_config(config())), Table(config())
    for step in range(1, 9):
        ids = np.unique(np.random.default_rng(step).integers(-5, 30, 10))
        for table in (trainer, own):
            table.update(ids, gradients(ids.size, step), step)
        if step % 2 == 0:
            exchange(trainer, server, step)
    for table in (trainer, server):
        assert torch.equal(table.look_up(EVERY), own.look_up(EVERY))


def test_only_the_ids_that_were_touched_since_the_last_time_leave():
    trainer, server = GeoRows(config(), 2), Table(server_config(config()))
    trainer.update(np.array([3, 7]), torch.ones(2, 2), 1)
    trainer.update(np.array([7, 9]), torch.ones(2, 2), 2)
    assert exchange(trainer, server, 2).ids.tolist() == [3, 7, 9]
    trainer.update(np.array([-5]), torch.ones(1, 2), 3)
    assert exchange(trainer, server, 3).ids.tolist() == [-5]
    assert exchange(trainer, server, 3).ids.tolist() == []
    assert len(server) == 4


def test_ids_of_many_updates_are_sorted_now_and_then_only(monkeypatch):
    monkeypatch.setattr(geo, "_MIN_PENDING", 10)
    sorts, unique = [], np.unique

    def counted(ids):
        sorts.append(ids.size)
        return unique(ids)

    monkeypatch.setattr(np, "unique", counted)
    trainer = GeoRows(config(), 2)
    for step in range(1, 101):
        trainer.update(np.array([step % 3, 50]), torch.ones(2, 2), step)
    assert trainer.leaving(100).ids.tolist() == [0, 1, 2, 50]
    assert len(sorts) < 20
    assert max(sorts) < 20


def test_what_each_of_two_has_changed_reaches_the_other_by_half():
    trainers, server = [GeoRows(config(), 2) for _ in range(2)], Table(server_config(config()))
    trainers[0].update(np.array([1, 2]), torch.full((2, 2), 4.0), 1)  # 8 becomes 6
    trainers[1].update(np.array([2, 3]), torch.full((2, 2), -4.0), 1)  # 8 becomes 10
    for trainer in trainers:
        exchange(trainer, server, 1)
    ids = np.array([1, 2, 3])
    assert server.look_up(ids)[:, 0].tolist() == [7.0, 8.0, 9.0]
    for trainer in trainers:
        trainer.arrived(ids, server.look_up(ids), 1)
    # What has not left yet is the other half of each one's own.
    assert trainers[0].look_up(ids)[:, 0].tolist() == [6.0, 7.0, 9.0]
    assert trainers[1].look_up(ids)[:, 0].tolist() == [7.0, 9.0, 10.0]


def test_rows_that_arrive_leave_the_state_of_the_trainers_rule():
    trainer, own = GeoRows(config(Momentum(), momentum=0.5), 1), Table(config(Momentum(), momentum=0.5))
    ids = np.array([1])
    for table in (trainer, own):
        table.update(ids, torch.full((1, 2), 4.0), 1)
    trainer.leaving(1)
    trainer.arrived(ids, own.look_up(ids) + 16.0, 1)
    for table in (trainer, own):
        table.update(ids, torch.zeros(1, 2), 2)
    assert torch.equal(trainer.look_up(ids), own.look_up(ids) + 16.0)


def test_rules_that_would_decide_otherwise_on_each_trainer_are_refused():
    with pytest.raises(ConfigurationError, match=r"table t: admission and eviction depend on all updates"):
        GeoRows(TableConfig("t", 2, SGD(), admission=CountFilter(2)), 2)
