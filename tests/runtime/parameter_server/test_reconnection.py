"""A data connection that breaks between living processes: the training goes on as if it had not."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fleet import progress
from fleet.parameter_server.settings import Settings
from fleet.wire import Kind, Side
from tests.support.parameter_server import Loopback, loopback
from tests.support.proxy import Fate, Passing, proxied
from tests.support.training import assert_same_bits, one_thread, values_of

PATIENT = Settings(heartbeat_seconds=0.2, deadline_seconds=10.0)
OF_A_STEP = [(Side.TRAINER, Kind.HYPER, 1), (Side.TRAINER, Kind.GRAD, 3), (Side.TRAINER, Kind.STEP_END, 1)]
ANSWERS = [(Side.SERVER, Kind.PARAM, 3)]


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


def test_a_connection_cut_at_every_message_of_a_step_changes_no_bit(monkeypatch):
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
    with one_thread():
        with loopback(settings=PATIENT, **shape) as job:
            undisturbed = train(job, len(cuts), backward)
        before = reconnections()
        with proxied(monkeypatch, schedule.decide), loopback(settings=PATIENT, **shape) as job:
            cut = train(job, len(cuts), backward)
    assert schedule.made == cuts
    assert reconnections() - before >= 2 * len(cuts)  # at both ends
    for trainer in range(2):
        assert_same_bits(cut[trainer], undisturbed[trainer])
