"""Rows that are fetched while the batch before is trained on, with real sockets."""

from typing import Any

import pytest
import torch

import fleet
from fleet.plan import DistributeTranspilerConfig
from tests.support.clicks import ADAM, ROWS, SGD, batch, on_servers, one_step
from tests.support.joined import joined
from tests.support.processes import wait_for
from tests.support.threads import at_once

STEPS = 5
ASYNC = DistributeTranspilerConfig(sync_mode=False, runtime_split_send_recv=True)
HALF_ASYNC = DistributeTranspilerConfig(sync_mode=False, half_async=True)
GEO = DistributeTranspilerConfig(sync_mode=False, geo_sgd_mode=True, geo_sgd_need_push_nums=2)


def ahead_of(trainer: Any) -> Any:
    """Return the batch that was prefetched last."""
    return trainer.session.rows._prefetched["clicks"][-1]


def train(made: Any, index: int, *, ahead: bool) -> None:
    """Make all steps; where rows are fetched ahead, await those of the next batch in each forward pass."""
    trainer, model, _ = made[index]
    steps: Any = range(STEPS)
    if ahead:
        steps = fleet.prefetch(steps, {model.embedding: lambda step: batch(step, index)[0]})
        model.head.register_forward_pre_hook(lambda *_: await_next(trainer, index))
    for step in steps:
        one_step(made[index], step, index)


def await_next(trainer: Any, index: int) -> None:
    following = min(trainer.current_step + 1, STEPS - 1)
    asked = ahead_of(trainer)
    assert asked.ids.tolist() == batch(following, index)[0].unique().tolist()
    wait_for(lambda: not asked.look_up.pending, "the rows of the next batch")


@pytest.mark.parametrize("of_trainer", [{}, {"cross_step": True}], ids=["", "cross-step"])
def test_in_sync_mode_rows_that_come_ahead_change_no_bit(of_trainer):
    rows = []
    for ahead in (False, True):
        with joined(2, of_trainer, model=on_servers, optimizer=ADAM[0]) as made:
            at_once(*(lambda index=index: train(made, index, ahead=ahead) for index in range(2)))  # noqa: B023
            with torch.no_grad():
                rows.append(made[0][1].embedding(torch.arange(ROWS)))
    assert torch.equal(*rows)


def test_a_batch_whose_rows_are_there_asks_for_none():
    with joined(1, model=on_servers, optimizer=SGD[0]) as made:
        trainer, model, _ = made[0]
        rows, asked = trainer.session.rows, list[int]()
        request = rows._request

        def counted(table: Any, ids: Any, step: int) -> Any:
            asked.append(step)
            return request(table, ids, step)

        rows._request = counted
        train(made, 0, ahead=True)
        assert asked == [1, 0, 2, 3, 4]
        with torch.no_grad():
            model.embedding(torch.arange(ROWS))
        assert asked[-1] == STEPS


@pytest.mark.parametrize("config", [ASYNC, HALF_ASYNC], ids=["async", "half-async"])
def test_in_async_mode_a_batch_has_the_rows_from_before_the_step_that_it_follows(config):
    with joined(1, model=on_servers, optimizer=SGD[0], config=config) as ((trainer, model, wrapped),):
        ids, seen = torch.tensor([3]), []
        for _ in fleet.prefetch(range(3), {model.embedding: lambda _: ids}):
            wait_for(lambda: not ahead_of(trainer).look_up.pending, "the rows of the next batch")
            rows = model.embedding(ids)
            seen.append(rows.detach().clone())
            rows.sum().backward()
            wrapped.step()
            trainer.settle()
        assert torch.equal(seen[1], seen[0])
        assert torch.equal(seen[2], seen[0] - 0.5)


def test_a_geo_trainer_reads_its_own_rows_whatever_came_ahead():
    rows = []
    for ahead in (False, True):
        with joined(1, model=on_servers, optimizer=ADAM[0], config=GEO) as ((trainer, model, optimizer),):
            steps: Any = range(STEPS)
            if ahead:
                steps = fleet.prefetch(steps, {model.embedding: lambda step: batch(step, 0)[0]})
            for step in steps:
                one_step((trainer, model, optimizer), step, 0)
                trainer.settle()
            with torch.no_grad():
                rows.append(model.embedding(torch.arange(ROWS)))
    assert torch.equal(*rows)
