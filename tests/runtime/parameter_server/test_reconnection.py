"""A data connection that breaks between living processes: the training goes on as if it had not."""

import copy
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import torch

from fleet.errors import DeadlineExceededError, PeerLostError, StateLostError
from fleet.parameter_server.modes import Async, Geo, HalfAsync
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import server_connection
from fleet.parameter_server.transport.handshake import GREETING_SECONDS
from fleet.parameter_server.transport.sockets import dial
from fleet.process import progress
from fleet.wire import Kind, Side
from tests.runtime.parameter_server.slow_step import SlowStep
from tests.support.parameter_server import Loopback, loopback
from tests.support.processes import wait_for
from tests.support.proxy import Fate, Passing, partition, proxied
from tests.support.threads import at_once, one_torch_thread
from tests.support.training import assert_same_bits, values_of

PATIENT = Settings(heartbeat_seconds=0.2, deadline_seconds=10.0, transport="tcp")
OF_A_STEP = [(Side.TRAINER, Kind.HYPER, 1), (Side.TRAINER, Kind.GRAD, 3), (Side.TRAINER, Kind.STEP_END, 1)]
ANSWERS = [(Side.SERVER, Kind.PARAM, 3)]


@pytest.fixture(params=["tcp", "shared_memory"])
def patient(request) -> Settings:
    """Settings of a job whose connections break: over TCP, and of this host with shared memory."""
    return replace(PATIENT, transport=request.param)


def six_parameters() -> torch.nn.Module:
    """Return a model of three blocks on each of two servers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(3)))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that remembers: a gradient applied twice shows for ever."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Cut:
    """Where a connection is to end: at the nth frame of a kind on a line, counted within one step."""

    server: int
    trainer: int
    side: Side
    kind: Kind
    nth: int
    fate: Fate


@dataclass
class Schedule:
    """One cut per step, each made once."""

    cuts: Sequence[Cut]
    made: list[Cut] = field(default_factory=list)
    seen: dict[Any, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self, passing: Passing) -> Fate:
        """Say what becomes of a frame."""
        step = passing.step - (passing.side is Side.SERVER)
        if passing.kind not in (Kind.HYPER, Kind.GRAD, Kind.STEP_END, Kind.PARAM) or step < 0:
            return Fate.PASS
        with self.lock:
            key = (passing.server, passing.trainer, passing.side, passing.kind, step)
            nth = self.seen[key] = self.seen.get(key, -1) + 1
            wanted = self.cuts[step] if step < len(self.cuts) else None
            if wanted is None or wanted in self.made:
                return Fate.PASS
            found = Cut(passing.server, passing.trainer, passing.side, passing.kind, nth, wanted.fate)
            if found != wanted:
                return Fate.PASS
            self.made.append(wanted)
            return wanted.fate


def batches(trainer: int, step: int) -> torch.Tensor:
    """Return what a trainer trains on at a step."""
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + trainer))


def train(job: Loopback, steps: int, backward: Callable[[Any, int, int], None]) -> list[dict[str, Any]]:
    """Train with every trainer of a job, each in a thread; return what their models end with."""
    made = [job.make_trainer(index) for index in range(job.num_trainers)]
    ended: dict[int, dict[str, Any]] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        trainer, model, _ = made[index]
        try:
            trainer.start()
            for step in range(steps):
                model.zero_grad()
                backward(model, index, step)
                trainer.step()
            trainer.complete()
            ended[index] = values_of(model)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(job.num_trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive() or errors, "a trainer still trains"
        if errors:
            raise errors[0]
    for running in job.servers:
        running.join()
        assert running.failure is None
    return [ended[index] for index in sorted(ended)]


def backward(model: Any, trainer: int, step: int) -> None:
    """Leave gradients that differ from step to step and from trainer to trainer."""
    model(batches(trainer, step)).square().mean().backward()


def reconnections() -> float:
    """Return how many connections this process has opened again so far, at both ends."""
    return float(progress.snapshot()["counters"].get("reconnections", 0))


def test_a_connection_cut_at_every_message_of_a_step_changes_no_bit(monkeypatch, patient):
    """One step per cut: before and after each message, within some, of both directions, at all four lines."""
    cuts = [
        Cut(server, trainer, side, kind, nth, fate)
        for server in range(2)
        for trainer in range(2)
        for side, kind, times in OF_A_STEP + ANSWERS
        for nth in range(times)
        for fate in (Fate.CUT_BEFORE, Fate.CUT_AFTER, *([Fate.CUT_WITHIN] if nth == 1 else []))
    ]
    schedule = Schedule(cuts)
    shape: dict[str, Any] = {"servers": 2, "trainers": 2, "optimizer": momentum, "model": six_parameters}
    with one_torch_thread():
        with loopback(settings=PATIENT, **shape) as job:
            undisturbed = train(job, len(cuts), backward)
        before = reconnections()
        with proxied(monkeypatch, schedule.decide), loopback(settings=patient, **shape) as job:
            cut = train(job, len(cuts), backward)
    # A trainer may begin the next step while another's last values are still on their way.
    assert sorted(schedule.made, key=cuts.index) == cuts
    assert reconnections() - before >= 2 * len(cuts)  # at both ends
    for trainer in range(2):
        assert_same_bits(cut[trainer], undisturbed[trainer])


def cut_now_and_then(passing: Passing) -> Fate:
    """Cut each kind of frame again and again, before and after it."""
    if passing.kind is Kind.HELLO or passing.nth % 4 != 2:
        return Fate.PASS
    return Fate.CUT_AFTER if passing.nth % 8 == 2 else Fate.CUT_BEFORE


@pytest.mark.parametrize(
    "mode", [pytest.param(Async(dc_asgd=True), id="async"), pytest.param(Geo(push_nums=2), id="geo")]
)
def test_modes_without_a_barrier_take_each_gradient_once_too(monkeypatch, mode, patient):
    shape: dict[str, Any] = {"servers": 2, "optimizer": momentum, "model": six_parameters, "mode": mode}
    with one_torch_thread():
        with loopback(settings=PATIENT, **shape) as job:
            undisturbed = train(job, 12, backward)
        before = reconnections()
        with proxied(monkeypatch, cut_now_and_then), loopback(settings=patient, **shape) as job:
            cut = train(job, 12, backward)
    assert reconnections() - before >= 12
    assert_same_bits(cut[0], undisturbed[0])


def counters() -> torch.nn.Module:
    """Return parameters that count the gradients of one which are applied to them."""
    return torch.nn.ParameterDict({f"p{i}": torch.zeros(5) for i in range(6)})


def test_half_async_takes_each_gradient_once_whatever_it_merges(monkeypatch, patient):
    def count(model: Any, trainer: int, step: int) -> None:
        del trainer, step
        sum(parameter.sum() for parameter in model.parameters()).backward()

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    with (
        proxied(monkeypatch, cut_now_and_then),
        loopback(servers=2, optimizer=plain, model=counters, mode=HalfAsync(2, 2), settings=patient) as job,
    ):
        (found,) = train(job, 40, count)
    assert_same_bits(found, {name: torch.full((5,), -40.0) for name in found})


def test_a_connection_cut_while_a_session_begins_or_ends_is_opened_again(monkeypatch, patient):
    """The greeting, the first values, and the three words of the end."""
    ends = {Kind.HELLO, Kind.PULL, Kind.PARAM, Kind.COMPLETE, Kind.GOODBYE}

    def decide(passing: Passing) -> Fate:
        if passing.kind not in ends or passing.server == 1:
            return Fate.PASS
        return {0: Fate.CUT_BEFORE, 1: Fate.CUT_AFTER}.get(passing.nth, Fate.PASS)

    with proxied(monkeypatch, decide), loopback(servers=2, model=six_parameters, settings=patient) as job:
        (found,) = train(job, 2, backward)
    alone = six_parameters()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        backward(alone, 0, step)
        optimizer.step()
    assert_same_bits(found, values_of(alone))


def test_a_connection_that_swallows_everything_is_found_although_the_server_answers_calls(
    monkeypatch, caplog
):
    swallowed: list[Passing] = []

    def decide(passing: Passing) -> Fate:
        if not swallowed and passing.kind is Kind.GRAD and passing.step == 1 and passing.nth % 3 == 1:
            swallowed.append(passing)
            return Fate.SWALLOW
        return Fate.PASS

    shape: dict[str, Any] = {"servers": 2, "trainers": 2, "optimizer": momentum, "model": six_parameters}
    with one_torch_thread():
        with loopback(settings=PATIENT, **shape) as job:
            undisturbed = train(job, 3, backward)
        with proxied(monkeypatch, decide), loopback(settings=PATIENT, **shape) as job:
            found = train(job, 3, backward)
    assert swallowed
    assert "has carried nothing for 1 s, not even the reply to a probe; closing it" in caplog.text
    assert "is back; " in caplog.text
    assert_same_bits(found[1], undisturbed[1])


def test_a_trainer_whose_gradient_waits_for_a_slower_trainer_keeps_its_connection():
    """Whatever arrives satisfies the watchdog of a connection, so a few frames suffice here."""
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]  # a server has receive buffers for three of them
    settings = replace(PATIENT, heartbeat_seconds=0.5, deadline_seconds=30.0)
    model = torch.nn.Sequential(*layers)
    with loopback(trainers=2, model=lambda: copy.deepcopy(model), settings=settings) as job:
        trainers, models, _ = zip(*(job.make_trainer(index) for index in range(2)), strict=True)
        for trainer in trainers:
            trainer.start()

        def step(index: int) -> None:
            models[index](torch.ones(1, 512)).sum().backward()
            trainers[index].step()

        before = reconnections()
        early = threading.Thread(target=step, args=(1,))
        early.start()
        stream = trainers[1].session.connections[0].stream
        waiting = job.servers[0].server._shard.buffers.held
        wait_for(lambda: 1 in waiting, "a gradient that waits for a receive buffer")
        taken = stream.taken
        wait_for(lambda: stream.taken >= taken + 3, "frames that show that the connection works")
        step(0)
        early.join()
        assert reconnections() == before
        for trainer in trainers:
            trainer.complete()


def test_a_server_that_cannot_be_reached_any_more_is_tried_so_often(monkeypatch):
    settings = replace(PATIENT, retry_times=1)
    dialled: list[int] = []
    with loopback(settings=settings, model=six_parameters) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()

        def refuse(host: str, port: int, **_: Any) -> Any:
            dialled.append(port)
            raise ConnectionRefusedError(f"{host} refuses")

        def step() -> None:
            backward(model, 0, 0)
            trainer.step()

        monkeypatch.setattr(server_connection, "dial", refuse)
        job.servers[0].server._trainers.sessions[0].stream.hang_up()
        wait_for(lambda: len(dialled) == 2, "both tries")
        with pytest.raises(
            PeerLostError,
            match=r"refuses; tried 2 times \(FLAGS_rpc_retry_times\), though it answers calls",
        ):
            step()
    assert len(dialled) == 2


def test_a_server_whose_data_port_refuses_who_has_joined_is_given_up_with_what_is_known(monkeypatch):
    def refuse(host: str, port: int, **_: Any) -> Any:
        raise ConnectionRefusedError(f"{host} refuses {port}")

    monkeypatch.setattr(server_connection, "dial", refuse)
    with loopback(settings=replace(PATIENT, retry_times=0), model=six_parameters) as job:
        trainer, _, _ = job.make_trainer()
        words = r"refuses \d+; tried 1 time \(FLAGS_rpc_retry_times\), though it let this trainer join"
        with pytest.raises(PeerLostError, match=words):
            trainer.start()


@pytest.mark.parametrize("retry_times", [0, 1, 3])
def test_what_became_of_a_dead_server_does_not_depend_on_the_number_of_tries(retry_times, caplog):
    settings = replace(PATIENT, retry_times=retry_times)
    with loopback(settings=settings, model=six_parameters) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        job.servers[0].server.close()
        wait_for(lambda: "connecting again" in caplog.text, "the trainer's word")
        job.start_server(0)
        backward(model, 0, 0)
        with pytest.raises(StateLostError, match="came back without its state"):
            trainer.step()


def test_a_server_that_ends_answers_no_call_once_its_data_connections_are_hung_up(monkeypatch):
    with loopback(settings=PATIENT, model=six_parameters) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        server = job.servers[0].server
        assert server._ports is not None
        close, answers = server._ports.close, list[BaseException | None]()
        control = trainer.session.calls.controls[0]

        def close_after_a_call() -> None:
            if not answers:
                answers.append(control.heartbeat(5.0).exception(timeout=10.0))
            close()

        monkeypatch.setattr(server._ports, "close", close_after_a_call)
        server.close()
    assert isinstance(answers[0], grpc.RpcError)


@pytest.mark.parametrize("retry_times", [0, 3])
def test_a_server_that_stays_dead_is_not_said_to_answer(retry_times):
    settings = replace(PATIENT, retry_times=retry_times, deadline_seconds=1.0)
    with loopback(settings=settings, model=six_parameters) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        job.servers[0].server.close()
        backward(model, 0, 0)
        with pytest.raises(PeerLostError, match=r"has not answered for .* FLAGS_rpc_deadline is 1000 ms"):
            trainer.step()


def counted_tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Shorten the time for a greeting; return the ports that trainers connect with, as they do."""
    dialled: list[int] = []

    def count(host: str, port: int, **options: Any) -> Any:
        dialled.append(port)
        return dial(host, port, **options)

    monkeypatch.setattr(server_connection, "dial", count)
    monkeypatch.setattr(server_connection, "GREETING_SECONDS", 0.1)
    return dialled


def test_a_server_that_is_busy_with_a_step_is_awaited_as_long_as_it_answers_calls(monkeypatch):
    settings = replace(PATIENT, heartbeat_seconds=0.05, retry_times=1)
    with loopback(settings=settings, model=six_parameters) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        step, dialled, before = SlowStep(job, monkeypatch), counted_tries(monkeypatch), reconnections()
        backward(model, 0, 0)
        stepping = threading.Thread(target=trainer.step, daemon=True)
        stepping.start()
        wait_for(lambda: len(dialled) > 3 or not stepping.is_alive(), "more tries than retry_times allows")
        assert stepping.is_alive()
        step.may_end.set()
        stepping.join(60)
        assert trainer.current_step == 1
        assert reconnections() - before == 2  # at both ends: what was given up meanwhile is no connection
        trainer.complete()
        job.servers[0].join()
        assert job.servers[0].failure is None


def test_a_server_that_is_busy_for_too_long_is_given_up_although_it_lives(monkeypatch):
    settings = replace(PATIENT, heartbeat_seconds=0.05)
    with loopback(settings=settings, model=six_parameters) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        monkeypatch.setattr(Settings, "stalled_seconds", 1.0)  # and a deadline that no slow heartbeat meets
        step, _ = SlowStep(job, monkeypatch), counted_tries(monkeypatch)
        try:
            backward(model, 0, 0)  # leaves; nobody waits in step(), who would give up as well
            client = trainer.session
            failure = wait_for(lambda: client._failure, "the connection's own limit")
            assert isinstance(failure, DeadlineExceededError)
            assert re.search(r"waited \d+ s for .*, which answers calls, to greet a new", str(failure))
        finally:
            step.may_end.set()


def test_a_session_that_ends_does_not_wait_to_be_greeted(monkeypatch):
    with loopback(settings=PATIENT, model=six_parameters) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        step, session = SlowStep(job, monkeypatch), job.servers[0].server._trainers.sessions[0]
        try:
            backward(model, 0, 0)
            assert step.begun.wait(60)
            trainer.session.connections[0].stream.hang_up()
            wait_for(session._resumption.lock.locked, "a connection that waits for the step")
            name = f"fleet-reconnect {job.endpoints[0]}"
            (again,) = (each for each in threading.enumerate() if each.name == name)
            trainer.close()
            again.join(GREETING_SECONDS / 2)
            assert not again.is_alive()
        finally:
            step.may_end.set()


def test_a_server_that_dies_while_it_is_busy_is_named_by_the_deadline(monkeypatch):
    settings = replace(PATIENT, heartbeat_seconds=0.05, deadline_seconds=1.0)
    with loopback(settings=settings, model=six_parameters) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        step, dialled = SlowStep(job, monkeypatch), counted_tries(monkeypatch)
        backward(model, 0, 0)
        try:
            wait_for(lambda: len(dialled) > 1, "the connection to be given up")
            control = job.servers[0].server._control
            assert control is not None
            control.stop()
            with pytest.raises(PeerLostError, match=r"has not answered for .* FLAGS_rpc_deadline is 1000 ms"):
                trainer.step()
        finally:
            step.may_end.set()


@pytest.mark.serial
def test_a_partition_that_heals_in_time_is_named_and_costs_nothing_else(monkeypatch, caplog):
    settings = replace(PATIENT, heartbeat_seconds=0.1, deadline_seconds=20.0)
    with (
        one_torch_thread(),
        partition(monkeypatch) as network,
        loopback(servers=2, model=six_parameters, settings=settings) as job,
    ):
        trainer, model, _ = job.make_trainer()
        trainer.start()
        network.cut()
        cut_at = time.monotonic()
        backward(model, 0, 0)
        stepping = threading.Thread(target=trainer.step, daemon=True)
        stepping.start()
        wait_for(lambda: "nothing has arrived from trainer 0 for" in caplog.text, "the server's warning")
        wait_for(
            lambda: re.search(r"parameter server \S+ has not answered for", caplog.text), "the trainer's"
        )
        assert time.monotonic() - cut_at < 5
        network.heal()
        stepping.join(60)
        assert not stepping.is_alive()
        trainer.complete()
        for running in job.servers:
            running.join()
            assert running.failure is None


def test_a_partition_that_does_not_heal_ends_both_sides_by_the_deadline(monkeypatch):
    settings = replace(PATIENT, heartbeat_seconds=0.1, deadline_seconds=1.5)
    with (
        partition(monkeypatch) as network,
        loopback(trainers=2, model=six_parameters, settings=settings) as job,
    ):
        trainer, model, _ = job.make_trainer()
        other, _, _ = job.make_trainer(1)
        at_once(trainer.start, other.start)
        network.cut()
        backward(model, 0, 0)
        with pytest.raises(PeerLostError, match=r"has not answered for .* FLAGS_rpc_deadline is 1500 ms"):
            trainer.step()
        job.servers[0].join()
        assert isinstance(job.servers[0].failure, PeerLostError)
        assert "was heard last" in str(job.servers[0].failure)
