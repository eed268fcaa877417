"""What steps much runs in the pool: the loop's thread goes on with the other connections meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fleet
from fleet import optim
from fleet.errors import FleetError
from fleet.parameter_server.modes import Target, Update
from fleet.parameter_server.modes.asynchronous import ImmediateServer
from fleet.parameter_server.modes.sync_tables import SyncTables
from fleet.parameter_server.server import scheduling, trainers
from fleet.plan import ClipGradByGlobalNorm, DistributeTranspilerConfig
from fleet.tables import Table
from tests.support.joined import joined
from tests.support.parameter_server import loopback, small_model
from tests.support.threads import at_once

SECONDS = 10.0
DIMENSION = 16
MANY_ROWS = 2 * scheduling.LEAST_BYTES // 4 // DIMENSION
MODES = {
    "sync": DistributeTranspilerConfig(),
    "async": DistributeTranspilerConfig(sync_mode=False, runtime_split_send_recv=True),
}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "available_cores", lambda: 2)


def tables(**numbers: int) -> Callable[[], torch.nn.Module]:
    """Return what makes a module of tables with as many rows, whose optimizer is the trainer's."""

    def make() -> torch.nn.Module:
        return torch.nn.ModuleDict(
            {
                name: fleet.nn.DistributedEmbedding(rows, DIMENSION, name=name)
                for name, rows in numbers.items()
            }
        )

    return make


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The table and the thread of each update."""
    seen: list[tuple[str, str]] = []
    update = Table.update

    def record(self: Table, *arguments: Any, **options: Any) -> Any:
        seen.append((self.config.name, threading.current_thread().name))
        return update(self, *arguments, **options)

    monkeypatch.setattr(Table, "update", record)
    return seen


def step(trainer: Any, model: Any, **ids: list[int]) -> None:
    for name, of_table in ids.items():
        model[name](torch.tensor(of_table)).sum().backward()
    trainer.step()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return optim.Momentum(parameters, 0.1, 0.9)


@pytest.mark.parametrize("mode", MODES)
def test_a_small_gradient_that_moves_every_row_of_a_large_table_is_used_in_the_pool(mode, updates):
    model = tables(large=MANY_ROWS, small=8)
    with joined(1, servers=1, model=model, optimizer=momentum, config=MODES[mode]) as made:
        trainer, module, _ = made[0]
        step(trainer, module, large=[1, 2], small=[1])
        trainer.complete()
    threads = dict(updates)
    assert threads["large"].startswith("fleet-work")
    assert threads["small"] == "fleet-io"


def test_a_small_gradient_that_completes_a_step_of_large_ones_is_used_in_the_pool(updates, monkeypatch):
    arrived, gradient = threading.Event(), SyncTables.gradient

    def note(*arguments: Any) -> Any:
        answers = gradient(*arguments)
        arrived.set()
        return answers

    monkeypatch.setattr(SyncTables, "gradient", note)
    with joined(2, servers=1, model=tables(rows=MANY_ROWS)) as made:
        (one, of_one, _), (other, of_other, _) = made
        first = threading.Thread(target=step, args=(one, of_one), kwargs={"rows": list(range(MANY_ROWS))})
        first.start()
        assert arrived.wait(SECONDS)
        step(other, of_other, rows=[1])
        first.join(SECONDS)
        at_once(one.complete, other.complete)
    assert [thread.startswith("fleet-work") for _, thread in updates] == [True]


def many_small_layers() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])


@pytest.mark.parametrize("absent", [False, True], ids=["present", "the-last-is-absent"])
def test_many_small_blocks_that_a_norm_clips_together_are_stepped_in_the_pool(absent):
    threads = set[str]()
    with loopback(model=many_small_layers, grad_clip=ClipGradByGlobalNorm(0.01)) as job:
        store = job.servers[0].server._shard.store
        rule = store._rule

        def record(target: Target, update: Update) -> None:
            threads.add(threading.current_thread().name)
            rule(target, update)

        store._rule = record
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for layer in list(model)[: -1 if absent else None]:
            layer(torch.ones(1, 64)).sum().backward()
        trainer.step()
        trainer.complete()
    assert {name[:-2] for name in threads} == {"fleet-work"}


@contextmanager
def held_update(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[threading.Event]:
    """Let updates of a table wait within the block; give the event that the first waits."""
    waits, may_end, update = threading.Event(), threading.Event(), Table.update

    def wait(self: Table, *arguments: Any, **options: Any) -> Any:
        if self.config.name == name:
            waits.set()
            assert may_end.wait(SECONDS)
        return update(self, *arguments, **options)

    monkeypatch.setattr(Table, "update", wait)
    try:
        yield waits
    finally:
        may_end.set()


def test_others_are_served_while_one_waits_for_rows_that_a_large_gradient_changes(monkeypatch):
    model = tables(large=MANY_ROWS, other=8)
    with joined(3, servers=1, model=model, config=MODES["async"]) as made:
        (one, of_one, _), (_, of_two, _), (_, of_three, _) = made
        for trainer, module, _ in made:
            step(trainer, module, other=[1])
        with held_update(monkeypatch, "large") as waits:
            sender = threading.Thread(
                target=step, args=(one, of_one), kwargs={"large": list(range(MANY_ROWS))}
            )
            sender.start()
            assert waits.wait(SECONDS)
            asker = threading.Thread(target=of_two["large"], args=(torch.tensor([1]),))
            served = made[1][0].session.rows
            sent = threading.Event()
            request = served._request

            def note(*arguments: Any) -> Any:
                asked = request(*arguments)
                sent.set()
                return asked

            monkeypatch.setattr(served, "_request", note)
            asker.start()
            assert sent.wait(SECONDS)
            at_once(lambda: of_three["other"](torch.tensor([1])), seconds=SECONDS / 2)
            assert asker.is_alive()
        for thread in (sender, asker):
            thread.join(SECONDS)
        at_once(*(trainer.complete for trainer, _, _ in made))


def test_what_had_to_wait_for_a_large_gradient_sends_no_later_frame_to_the_pool(monkeypatch):
    look_up, threads = ImmediateServer.look_up, dict[int, str]()
    asked, may_end = threading.Event(), threading.Event()

    def record(self: Any, trainer: int, *arguments: Any) -> Any:
        threads[trainer] = threading.current_thread().name
        if trainer == 1:
            asked.set()
            assert may_end.wait(SECONDS)
        return look_up(self, trainer, *arguments)

    with joined(3, servers=1, model=tables(large=MANY_ROWS), config=MODES["async"]) as made:
        (one, of_one, _), (_, of_two, _), (_, of_three, _) = made
        for trainer, module, _ in made:
            step(trainer, module, large=[1])
            trainer.session.flush()
        monkeypatch.setattr(ImmediateServer, "look_up", record)
        with held_update(monkeypatch, "large") as waits:
            sender = threading.Thread(
                target=step, args=(one, of_one), kwargs={"large": list(range(MANY_ROWS))}
            )
            sender.start()
            assert waits.wait(SECONDS)
            asker = threading.Thread(target=of_two["large"], args=(torch.tensor([1]),))
            asker.start()
            assert asked.wait(SECONDS)
        sender.join(SECONDS)
        one.session.flush()
        of_three["large"](torch.tensor([1]))
        may_end.set()
        asker.join(SECONDS)
        at_once(*(trainer.complete for trainer, _, _ in made))
    assert threads[1].startswith("fleet-work")
    assert threads[2] == "fleet-io"


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """Let no thread with such a name start, as at the limit of threads; return what is set at the attempt."""
    tried, start = threading.Event(), threading.Thread.start

    def start_or_fail(self: threading.Thread) -> None:
        if self.name.startswith(name):
            tried.set()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    return tried


def test_a_trainer_that_cannot_start_a_thread_to_reconnect_fails_at_once(monkeypatch):
    with loopback(model=small_model) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        tried = refuse(monkeypatch, "fleet-reconnect")
        trainer.session.connections[0].stream.hang_up()
        assert tried.wait(SECONDS)
        with pytest.raises(FleetError, match="it cannot be opened again: can't start new thread"):
            model(torch.ones(1, 20)).sum().backward()


def test_a_server_that_cannot_start_a_thread_still_tells_the_trainer_its_error(monkeypatch):
    with loopback(model=tables(rows=100)) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        tried = refuse(monkeypatch, "fleet-farewell")
        rows = job.servers[0].server._shard.tables
        monkeypatch.setattr(rows, "check", lambda *_: (_ for _ in ()).throw(FleetError("these rows are odd")))
        model["rows"](torch.tensor([1])).sum().backward()
        with pytest.raises(FleetError, match="these rows are odd"):
            trainer.step()
        assert tried.is_set()
