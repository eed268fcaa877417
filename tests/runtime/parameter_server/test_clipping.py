"""Gradients clipped on the servers: as torch.nn.utils clips the averaged gradient in one process."""

import dataclasses
import re
import threading
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigurationError, FleetError, PeerLostError
from fleet.fluid.render import server_plan
from fleet.parameter_server import waits
from fleet.parameter_server.modes import NormPart
from fleet.parameter_server.server.peer_servers import PeerServers
from fleet.parameter_server.settings import Settings
from tests.support.parameter_server import loopback, small_model
from tests.support.processes import wait_for
from tests.support.threads import one_torch_thread
from tests.support.training import (
    Training,
    assert_same_bits,
    train_alone,
    train_together,
    values_of,
)


def backward(model: Any, step: int, trainer: int, no_sync: Any) -> None:
    """Leave gradients whose norms are far apart, from step to step and from parameter to parameter."""
    x = torch.linspace(-1, 1, 60).reshape(3, 20) * (step + 1) ** 2
    (model(x) - trainer - 1).square().mean().backward()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)


def by_norm(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        torch.nn.utils.clip_grad_norm_(parameter, 0.5)


TRAINING = Training(small_model, momentum, backward)
WAYS = [
    pytest.param(
        fleet.ClipGradByValue(0.01),
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
        id="by-value",
    ),
    pytest.param(fleet.ClipGradByNorm(0.5), by_norm, id="by-norm"),
    pytest.param(
        fleet.ClipGradByGlobalNorm(0.5),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
        id="by-global-norm",
    ),
]


@pytest.fixture(scope="module")
def unclipped():
    with one_torch_thread():
        return train_alone(TRAINING)


@pytest.mark.parametrize(("clip", "in_torch"), WAYS)
def test_the_result_is_torch_s_and_two_runs_are_equal_to_the_bit(clip, in_torch, unclipped):
    with one_torch_thread():
        expected = train_alone(TRAINING, in_torch)
    first, second = train_together(TRAINING, grad_clip=clip)
    assert_same_bits(first, second)
    for name, value in expected.items():
        assert not torch.allclose(value, unclipped[name], rtol=1e-3), f"{name} was not clipped"
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-7)
    if isinstance(clip, fleet.ClipGradByValue):
        assert_same_bits(first, expected)
    again, _ = train_together(TRAINING, grad_clip=clip)
    assert_same_bits(again, first)


@pytest.mark.parametrize(("clip", "in_torch"), WAYS[1:])
def test_the_number_of_servers_changes_the_norm_by_rounding_at_most(clip, in_torch):
    runs = [train_together(TRAINING, servers=servers, grad_clip=clip)[0] for servers in (1, 3)]
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, rtol=1e-6, atol=1e-8)


def test_trainers_that_clip_otherwise_are_refused():
    with loopback(grad_clip=fleet.ClipGradByNorm(1.0)) as job:
        trainer, _, _ = job.make_trainer(grad_clip=fleet.ClipGradByNorm(2.0))
        with pytest.raises(ConfigurationError, match=r"grad_clip: .*=1\.0\) here, .*=2\.0\) there"):
            trainer.start()


def test_a_norm_that_lacks_a_server_is_said_by_name_while_it_is_awaited(caplog, monkeypatch):
    def tell_nobody(peers: PeerServers, part: NormPart, servers: Any) -> None: ...

    monkeypatch.setattr(waits, "FIRST_WORD_SECONDS", 0.1)
    monkeypatch.setattr(PeerServers, "send", tell_nobody)
    with loopback(servers=2, grad_clip=fleet.ClipGradByGlobalNorm(1.0)) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        backward(model, 0, 0, None)

        def step_in_vain() -> None:
            with pytest.raises(FleetError, match="has ended"):
                trainer.step()

        stepping = threading.Thread(target=step_in_vain, daemon=True)
        stepping.start()
        other = job.endpoints[1]
        said = f"step 0 waits for the part of parameter server {other} in the norm of all gradients"
        wait_for(lambda: f"parameter server {job.endpoints[0]}: {said}" in caplog.text, "the server's words")
        told = re.compile(rf"waiting for .* of step 0 from .*{said}")
        wait_for(lambda: told.search(caplog.text), "the trainer's words")
        trainer.close()
        stepping.join(60)
        assert not stepping.is_alive()


@pytest.mark.parametrize("sends_again_first", [True, False])
def test_a_trainer_that_comes_back_while_the_servers_exchange_a_norm_holds_up_nobody(
    sends_again_first, monkeypatch
):
    """What its earlier life had sent counts; what it sends again is taken, and not used."""
    held: list[Any] = []
    send = PeerServers.send
    monkeypatch.setattr(PeerServers, "send", lambda *arguments: held.append(arguments))
    one_step = dataclasses.replace(TRAINING, steps=(1, 1))
    clip = fleet.ClipGradByGlobalNorm(0.5)
    with one_torch_thread(), loopback(servers=2, trainers=2, optimizer=momentum, grad_clip=clip) as job:
        zero, model_0, _ = job.make_trainer(0)
        old, model_1, _ = job.make_trainer(1)
        zero.start()
        old.start()
        backward(model_0, 0, 0, None)
        backward(model_1, 0, 1, None)  # leaves; step() never comes
        stepping = threading.Thread(target=zero.step, daemon=True)
        stepping.start()
        wait_for(lambda: len(held) == 2, "both servers' parts")

        new, model_2, _ = job.make_trainer(1, attempt=1)
        new.start()
        assert new.current_step == 0
        if sends_again_first:
            backward(model_2, 50, 1, None)
        for arguments in held:
            send(*arguments)
        if not sends_again_first:
            stepping.join(60)
            backward(model_2, 50, 1, None)
        new.step()
        stepping.join(60)
        assert not stepping.is_alive()
        assert (zero.current_step, new.current_step) == (1, 1)
        found = values_of(model_0)
        assert_same_bits(found, values_of(model_2))
    monkeypatch.setattr(PeerServers, "send", send)
    assert_same_bits(found, train_together(one_step, grad_clip=clip)[0])


def test_a_server_that_never_takes_a_part_is_lost_and_named():
    quick = Settings(heartbeat_seconds=0.05, deadline_seconds=0.5)
    with loopback(servers=1, grad_clip=fleet.ClipGradByGlobalNorm(1.0)) as job:
        plan = server_plan(job.transpile()[0].get_pserver_program(job.endpoints[0]))
        # The port is bound by nobody: a server that has gone.
        gone = job.endpoints[0].rpartition(":")[0] + ":1"
        failures: list[FleetError] = []
        plan = dataclasses.replace(plan, endpoints=(job.endpoints[0], gone))
        peers = PeerServers(plan, job.job, quick, failures.append)
        peers.send(NormPart(3, "", 0, {0: 1.0}), [1])
        wait_for(lambda: failures, "the failure")
        peers.close()
    assert isinstance(failures[0], PeerLostError)
    assert (
        f"the norm of all gradients at step 3: parameter server {gone} did not accept the part of "
        f"{job.endpoints[0]} within 0.5 s"
    ) in str(failures[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agreement": {"mode": "other"}}, "does not run the same training as server 1"),
        ({"server": 0}, "that norm does not cover blocks of both servers"),
    ],
)
def test_a_server_of_another_training_is_refused(change, words):
    clip = fleet.ClipGradByGlobalNorm(1.0)
    with loopback(servers=2, grad_clip=clip) as job:
        plan = server_plan(job.transpile()[0].get_pserver_program(job.endpoints[1]))
        if "agreement" in change:
            plan = dataclasses.replace(plan, agreement=change["agreement"])
        failures: list[FleetError] = []
        peers = PeerServers(plan, job.job, job.settings, failures.append)
        peers.send(NormPart(0, "", change.get("server", 1), {0: 1.0}), [0])
        wait_for(lambda: failures, "the refusal")
        peers.close()
    assert isinstance(failures[0], ConfigurationError)
    assert words in str(failures[0])
