"""The module whose names an optimizer's parameters have, where the script has not given it."""

import gc
import threading

import pytest
import torch
from torch import nn

from fleet.plan.source import find_module, without_wrapper


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)


def test_the_model_is_found_by_its_parameters():
    model, other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)
    assert find_module(sgd(model)) is model
    assert find_module(sgd(other)) is other


def test_it_is_the_outermost_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    wrapper = nn.ModuleDict({"student": model, "teacher": nn.Linear(2, 1)})
    assert find_module(sgd(model)) is wrapper
    assert find_module(sgd(model[1])) is wrapper, "a part of a model is named as in the model"


def test_what_is_compiled_is_named_as_before():
    class OptimizedModule(nn.Module):  # torch's own takes half a minute to import
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

    model = nn.Sequential(nn.Linear(2, 2))
    compiled = OptimizedModule(model)
    assert find_module(sgd(compiled)) is model
    assert without_wrapper(compiled) is model
    assert without_wrapper(model) is model


def half_made() -> nn.Module:
    return nn.Linear.__new__(nn.Linear)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))]), id="no-module"),
        pytest.param(lambda: sgd(nn.Linear(1, 1), nn.Linear(1, 1)), id="two-modules"),
        pytest.param(lambda: torch.optim.SGD(nn.Linear(1, 1).named_parameters()), id="names-of-its-own"),
    ],
)
def test_there_may_be_none(make):
    strange = half_made()
    optimizer = make()
    gc.collect()
    assert find_module(optimizer) is None
    del strange


def test_two_modules_that_share_all_parameters_leave_it_open():
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    two.weight, two.bias = one.weight, one.bias
    assert find_module(sgd(one)) is None


def test_other_threads_build_tuples_meanwhile():
    """`gc.get_objects` would hold their tuples, which CPython then refuses to resize: SystemError."""
    model, done, errors = nn.Sequential(nn.Linear(2, 2)), threading.Event(), []

    def build() -> None:
        try:
            while not done.is_set():
                tuple(number for number in range(1000))
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(10):
            assert find_module(sgd(model)) is model
    finally:
        done.set()
        thread.join()
    assert not errors
