"""Variables and programs in files: loading restores what was saved, and errors name damaged files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fleet.errors import CheckpointError, ConfigurationError
from fleet.fluid import io, layers, optimizer, unique_name
from fleet.fluid.executor import Executor
from fleet.fluid.program import Program, default_main_program, default_startup_program, program_guard
from fleet.fluid.scope import Scope, global_scope, scope_guard

FEED = {"x": np.ones((2, 3), np.float32), "y": np.zeros((2, 1), np.float32)}


@pytest.fixture(autouse=True)
def trained() -> Iterator[tuple[Program, Any]]:
    """Return a program after one training step, and the variable of its prediction."""
    with program_guard(Program(), Program()), unique_name.guard(), scope_guard(Scope()):
        x, y = layers.data("x", [3]), layers.data("y", [1])
        predicted = layers.fc(layers.fc(x, 4, act="relu"), 1)
        loss = layers.mean(layers.square_error_cost(predicted, y))
        optimizer.Adam(0.1).minimize(loss)
        executor = Executor()
        executor.run(default_startup_program())
        executor.run(feed=FEED, fetch_list=[loss])
        yield default_main_program(), predicted


def held() -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in global_scope().values.items()}


def spoilt() -> None:
    """Change every value."""
    with torch.no_grad():
        for value in global_scope().values.values():
            value.zero_()


@pytest.mark.parametrize("filename", [None, "all"], ids=["a-file-each", "one-file"])
def test_persistables_come_back(filename: str | None, tmp_path: Path):
    before = held()
    io.save_persistables(None, tmp_path, filename=filename)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == (["all"] if filename else sorted(before))
    assert {"fc_0.w_0_moment1_0", "learning_rate_0"} <= before.keys()
    spoilt()
    assert held() != before
    io.load_persistables(None, tmp_path, filename=filename)
    assert held() == before


def test_training_continues_as_if_it_had_not_stopped(trained: tuple[Program, Any], tmp_path: Path):
    executor = Executor()
    io.save_persistables(executor, tmp_path)
    executor.run(feed=FEED)
    after = held()
    io.load_persistables(executor, tmp_path)
    executor.run(feed=FEED)
    assert held() == after


def test_parameters_alone_are_saved(tmp_path: Path):
    io.save_params(None, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fc_0.b_0",
        "fc_0.w_0",
        "fc_1.b_0",
        "fc_1.w_0",
    ]
    before = held()
    spoilt()
    io.load_params(None, tmp_path)
    assert held()["fc_0.w_0"] == before["fc_0.w_0"]
    assert held()["fc_0.w_0_moment1_0"] != before["fc_0.w_0_moment1_0"]


def test_a_predicate_or_names_choose_variables(tmp_path: Path):
    io.save_vars(None, tmp_path, predicate=lambda each: each.name.endswith("w_0") and io.is_parameter(each))
    io.save_vars(None, tmp_path, vars=["fc_1.b_0"], filename="bias")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bias", "fc_0.w_0", "fc_1.w_0"]
    assert list(load_file(tmp_path / "bias")) == ["fc_1.b_0"]
    before = held()
    spoilt()
    io.load_vars(None, tmp_path, vars=["fc_1.b_0"], filename="bias")
    assert held()["fc_1.b_0"] == before["fc_1.b_0"]
    with pytest.raises(ConfigurationError, match="save_vars: the program has no such variables"):
        io.save_vars(None, tmp_path, predicate=lambda _: False)


def test_variables_without_values_are_named(tmp_path: Path):
    with (
        scope_guard(Scope()),
        pytest.raises(ConfigurationError, match=r"fc_0\.w_0.*startup program to be run"),
    ):
        io.save_params(None, tmp_path)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        pytest.param(lambda path: path.unlink(), "cannot be loaded", id="gone"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be loaded", id="cut"),
        pytest.param(lambda path: path.write_bytes(b"x" * 100), "cannot be loaded", id="foreign"),
        pytest.param(
            lambda path: path.write_bytes(path.with_name("fc_0.b_0").read_bytes()),
            r"no fc_0\.w_0; it has",
            id="name",
        ),
    ],
)
def test_a_damaged_file_is_named(damage: Any, found: str, tmp_path: Path):
    io.save_params(None, tmp_path)
    damage(tmp_path / "fc_0.w_0")
    before = held()
    with pytest.raises(CheckpointError, match=rf"fc_0\.w_0.*{found}"):
        io.load_params(None, tmp_path)
    assert held() == before  # nothing was loaded in part


def test_a_value_of_another_shape_is_refused(tmp_path: Path):
    io.save_params(None, tmp_path)
    with program_guard(Program(), Program()), unique_name.guard():
        layers.fc(layers.data("x", [5]), 4)
        with pytest.raises(
            CheckpointError, match=r"fc_0\.w_0 is float32\[3, 4\]; expected .* float32\[5, 4\]"
        ):
            io.load_params(None, tmp_path)


def test_a_name_does_not_lead_out_of_the_folder(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="does not name a file below"):
        io.save_params(None, tmp_path, filename="../all")


@pytest.mark.parametrize("params_filename", [None, "values"], ids=["a-file-each", "one-file"])
def test_a_model_for_inference_computes_the_same(
    trained: tuple[Program, Any], params_filename: str | None, tmp_path: Path
):
    _, predicted = trained
    fetched = io.save_inference_model(tmp_path, ["x"], [predicted], None, params_filename=params_filename)
    assert fetched == [predicted.name]
    names = {"values"} if params_filename else {"fc_0.b_0", "fc_0.w_0", "fc_1.b_0", "fc_1.w_0"}
    assert {path.name for path in tmp_path.iterdir()} == {"__model__", *names}
    executor = Executor()
    test = trained[0].clone(for_test=True)
    (expected,) = executor.run(test, feed=FEED, fetch_list=[predicted])
    with scope_guard(Scope()):
        program, feed, targets = io.load_inference_model(tmp_path, executor, params_filename=params_filename)
        assert feed == ["x"]
        (found,) = executor.run(program, feed={"x": FEED["x"]}, fetch_list=targets)
    np.testing.assert_array_equal(found, expected)
    assert {op.type for op in program.global_block().ops} == {"mul", "elementwise_add", "relu"}


def test_a_model_needs_its_data(trained: tuple[Program, Any], tmp_path: Path):
    with pytest.raises(ConfigurationError, match="need x, which feeded_var_names does not have"):
        io.save_inference_model(tmp_path, [], [trained[1]], None)
    with pytest.raises(ConfigurationError, match="the program has no z"):
        io.save_inference_model(tmp_path, ["z"], [trained[1]], None)


@pytest.mark.parametrize("text", ["", "[]", '{"fleet.fluid": 2}', '{"fleet.fluid": 1, "program": {}}'])
def test_a_file_that_is_no_model_is_refused(text: str, tmp_path: Path):
    (tmp_path / "__model__").write_text(text)
    with pytest.raises(CheckpointError, match="__model__ is not a program for inference"):
        io.load_inference_model(tmp_path, None)
