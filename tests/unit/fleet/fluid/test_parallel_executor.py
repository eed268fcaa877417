"""The original's executor of collective training, in one process."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from fleet import ConfigurationError, ParallelExecutor, Program, fluid
from fleet.fluid import parallel_executor as parallel
from tests.support import fluid_models


def capture() -> Program:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return Program.capture(model, lambda model, x: model(x).square().mean(), sgd)


def test_alone_it_makes_the_steps_of_an_executor():
    capture()
    executor = ParallelExecutor(use_cuda=False, loss_name="loss")
    feed = {"x": torch.ones(3, 2)}
    losses = [float(executor.run(["loss"], feed)[0]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert executor.device_count == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_trainers": 2, "trainer_id": 1}, "the program was transpiled for 1 and 0; expected the same"),
        ({"loss_name": "lost"}, "loss_name is 'lost'; expected a variable of the program"),
        ({"exec_strategy": 1}, "exec_strategy is 1, and PyTorch runs the model, .*; leave it at None"),
        ({"build_strategy": 1}, "build_strategy is 1, and PyTorch runs the model"),
        ({"scope": 1}, "scope is 1, and values are in the model"),
    ],
)
def test_what_the_program_is_not_made_for_is_named(arguments, message):
    capture()
    with pytest.raises(ConfigurationError, match=message):
        ParallelExecutor(use_cuda=False, **arguments)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    capture()
    with pytest.raises(ConfigurationError, match=r"place is CUDAPlace\(0\), and PyTorch finds 0 GPUs"):
        ParallelExecutor(use_cuda=True)


def test_a_trainer_of_several_meets_the_others_first():
    main = capture()
    transpiler = fleet.DistributeTranspiler(fleet.DistributeTranspilerConfig(mode="nccl2"))
    transpiler.transpile(0, trainers="127.0.0.1:1,127.0.0.1:2", current_endpoint="127.0.0.1:1")
    executor = ParallelExecutor(use_cuda=False, main_program=main, num_trainers=2, trainer_id=0)
    with pytest.raises(ConfigurationError, match="run the startup program first"):
        executor.run(["loss"], {"x": torch.ones(3, 2)})


def on(device: str, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program's model look as if it were on a device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    parameters: Any = {"weight": SimpleNamespace(device=torch.device(device))}
    source = SimpleNamespace(parameters=parameters)
    monkeypatch.setattr(parallel, "source_of", lambda asked: source if asked is program else None)


def test_what_is_fed_goes_where_the_model_is(monkeypatch):
    places: list[fleet.CUDAPlace] = []
    monkeypatch.setattr(fleet.Executor, "run", lambda executor, *_, **__: places.append(executor._place))
    main = capture()
    on("cuda:1", main, monkeypatch)
    executor = ParallelExecutor(use_cuda=True)
    executor.run(["loss"], {"x": torch.ones(3, 2)})
    assert places == [fleet.CUDAPlace(1)]


@pytest.mark.parametrize(
    ("use_cuda", "device", "expected"),
    [
        pytest.param(True, "cpu", r"on cpu; expected the startup program run first", id="not-moved"),
        pytest.param(False, "cuda:1", "on cuda:1; expected use_cuda=True", id="on-a-gpu"),
    ],
)
def test_a_model_that_is_elsewhere_is_named(use_cuda, device, expected, monkeypatch):
    main = capture()
    on(device, main, monkeypatch)
    executor = ParallelExecutor(use_cuda=use_cuda)
    with pytest.raises(ConfigurationError, match=f"use_cuda is {use_cuda}, and the model is {expected}"):
        executor.run(["loss"], {"x": torch.ones(3, 2)})


def test_the_originals_arguments_that_mean_the_same_are_taken():
    capture()
    executor = ParallelExecutor(use_cuda=False, loss_name="loss", scope=None, build_strategy=None)
    executor = ParallelExecutor(use_cuda=False, exec_strategy=None, share_vars_from=executor)
    assert len(executor.run(["loss"], feed_dict=[{"x": torch.ones(3, 2)}], return_numpy=True)) == 1


def test_variables_of_another_model_are_not_shared():
    capture()
    other = ParallelExecutor(use_cuda=False)
    of_no_program: Any = fleet.Executor()
    for shared in (other, of_no_program):
        with pytest.raises(ConfigurationError, match="share_vars_from runs no program of this model"):
            ParallelExecutor(use_cuda=False, main_program=capture(), share_vars_from=shared)


def test_a_feed_under_both_of_its_names_is_refused():
    capture()
    both = "feed and feed_dict are given, which are one; expected feed alone"
    with pytest.raises(ConfigurationError, match=both):
        ParallelExecutor(use_cuda=False).run(["loss"], {"x": torch.ones(3, 2)}, feed_dict={})


def test_values_are_lod_tensors_if_no_arrays_are_asked_for():
    capture()
    executor, feed = ParallelExecutor(use_cuda=False), {"x": torch.ones(3, 2)}
    (loss,) = executor.run(["loss"], feed, return_numpy=False)
    assert (type(loss), loss.shape(), loss.lod()) == (fluid.LoDTensor, [1], [])


def test_a_program_with_layers_trains_and_shares_its_variables():
    own = fluid.program_guard(fluid.Program(), fluid.Program())
    with own, fluid.unique_name.guard(), fluid.scope_guard(fluid.core.Scope()):
        model = fluid_models.fit_a_line()
        test = fluid.default_main_program().clone(for_test=True)
        fluid.optimizer.SGD(learning_rate=0.01).minimize(model.loss)
        fluid.Executor(fluid.CPUPlace()).run(fluid.default_startup_program())
        trained = fluid.ParallelExecutor(use_cuda=False, loss_name=model.loss.name)
        tested = fluid.ParallelExecutor(use_cuda=False, main_program=test, share_vars_from=trained)
        feed = {"x": np.ones((4, 13), "float32"), "y": np.ones((4, 1), "float32")}
        (before,) = tested.run([model.loss.name], feed=feed)
        trained.run([model.loss.name], feed=feed)
        (after,) = tested.run([model.loss.name], feed=feed)
        assert after[0] < before[0]
