"""Large blocks are stepped by the server's pool: several at once for one trainer, and the same to the bit."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fleet.parameter_server.modes import Target, Update
from fleet.parameter_server.server import scheduling, trainers
from fleet.plan import ClipGradByGlobalNorm
from tests.runtime.parameter_server.test_pieces import learned
from tests.support.checkpoints import OPTIMIZERS
from tests.support.parameter_server import QUICK, loopback
from tests.support.threads import one_torch_thread

SECONDS = 10.0
ROWS = scheduling.LEAST_BYTES // 4 // 128


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trainers, "available_cores", lambda: 2)
    with one_torch_thread():
        yield


def test_the_blocks_of_one_trainer_are_stepped_at_once():
    """Each block's step waits for the other's: one thread alone would make neither."""
    meeting, threads = threading.Barrier(2), set[str]()

    def two_blocks() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(128, ROWS, bias=False) for _ in range(2)])

    with loopback(model=two_blocks, settings=replace(QUICK, transport="tcp")) as job:
        store = job.servers[0].server._shard.store
        rule = store._rule

        def meet(target: Target, update: Update) -> None:
            threads.add(threading.current_thread().name)
            meeting.wait(SECONDS)
            rule(target, update)

        store._rule = meet
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for layer in model:
            layer(torch.ones(1, 128)).sum().backward()
        trainer.step()
        trainer.complete()
    assert threads == {"fleet-work-0", "fleet-work-1"}


@pytest.mark.parametrize("clip", [None, ClipGradByGlobalNorm(0.01)], ids=repr)
@pytest.mark.usefixtures("each_transport")
def test_what_the_pool_steps_is_the_same_to_the_bit(clip, monkeypatch):
    at_once = learned(256, optimizer=OPTIMIZERS["adam"], grad_clip=clip)
    monkeypatch.setattr(trainers, "LEAST_BYTES", 0)
    handed_over = learned(256, optimizer=OPTIMIZERS["adam"], grad_clip=clip)
    assert at_once.keys() == handed_over.keys()
    assert [key for key in at_once if not torch.equal(at_once[key], handed_over[key])] == []
