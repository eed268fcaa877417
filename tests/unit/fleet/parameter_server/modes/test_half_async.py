"""Half-async: what is merged, when a step waits, and that nothing is lost at the end."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes import Answer, HalfAsync
from fleet.parameter_server.modes.half_async import GradientQueues
from fleet.plan.tables import TablePlan
from fleet.tables import TableConfig
from fleet.tables.rules import SGD, Adam
from fleet.wire import HyperParameters
from tests.support.modes import MakeOptimizer, OneServer, ScriptedSession, plans, sgd
from tests.support.processes import wait_for
from tests.support.row_modes import gradient


def momentum(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)  # type: ignore[arg-type]


def rate(value: float) -> HyperParameters:
    return ({"lr": value},)


class Queues:
    """The queues of a trainer, fed with gradients of one number."""

    def __init__(self, at_most: int = 20, optimizer: MakeOptimizer = sgd) -> None:
        _, self.plan, _ = plans(HalfAsync(), 2, optimizer)
        self.queues = GradientQueues(self.plan, at_most)

    def step(self, step: int, **gradients: float) -> None:
        for block in self.plan.blocks:
            if block.name in gradients:
                self.put(block.id, step, gradients[block.name])
        self.queues.complete(step, rate(step))

    def put(self, block: int, step: int, gradient: float) -> None:
        planned = self.plan.blocks[block]
        payload = torch.full(planned.shape, gradient).view(-1).view(torch.uint8).numpy().data
        self.queues.put(planned, step, payload)

    def merge(self) -> tuple[int, HyperParameters, dict[int, float]] | None:
        merged = self.queues.merge()
        if merged is None:
            return None
        gradients = {block: float(value.flatten()[0]) for block, value in merged.gradients.items()}
        return merged.step, merged.hyper_parameters, gradients


def test_gradients_of_plain_sgd_are_summed_as_its_steps_would_sum_them():
    queues = Queues()
    for step in range(4):
        queues.step(step, b=1.0 + step, w=1.0)
    assert queues.merge() == (3, rate(3), {0: 10.0, 1: 4.0})


def test_gradients_of_any_other_optimizer_are_averaged():
    queues = Queues(optimizer=momentum)
    for step in range(4):
        queues.step(step, b=1.0 + step, w=1.0)
    assert queues.merge() == (3, rate(3), {0: 2.5, 1: 1.0})


def test_at_most_so_many_steps_are_merged_and_the_rest_follows():
    queues = Queues(at_most=3)
    for step in range(5):
        queues.step(step, b=1.0, w=2.0)
    assert queues.merge() == (2, rate(2), {0: 3.0, 1: 6.0})
    assert queues.merge() == (4, rate(4), {0: 2.0, 1: 4.0})
    assert queues.merge() is None


def test_the_average_is_over_the_steps_that_had_a_gradient():
    queues = Queues(optimizer=momentum)
    queues.step(0, b=1.0)
    queues.step(1, b=3.0, w=5.0)
    queues.step(2)
    assert queues.merge() == (2, rate(2), {0: 2.0, 1: 5.0})


def test_a_step_that_is_not_complete_does_not_leave():
    queues = Queues()
    queues.step(0, b=1.0, w=1.0)
    queues.put(0, 1, 5.0)
    assert queues.merge() == (0, rate(0), {0: 1.0, 1: 1.0})
    assert queues.merge() is None
    queues.queues.complete(1, rate(1))
    assert queues.merge() == (1, rate(1), {0: 5.0})


def test_the_copy_does_not_change_with_the_gradient():
    queues = Queues()
    gradient = torch.ones(1)
    queues.queues.put(queues.plan.blocks[0], 0, gradient.view(torch.uint8).numpy().data)
    gradient.fill_(7.0)
    queues.queues.complete(0, rate(0))
    assert queues.merge() == (0, rate(0), {0: 1.0})


def test_a_server_steps_at_once_and_answers_only_who_asks():
    server = OneServer(HalfAsync(), 2)
    server.begin(0)
    assert server.send(0, 0, 2.0) == []
    assert list(server.mode.end(0, 0, [1])) == []
    assert server.value(0) == -2.0
    assert list(server.mode.pull(1, 0)) == [Answer(0, 0, (1,)), Answer(1, 0, (1,))]
    assert server.sent(1, 0) == -2.0
    assert server.mode.step_of(0) == 1


@pytest.mark.parametrize("field", ["send_queue_size", "max_merge_var_num"])
def test_a_queue_of_nothing_is_refused(field):
    with pytest.raises(ConfigurationError, match=rf"HalfAsync\.{field} is 0; expected at least 1"):
        HalfAsync(**{field: 0})


class Gate(ScriptedSession):
    """A session that holds what is sent until the gate opens, and whose waits are real.

    Values arrive by `land`, or `at_once` where they follow the request.
    """

    def __init__(self, mode: HalfAsync) -> None:
        super().__init__(mode)
        self.open = threading.Event()
        self.asked = threading.Semaphore(0)

    def flush(self) -> None:
        assert self.open.wait(60)

    def request_values(self) -> None:
        super().request_values()
        if self.at_once is not None:
            self.land(self.at_once)
        self.asked.release()

    def wait_for_values(self, *, background: bool = False) -> None:
        wait_for(lambda: self.values_arrived, "the values")

    def wait_until(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        wait_for(done, describe())


class Stepping:
    """Trainer 0: a step sends the same number for both blocks."""

    def __init__(self, **options: int) -> None:
        mode = HalfAsync(**{"send_queue_size": 20, **options})
        self.session = Gate(mode)
        self.mode = mode.make_trainer(self.session)
        self.mode.start()

    def step(self, gradient: float) -> None:
        self.mode.begin(rate(1.0))
        for block in self.session.plan.blocks:
            payload = torch.full(block.shape, gradient).view(-1).view(torch.uint8).numpy().data
            self.mode.send(block, payload)
        self.mode.finish(())

    def settle(self) -> None:
        self.mode.settle()

    def until(self, rounds: int) -> None:
        wait_for(lambda: len(self.session.sent) >= rounds, f"{rounds} rounds")


def test_a_step_does_not_wait_for_servers_until_a_queue_is_full():
    trainer = Stepping(send_queue_size=3)
    trainer.session.at_once = {"b": 0.0, "w": 0.0}
    trainer.step(1.0)
    trainer.until(1)  # the round hangs in the gate
    trainer.step(2.0)
    trainer.step(3.0)
    assert trainer.session.step == 3
    full = threading.Thread(target=trainer.step, args=(4.0,), daemon=True)
    full.start()
    full.join(0.3)
    assert full.is_alive()
    trainer.session.open.set()
    full.join(60)
    assert not full.is_alive()
    trainer.until(2)
    assert [sent[2][0] for sent in trainer.session.sent] == [[1.0], [9.0]]
    trainer.mode.close()


def test_one_update_is_under_way_at_a_time_and_the_rest_is_merged():
    trainer = Stepping()
    trainer.session.open.set()
    trainer.step(1.0)
    assert trainer.session.asked.acquire(timeout=60)
    for _ in range(3):
        trainer.step(1.0)
        threading.Event().wait(0.1)  # time in which a second round would leave
    assert len(trainer.session.sent) == 1
    trainer.session.land({"b": -1.0, "w": -1.0})
    trainer.until(2)
    assert trainer.session.sent[1][0] == 3
    assert trainer.session.sent[1][2][0] == [3.0]
    trainer.mode.close()


def test_values_are_adopted_inside_a_step_once_all_have_arrived():
    trainer = Stepping()
    trainer.session.open.set()
    bias = trainer.session.parameters["b"]
    trainer.step(1.0)
    assert trainer.session.asked.acquire(timeout=60)
    trainer.step(1.0)
    assert float(bias.detach()[0]) == 0.0  # asked for, and not here
    trainer.session.land({"b": -1.0, "w": -1.0})
    trainer.until(2)  # which follows the arrival
    assert float(bias.detach()[0]) == 0.0  # here, and adopted by nobody yet
    trainer.step(1.0)
    assert float(bias.detach()[0]) == -1.0
    assert trainer.session.asked.acquire(timeout=60)  # and the next are asked for
    trainer.session.land({"b": -2.0, "w": -2.0})
    trainer.mode.close()


def test_at_the_end_nothing_is_lost_and_the_last_values_stay():
    trainer = Stepping(max_merge_var_num=2)
    session = trainer.session
    for _ in range(5):
        trainer.step(1.0)
    session.at_once = {"b": -5.0, "w": -5.0}
    session.open.set()
    trainer.mode.stop()
    assert sum(sent[2][0][0] for sent in session.sent) == 5.0
    assert session.sent[-1][0] == 4
    assert {float(value.detach().flatten()[0]) for value in session.parameters.values()} == {-5.0}
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"fleet-communicate", "fleet-pull"}


def test_before_a_save_all_queued_gradients_leave_and_their_values_are_adopted():
    trainer = Stepping(max_merge_var_num=2)
    session = trainer.session
    for _ in range(5):
        trainer.step(1.0)
    session.at_once = {"b": -5.0, "w": -5.0}
    session.open.set()
    trainer.settle()
    assert sum(sent[2][0][0] for sent in session.sent) == 5.0
    assert session.sent[-1][0] == 4
    assert {float(value.detach().flatten()[0]) for value in session.parameters.values()} == {-5.0}
    trainer.step(1.0)  # and training goes on
    trainer.settle()
    assert session.sent[-1][0] == 5
    trainer.mode.close()


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (FleetError("the servers are gone"), "the servers are gone"),
        (MemoryError("no memory is left"), r"half-async .* \(MemoryError: no memory is left\)"),
    ],
    ids=["of-the-runtime", "any-other"],
)
def test_what_a_thread_of_the_mode_finds_the_next_step_raises(raised, words):
    trainer = Stepping()

    def broken(*_: object) -> None:
        raise raised

    trainer.session.send_step = broken  # type: ignore[method-assign, assignment]
    trainer.step(1.0)
    wait_for(lambda: trainer.session.failure, "the failure")
    with pytest.raises(FleetError, match=words):
        trainer.step(1.0)
    trainer.mode.close()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(SGD(), {3: 6.0, 5: 2.0}), (Adam(), {3: 3.0, 5: 1.0})],
    ids=["sgd-is-summed", "any-other-is-averaged-over-the-steps-with-a-gradient"],
)
def test_gradients_of_rows_are_merged_row_by_row(rule, expected):
    _, plan, _ = plans(HalfAsync(), 2)
    table = TablePlan(0, TableConfig("clicks", 1, rule), 0)
    queues = GradientQueues(replace(plan, tables=(table,)), 20)
    for step, values in enumerate(({3: 4.0}, None, {3: 2.0, 5: 2.0})):
        of_rows = gradient(values) if values else None
        queues.complete(step, rate(step), {"clicks": (of_rows.ids, of_rows.values)} if of_rows else {})
    merged = queues.merge()
    assert merged is not None
    ids, rows = merged.of_rows["clicks"]
    assert dict(zip(ids.tolist(), rows[:, 0].tolist(), strict=True)) == expected
