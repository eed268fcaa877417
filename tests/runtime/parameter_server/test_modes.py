"""The modes over real sockets: each learns as one process does, survives a lost trainer and takes it back."""

import dataclasses
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError, FleetError, PeerLostError
from fleet.parameter_server.settings import Settings
from fleet.plan import DistributeTranspilerConfig
from tests.support import diabetes, digits
from tests.support.parameter_server import QUICK, Loopback, loopback, sgd, small_model
from tests.support.processes import wait_for
from tests.support.threads import at_once, one_torch_thread

ASYNC: dict[str, Any] = {"sync_mode": False, "runtime_split_send_recv": True}
GEO: dict[str, Any] = {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": ASYNC,
    "dc-asgd": ASYNC | {"enable_dc_asgd": True},
    "half-async": {"sync_mode": False},
    "half-async-cut-by-the-sender": ASYNC | {"half_async": True},
    "geo": GEO,
}
SURVIVE = ("async", "half-async", "geo")
IMPATIENT = Settings(heartbeat_seconds=0.05, deadline_seconds=1.5)
EPOCHS = 10
# A step of this network is so short that longer queues would hold a good part of all steps.
SHORT_QUEUES = dataclasses.replace(QUICK, send_queue_size=4, max_merge_var_num=4)

every_mode = pytest.mark.parametrize("name", CONFIGS)
modes_that_survive = pytest.mark.parametrize("name", SURVIVE)


def config(name: str) -> DistributeTranspilerConfig:
    return DistributeTranspilerConfig(**CONFIGS[name])


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # by default a trainer's thread computes several steps before it yields
    with one_torch_thread():
        yield
    sys.setswitchinterval(interval)


@dataclasses.dataclass(frozen=True)
class Task:
    """Real data, and what is made of it."""

    network: Callable[[], torch.nn.Module]
    train: Callable[..., None]
    score: Callable[[torch.nn.Module], float]
    steps_per_epoch: int
    """Of each of two trainers."""
    lr: float
    learnt: float
    """What one process reaches at least."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)


TASKS = {
    "digits": Task(digits.network, digits.train, digits.accuracy, 23, lr=0.1, learnt=0.9),
    "diabetes": Task(diabetes.network, diabetes.train, diabetes.explained_variance, 12, lr=0.01, learnt=0.4),
}


@lru_cache
def baseline(task: str) -> float:
    """What one process learns from the same number of passes over the data."""
    model = TASKS[task].network()
    TASKS[task].train(model, TASKS[task].optimizer(model.parameters()).step, EPOCHS)
    return TASKS[task].score(model)


@every_mode
@pytest.mark.parametrize("data", TASKS)
def test_two_trainers_learn_what_one_process_learns(name, data):
    task = TASKS[data]
    assert baseline(data) > task.learnt
    # Sync makes half the steps of one process, each on the mean of two batches.
    epochs = 2 * EPOCHS if name == "sync" else EPOCHS
    with loopback(
        servers=2,
        trainers=2,
        optimizer=task.optimizer,
        model=task.network,
        config=config(name),
        settings=SHORT_QUEUES,
    ) as job:
        made = [job.make_trainer(index) for index in range(2)]

        def run(index: int) -> None:
            trainer, model, _ = made[index]
            trainer.start()
            task.train(model, trainer.step, epochs, index, 2)
            trainer.session.calls.barrier()
            trainer.complete()

        at_once(*(lambda index=index: run(index) for index in range(2)), seconds=100)
        for running in job.servers:
            running.join()
            assert running.failure is None
        for trainer, model, _ in made:
            assert task.score(model) >= baseline(data) - 0.03
            assert trainer.current_step == task.steps_per_epoch * epochs


def backward(model: Any) -> None:
    model.zero_grad()
    model(torch.linspace(-1, 1, 60).reshape(3, 20)).square().mean().backward()


def make_steps(trainer: Any, model: Any, steps: int) -> None:
    for _ in range(steps):
        backward(model)
        trainer.step()


@every_mode
def test_one_trainer_alone_ends_with_the_servers_values(name):
    with loopback(servers=2, config=config(name)) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        make_steps(trainer, model, 7)
        trainer.complete()
        assert trainer.current_step == 7
        held = {
            running.server._shard.blocks[number].name: value
            for running in job.servers
            for number, value in running.server._shard.store.values()
        }
        for name_, parameter in model.named_parameters():
            pieces = [held[key].flatten() for key in sorted(held) if key.split(".block")[0] == name_]
            assert torch.equal(parameter.detach().flatten(), torch.cat(pieces)), name_
        for running in job.servers:
            running.join()


@pytest.mark.parametrize("name", ["async", "half-async", "geo"])
def test_one_trainer_alone_makes_the_steps_of_torch(name):
    """With one trainer nothing is stale: async is torch to the bit, the others but for rounding."""
    with loopback(config=config(name)) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for _ in range(6):
            make_steps(trainer, model, 1)
            if name == "half-async":  # let the values of each step arrive, so that the next is not stale
                mode: Any = trainer.mode
                wait_for(lambda: mode._progress.landed, "the values")  # noqa: B023
                mode._adopt()
        trainer.complete()
        alone = small_model()
        optimizer = sgd(alone.parameters())
        for _ in range(6):
            backward(alone)
            optimizer.step()
        for (key, found), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
            if name == "async":
                assert torch.equal(found, expected), key
            else:
                torch.testing.assert_close(found, expected, msg=key)


@modes_that_survive
def test_the_others_go_on_without_a_lost_trainer_and_the_server_ends_with_its_name(name, caplog):
    job: Loopback
    with (
        loopback(trainers=2, config=config(name), server_settings=IMPATIENT) as job,
        caplog.at_level(logging.INFO),
    ):
        zero, model_0, _ = job.make_trainer(0)
        one, model_1, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        make_steps(one, model_1, 3)
        one.close()
        make_steps(zero, model_0, 4)  # nobody waits for the lost one
        wait_for(lambda: "training continues with trainer 0" in caplog.text, "the deadline")
        assert "trainer 1 lost its connection" in caplog.text
        make_steps(zero, model_0, 4)
        assert job.servers[0].thread.is_alive()
        zero.session.calls.barrier()  # a barrier counts on the lost one no more
        zero.complete()
        job.servers[0].join()
        assert isinstance(job.servers[0].failure, PeerLostError)
        assert "trainer 1 vanished for good; every other trainer has completed" in str(job.servers[0].failure)


@modes_that_survive
def test_a_restarted_trainer_goes_on_at_its_own_step(name):
    with loopback(trainers=2, config=config(name)) as job:
        zero, model_0, _ = job.make_trainer(0)
        old, model_1, _ = job.make_trainer(1)
        at_once(zero.start, old.start)
        make_steps(zero, model_0, 9)
        make_steps(old, model_1, 6)  # of GEO two pushes
        wait_for(lambda: job.servers[0].server._mode.step_of(1) == 6, "the steps to arrive")
        old.close()
        new, model_2, _ = job.make_trainer(1, attempt=1)
        new.start()
        assert (new.current_step, zero.current_step) == (6, 9)
        make_steps(new, model_2, 3)
        at_once(zero.complete, new.complete)
        assert (new.current_step, zero.current_step) == (9, 9)
        job.servers[0].join()
        assert job.servers[0].failure is None


def test_a_trainer_that_was_given_up_may_come_back():
    with loopback(trainers=2, config=config("async"), server_settings=IMPATIENT) as job:
        zero, model_0, _ = job.make_trainer(0)
        one, _, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        one.close()
        wait_for(lambda: job.servers[0].server._trainers.membership.gone == (1,), "the deadline")
        back, model_1, _ = job.make_trainer(1, attempt=1)
        back.start()
        make_steps(back, model_1, 2)
        back.complete()
        make_steps(zero, model_0, 1)
        zero.complete()
        job.servers[0].join()
        assert job.servers[0].failure is None


@modes_that_survive
def test_a_server_that_is_gone_is_an_error_in_every_mode(name):
    with loopback(config=config(name), settings=IMPATIENT) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        make_steps(trainer, model, 3)
        job.servers[0].server.close()

        def step_for_ever() -> None:
            for _ in itertools.count():
                make_steps(trainer, model, 1)

        with pytest.raises(PeerLostError, match=r"has not answered for .*vanished for good"):
            at_once(step_for_ever, seconds=30)


def test_another_mode_than_the_servers_is_refused():
    with loopback(config=config("async")) as job:
        for name, words in (
            ("sync", "mode: async here, sync there"),
            ("dc-asgd", "enable_dc_asgd: False here, True there"),
        ):
            trainer, _, _ = job.make_trainer(config=config(name))
            with pytest.raises(ConfigurationError, match=words):
                trainer.start()
    with loopback(config=config("geo")) as job:
        other = DistributeTranspilerConfig(**(GEO | {"geo_sgd_need_push_nums": 5}))
        trainer, _, _ = job.make_trainer(config=other)
        with pytest.raises(ConfigurationError, match="geo_sgd_need_push_nums: 3 here, 5 there"):
            trainer.start()


@pytest.mark.parametrize("first", [0, 1])
def test_all_trainers_of_geo_end_with_the_same_values_whoever_stops_first(first):
    with loopback(servers=2, trainers=2, config=config("geo")) as job:
        made = [job.make_trainer(index) for index in (0, 1)]
        at_once(*(trainer.start for trainer, _, _ in made))
        (early, early_model, _), (late, late_model, _) = made[first], made[1 - first]
        make_steps(early, early_model, 2)
        ending = threading.Thread(target=early.complete, daemon=True)
        ending.start()
        met = job.servers[0].server.barriers
        wait_for(lambda: met._ending == {first}, "the end of the one")
        make_steps(late, late_model, 4)
        late.session.calls.barrier()  # waits for those that train
        assert ending.is_alive()
        late.complete()
        ending.join(60)
        assert not ending.is_alive()
        for mine, other in zip(early_model.parameters(), late_model.parameters(), strict=True):
            assert torch.equal(mine, other)
        assert not torch.equal(early_model[0].weight, small_model()[0].weight)


def test_an_unused_parameter_is_not_stepped_in_async_and_its_trainer_sees_what_others_made_of_it():
    with loopback(trainers=2, config=config("async")) as job:
        zero, model_0, _ = job.make_trainer(0)
        one, model_1, _ = job.make_trainer(1)
        at_once(zero.start, one.start)
        make_steps(one, model_1, 1)
        model_0.zero_grad()
        zero.step()
        assert zero.current_step == 1
        for mine, other in zip(model_0.parameters(), model_1.parameters(), strict=True):
            assert torch.equal(mine, other)
        assert not torch.equal(model_0[0].weight, small_model()[0].weight)


def half_frozen() -> Any:
    model = small_model()
    model[3].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", ["sync", "half-async", "geo"])
def test_a_parameter_that_is_unfrozen_later_is_named_for_no_server_has_it(name):
    with loopback(config=config(name), model=half_frozen) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        make_steps(trainer, model, 1)
        model[3].bias.requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"3\.bias has a gradient, but was frozen when"):
            make_steps(trainer, model, 1)


@every_mode
def test_what_a_script_writes_to_a_parameter_is_an_error_where_the_servers_would_overwrite_it(name):
    with loopback(config=config(name)) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        make_steps(trainer, model, 5)
        model[3].weight.data.clamp_(-1e-3, 1e-3)
        if name == "geo":
            make_steps(trainer, model, 1)
            assert model[3].weight.abs().max() < 0.1
            trainer.complete()
        else:
            with pytest.raises(FleetError, match=r"parameter 3\.weight was written to .*push_parameters\(\)"):
                make_steps(trainer, model, 1)


def test_state_dict_of_geo_is_the_trainers_own():
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    with loopback(config=config("geo"), optimizer=adam) as job:
        trainer, model, optimizer = job.make_trainer()
        trainer.start()
        make_steps(trainer, model, 2)
        state = trainer.fetch_state()
        for name, parameter in model.named_parameters():
            assert torch.equal(state[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_the_threads_of_half_async_end_with_the_session():
    with loopback(config=config("half-async")) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        make_steps(trainer, model, 2)
        trainer.close()
        with pytest.raises(FleetError, match="has ended"):
            make_steps(trainer, model, 1)
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"fleet-communicate", "fleet-pull"}
