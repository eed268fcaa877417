"""How tensors travel between a trainer and a server: through shared memory on one host, else over TCP."""

import logging
import os
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.parameter_server.modes import Async, Geo, HalfAsync, Mode
from fleet.parameter_server.trainer import server_connection
from fleet.parameter_server.trainer.server_connection import ServerConnection
from fleet.parameter_server.transport import handshake, sockets
from fleet.parameter_server.transport.handshake import receive_with
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.parameter_server.transport.sockets import receive_exactly
from fleet.plan import ClipGradByGlobalNorm
from fleet.process import progress
from tests.support.parameter_server import QUICK, Loopback, loopback, small_model
from tests.support.processes import wait_for
from tests.support.threads import at_once, one_torch_thread
from tests.support.training import assert_same_bits, values_of

STEPS = 6
CALM = replace(QUICK, heartbeat_seconds=0.5)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(job: Loopback, steps: int = STEPS) -> dict[str, Any]:
    """Train with one trainer, without a gradient for the last layer at every other step."""
    trainer, model, _ = job.make_trainer()
    trainer.start()
    for step in range(steps):
        model.zero_grad()
        inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
        (model if step % 2 else model[:3])(inputs).square().mean().backward()
        trainer.step()
    trainer.complete()
    return values_of(model)


def moved(count: str) -> float:
    return float(progress.snapshot()["counters"].get(count, 0))


@pytest.mark.parametrize(
    ("mode", "grad_clip"),
    [
        pytest.param(None, None, id="sync"),
        pytest.param(None, ClipGradByGlobalNorm(0.1), id="sync-clipped-by-norm"),
        pytest.param(Async(dc_asgd=True), None, id="async"),
        pytest.param(Geo(push_nums=2), None, id="geo"),
    ],
)
def test_shared_memory_learns_what_tcp_learns_to_the_bit(mode: Mode | None, grad_clip: Any):
    learnt, sent = [], []
    for transport in ("tcp", "shared_memory"):
        before = moved("bytes_sent")
        settings = replace(CALM, transport=transport)
        with (
            one_torch_thread(),
            loopback(servers=2, optimizer=momentum, mode=mode, grad_clip=grad_clip, settings=settings) as job,
        ):
            learnt.append(train(job))
        sent.append(moved("bytes_sent") - before)
    assert_same_bits(learnt[1], learnt[0])
    model_bytes = sum(value.numel() * value.element_size() for value in learnt[0].values())
    assert sent[0] - sent[1] > model_bytes


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
@pytest.mark.parametrize(
    ("mode", "cross_step"),
    [
        pytest.param(None, False, id="sync"),
        pytest.param(None, True, id="sync-cross-step"),
        pytest.param(Async(), False, id="async"),
        pytest.param(HalfAsync(2, 2), False, id="half-async"),
        pytest.param(Geo(push_nums=2), False, id="geo"),
    ],
)
def test_what_a_script_has_of_a_parameter_is_whole_and_follows_it_within_a_step(mode, cross_step, transport):
    inputs = torch.ones(4, 20)
    with loopback(servers=2, mode=mode, settings=replace(CALM, transport=transport)) as job:
        trainer, model, _ = job.make_trainer(cross_step=cross_step)
        before_all = [parameter.detach() for parameter in model.parameters()]
        trainer.start()
        first = values_of(model)
        held = [
            dict(zip(first, before_all, strict=True)),
            {name: parameter.detach() for name, parameter in model.named_parameters()},
            model.state_dict(),
            {name: torch.from_numpy(value.detach().numpy()) for name, value in model.named_parameters()},
        ]
        for _ in range(3):
            model.zero_grad()
            loss = model(inputs).square().mean()
            before = values_of(model)
            loss.backward()
            if mode is None or isinstance(mode, Async):  # whose servers answer before the step ends
                wait_for(lambda: trainer.session.values_arrived, "the new values")
            for view in held:
                assert_same_bits(view, before)
            trainer.step()
            if cross_step:
                for view in held:
                    assert_same_bits(view, before)
                model(inputs)
            for view in held:
                assert_same_bits(view, values_of(model))
        trainer.complete()
        for view in held:
            assert_same_bits(view, values_of(model))
        assert not torch.equal(model[0].weight, first["0.weight"])


def test_half_async_applies_each_gradient_once_through_shared_memory():
    settings = replace(CALM, transport="shared_memory")

    def ones() -> torch.nn.Module:
        return torch.nn.ParameterDict({f"p{i}": torch.zeros(5) for i in range(6)})

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    with loopback(optimizer=plain, model=ones, mode=HalfAsync(2, 2), settings=settings) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for _ in range(30):
            model.zero_grad()
            sum(parameter.sum() for parameter in model.parameters()).backward()
            trainer.step()
        trainer.complete()
    assert_same_bits(values_of(model), {f"p{i}": torch.full((5,), -30.0) for i in range(6)})


def test_after_warm_up_no_tensor_travels_over_the_socket():
    with loopback(trainers=1, settings=replace(CALM, transport="auto")) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        before = moved("bytes_sent")
        for _ in range(STEPS):
            model.zero_grad()
            model(torch.ones(4, 20)).sum().backward()
            trainer.step()
        assert moved("bytes_sent") - before < 20_000 * STEPS
        trainer.complete()


@pytest.mark.parametrize(
    "lacking",
    [
        "sockets",
        "another-user",
        "memory",
        "a-mapping",
        "a-mapping-there",
        "the-descriptor",
        "the-descriptor-there",
    ],
)
def test_auto_does_without_what_there_is_not(monkeypatch, caplog, lacking):
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("not here")

    def keep_back(connection: socket.socket, destination: memoryview) -> list[int]:
        if (threading.current_thread().name == "fleet-greet") is not lacking.endswith("there"):
            return receive_with(connection, destination)
        receive_exactly(connection, destination)
        return []

    caplog.set_level(logging.DEBUG, "fleet")
    if lacking == "sockets":
        monkeypatch.setattr(sockets, "_unix_socket", refuse)
    elif lacking == "another-user":
        us = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    elif lacking == "memory":
        monkeypatch.setattr(SharedBlocks, "create", refuse)
    elif lacking.startswith("the-descriptor"):
        monkeypatch.setattr(handshake, "receive_with", keep_back)
    elif lacking == "a-mapping-there":
        real = SharedBlocks.receive

        def receive(descriptor: int, block_bytes: Any, *, writable: bool) -> SharedBlocks:
            return refuse() if writable else real(descriptor, block_bytes, writable=writable)

        monkeypatch.setattr(SharedBlocks, "receive", receive)
    else:
        monkeypatch.setattr(ServerConnection, "_shared_transport", refuse)
    with one_torch_thread():
        with loopback(settings=replace(CALM, transport="tcp")) as job:
            expected = train(job)
        with loopback(settings=replace(CALM, transport="auto")) as job:
            assert_same_bits(train(job), expected)
    if lacking not in ("a-mapping", "the-descriptor"):  # which cost a connection
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("of_server", "lacking", "words"),
    [
        pytest.param("tcp", None, "does not listen on a Unix socket", id="a-server-that-says-tcp"),
        pytest.param("auto", "dial_here", "Connection refused", id="a-server-elsewhere"),
        pytest.param("auto", "create", "it shares no memory", id="no-memory"),
    ],
)
def test_shared_memory_is_refused_by_name_where_the_server_is_elsewhere(
    monkeypatch, of_server, lacking, words
):
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("Connection refused")

    with loopback(settings=replace(CALM, transport=of_server)) as job:
        if lacking:
            monkeypatch.setattr(SharedBlocks if lacking == "create" else server_connection, lacking, refuse)
        job.settings = replace(CALM, transport="shared_memory")
        trainer, _, _ = job.make_trainer()
        with pytest.raises(ConfigurationError, match=f"parameter server {job.endpoints[0]} .*{words}"):
            trainer.start()


def test_a_restarted_trainer_shares_memory_of_its_own():
    """What its earlier life has laid into its memory counts no more, and its memory is let go."""
    with one_torch_thread(), loopback(trainers=2, settings=replace(CALM, transport="shared_memory")) as job:
        (first, first_model, _), (other, model, _) = job.make_trainer(0), job.make_trainer(1)
        first.start()
        other.start()
        first_model(torch.full((4, 20), 9.0)).sum().backward()  # sent, and never stepped
        first.close()
        again, again_model, _ = job.make_trainer(0, attempt=1)
        again.start()
        expected = small_model()
        for each in (expected, again_model, model):
            each(torch.ones(4, 20)).sum().backward()
        torch.optim.SGD(expected.parameters(), lr=0.1).step()
        at_once(again.step, other.step)
        assert_same_bits(values_of(again_model), values_of(expected))
