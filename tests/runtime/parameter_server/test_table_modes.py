"""Tables in the modes whose trainers do not wait: each beside what it comes to in turn."""

import gc
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigurationError, FleetError
from fleet.plan import DistributeTranspilerConfig
from tests.support.clicks import (
    ADAGRAD,
    ADAM,
    DIM,
    ROWS,
    SGD,
    Clicks,
    alone,
    batch,
    loss_of,
    on_servers,
    one_step,
)
from tests.support.joined import joined, make, rows_on_servers
from tests.support.parameter_server import Loopback, loopback
from tests.support.threads import at_once, one_torch_thread

STEPS = 4
GEO = DistributeTranspilerConfig(sync_mode=False, geo_sgd_mode=True, geo_sgd_need_push_nums=2)
HALF_ASYNC = DistributeTranspilerConfig(sync_mode=False, half_async=True)

models = pytest.mark.parametrize("model", [on_servers, alone], ids=["on-servers", "held-by-trainers"])
optimizers = pytest.mark.parametrize("optimizer", [SGD, ADAM, ADAGRAD], ids=["sgd", "adam", "adagrad"])


def rows_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.embedding(torch.arange(ROWS)).clone()
    return found


def by_one_process(optimizers: Any, *, looked_up: bool) -> Any:
    """Train one model by gradients that two trainers in turn have of what they saw last; return it.

    Each sees it as its own step has left it; rows that it looks up, as they are.
    """
    model, seen = alone(), [alone(), alone()]
    made = optimizers(model)
    for step in range(STEPS):
        for trainer, view in enumerate(seen):
            if looked_up:
                view.embedding.load_state_dict(model.embedding.state_dict())
            view.zero_grad()
            loss_of(view, step, trainer).backward()
            for name, parameter in model.named_parameters():
                parameter.grad = view.get_parameter(name).grad
            for each in made:
                each.step()
            view.load_state_dict(model.state_dict())
    return model


@models
@optimizers
def test_half_async_trainers_that_take_turns_train_as_one_process_does_by_their_gradients(model, optimizer):
    with joined(2, model=model, optimizer=optimizer[0], config=HALF_ASYNC) as made:
        for step in range(STEPS):
            for index, each in enumerate(made):
                one_step(each, step, index)
                each[0].settle()
        rows, head = rows_of(made[1][1]), made[1][1].head.weight.detach().clone()
    expected = by_one_process(optimizer[1], looked_up=model is on_servers)
    torch.testing.assert_close(rows, rows_of(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(head, expected.head.weight.detach(), rtol=0, atol=1e-6)


class Exchanged:
    """What GEO comes to in one process: two models, stepped each for itself, and what servers would hold."""

    def __init__(self, optimizers: Any, *, looked_up: bool) -> None:
        self.server = alone()
        self.trainers = [alone(), alone()]
        self._made = [optimizers(each) for each in self.trainers]
        self._agreed = [alone(), alone()]
        self._stepped: list[set[int]] = [set(), set()]
        self._touched: list[set[int]] = [set(), set()]
        self._looked_up = looked_up

    @torch.no_grad()
    def look_up(self, trainer: int, ids: Any) -> None:
        """Take the rows that a trainer has not stepped from the server, if it holds none."""
        for row in set(ids) - self._stepped[trainer] if self._looked_up else ():
            for model in (self.trainers[trainer], self._agreed[trainer]):
                model.embedding.weight[row] = self.server.embedding.weight[row]

    def step(self, trainer: int, step: int) -> None:
        """Step one trainer's model."""
        ids = set(batch(step, trainer)[0].flatten().tolist())
        self.look_up(trainer, ids)
        self._stepped[trainer] |= ids
        self._touched[trainer] |= ids
        self.trainers[trainer].zero_grad()
        loss_of(self.trainers[trainer], step, trainer).backward()
        for each in self._made[trainer]:
            each.step()

    @torch.no_grad()
    def exchange(self, trainer: int) -> None:
        """Give the server half of what a trainer has changed, and take what the other has; rows by id."""
        touched = torch.tensor(sorted(self._touched[trainer]))
        for name, mine in self.trainers[trainer].named_parameters():
            at = touched if name == "embedding.weight" else slice(None)
            held, agreed = self.server.get_parameter(name), self._agreed[trainer].get_parameter(name)
            half = (mine[at] - agreed[at]) / 2
            held[at] += half
            mine[at] += held[at] - (agreed[at] + half)
            agreed[at] = held[at]
        self._touched[trainer].clear()


@models
@optimizers
def test_geo_trainers_exchange_the_rows_that_they_have_stepped(model, optimizer):
    expected = Exchanged(optimizer[1], looked_up=model is on_servers)
    with (
        one_torch_thread(),
        loopback(servers=2, trainers=2, model=model, optimizer=optimizer[0], config=GEO) as job,
    ):
        made = [make(job, index) for index in range(2)]
        at_once(*(each[0].start for each in made))
        for step in range(2 * STEPS):
            for index, each in enumerate(made):
                one_step(each, step, index)
                expected.step(index, step)
                if step % 2:
                    each[0].settle()
                    expected.exchange(index)
        for index, each in enumerate(made):
            expected.look_up(index, range(ROWS))
            torch.testing.assert_close(rows_of(each[1]), rows_of(expected.trainers[index]), rtol=0, atol=2e-6)
            head = each[1].head.weight.detach()
            torch.testing.assert_close(head, expected.trainers[index].head.weight, rtol=0, atol=2e-6)
        torch.testing.assert_close(
            rows_on_servers(job, ROWS, DIM), rows_of(expected.server), rtol=0, atol=2e-6
        )
        at_once(*(each[0].complete for each in made))
        if model is alone:
            assert torch.equal(rows_of(made[0][1]), rows_on_servers(job, ROWS, DIM))
            assert torch.equal(rows_of(made[1][1]), rows_on_servers(job, ROWS, DIM))


@models
@pytest.mark.parametrize("config", [HALF_ASYNC, GEO], ids=["half-async", "geo"])
def test_the_others_go_on_without_a_lost_trainer_which_comes_back_at_its_own_step(config, model):
    with (
        one_torch_thread(),
        loopback(servers=2, trainers=2, model=model, optimizer=ADAM[0], config=config) as job,
    ):
        stays, lost = make(job, 0), make(job, 1)
        at_once(stays[0].start, lost[0].start)
        for step in range(2):
            one_step(lost, step, 1)
        lost[0].settle()
        lost[0].close()
        for step in range(4):
            one_step(stays, step, 0)
        stays[0].settle()
        back = make(job, 1, attempt=1)
        back[0].start()
        assert (back[0].current_step, stays[0].current_step) == (2, 4)
        assert torch.equal(rows_of(back[1]), rows_on_servers(job, ROWS, DIM))
        one_step(back, 2, 1)
        at_once(back[0].complete, stays[0].complete)
        for running in job.servers:
            running.join()
            assert running.failure is None


def test_in_geo_a_row_gradient_that_is_no_number_is_refused_with_its_row():
    with joined(1, {"non_finite": "stop"}, model=on_servers, optimizer=SGD[0], config=GEO) as (made,):
        _, model, wrapped = made
        (model.embedding(torch.tensor([[3, 7]])).flatten(1)[0, DIM:] * float("nan")).sum().backward()
        with pytest.raises(FleetError, match="the gradient of row 7 of table clicks holds NaN"):
            wrapped.step()


MODES = {
    "sync": None,
    "async": DistributeTranspilerConfig(sync_mode=False, runtime_split_send_recv=True),
    "half-async": DistributeTranspilerConfig(sync_mode=False),
    "geo": GEO,
}


@models
@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_becomes_no_number_in_any_step_is_told_of_then_and_at_the_end(mode, model, caplog):
    """In step 6, which dense gradients are not looked at in."""
    with joined(1, model=model, optimizer=SGD[0], config=MODES[mode]) as ((trainer, net, wrapped),):
        for step in range(8):
            wrapped.zero_grad()
            rows = net.embedding(torch.tensor([[3, 7]])).flatten(1)[0, DIM:] * (
                float("nan") if step == 6 else 1.0
            )
            if step != 7:
                rows.sum().backward()
            wrapped.step()
        name = "clicks" if model is on_servers else "embedding.weight"
        said = f"the gradient of row 7 of table {name} holds NaN or infinity on trainer 0 in step 6"
        assert caplog.text.count(said) == 1
        trainer.complete()
    assert "training ends after step 8 with NaN or infinity in 1 of " in caplog.text
    assert f"table {name} (row 7 in step 6)" in caplog.text


def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a frame take ten rows."""
    for module in ("rows", "local_steps"):
        monkeypatch.setattr(f"fleet.parameter_server.trainer.{module}.most_rows", lambda _: 10)


@models
def test_in_geo_what_one_exchange_could_not_take_leaves_before_its_time(model, monkeypatch):
    few_at_once(monkeypatch)
    with (
        one_torch_thread(),
        loopback(
            servers=1, model=model, optimizer=SGD[0], config=replace(GEO, geo_sgd_need_push_nums=9)
        ) as job,
    ):
        trainer, net, wrapped = make(job, 0)
        trainer.start()
        before = rows_on_servers(job, ROWS, DIM)
        for begin in (0, 4, 8):
            wrapped.zero_grad()
            net.embedding(torch.arange(begin, begin + 4)).sum().backward()
            wrapped.step()
        trainer.session.rows.wait()
        before[:8] -= 0.5
        torch.testing.assert_close(rows_on_servers(job, ROWS, DIM), before)
        trainer.complete()
        before[8:12] -= 0.5
        torch.testing.assert_close(rows_on_servers(job, ROWS, DIM), before)


@models
def test_in_geo_a_step_of_more_rows_than_one_exchange_takes_is_refused(model, monkeypatch):
    few_at_once(monkeypatch)
    with joined(1, servers=1, model=model, optimizer=SGD[0], config=GEO) as ((_, net, wrapped),):
        net.embedding(torch.arange(12)).sum().backward()
        with pytest.raises(
            ConfigurationError,
            match=r"gradients of 12 rows of table \S+ for one server, expected at most 10; use smaller",
        ):
            wrapped.step()


def test_in_geo_rules_that_need_to_see_every_gradient_are_refused_with_their_table():
    def admitting() -> Any:
        table = fleet.nn.DistributedTable("clicks", DIM, ROWS, admission=fleet.tables.CountFilter(2))
        return Clicks(fleet.nn.DistributedEmbedding(ROWS, DIM, table=table))

    job = Loopback(model=admitting, optimizer=SGD[0], config=GEO)
    trainer, _, _ = job.make_trainer()
    for start in (trainer.start, partial(job.start_server, 0)):
        with pytest.raises(ConfigurationError, match="table clicks: admission and eviction depend"):
            start()


def test_in_geo_what_a_script_writes_to_rows_that_trainers_hold_is_not_pushed():
    with (
        joined(1, model=alone, optimizer=SGD[0], config=GEO) as ((trainer, _, _),),
        pytest.raises(ConfigurationError, match=r"cannot push embedding\.weight"),
    ):
        trainer.push()


def test_a_scale_is_taken_out_of_gradients_of_rows_in_geo_too():
    for model in (on_servers, alone):
        with joined(1, model=model, optimizer=SGD[0], config=GEO) as ((_, net, wrapped),):
            before = rows_of(net)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(net.embedding(torch.tensor([3, 7])).sum()).backward()
            scaler.step(wrapped)
            before[[3, 7]] -= 0.5
            assert torch.equal(rows_of(net), before)


def memory_of_this_process() -> tuple[int, int]:
    """Return the bytes that Python and numpy have asked for and not given back, and how many tensors live."""
    gc.collect()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    return tracemalloc.get_traced_memory()[0], tensors


@pytest.mark.parametrize("config", [None, GEO], ids=["sync", "geo"])
def test_however_many_steps_are_made_of_the_same_rows_memory_does_not_grow(config):
    given = {} if config is None else {"config": config}
    with joined(1, model=on_servers, optimizer=ADAGRAD[0], **given) as (made,):
        trainer, model, _ = made

        def train(steps: int) -> None:
            ahead = {model.embedding: lambda step: batch(step, 0)[0]}
            for step in fleet.prefetch(range(steps), ahead):
                one_step(made, step % 20, 0)
            trainer.settle()

        tracemalloc.start()
        try:
            train(200)
            before, tensors = memory_of_this_process()
            train(200)
            after, tensors_then = memory_of_this_process()
        finally:
            tracemalloc.stop()
    assert after - before < 200 * 400  # a batch that were kept would take 600 or more
    assert tensors_then - tensors < 20
