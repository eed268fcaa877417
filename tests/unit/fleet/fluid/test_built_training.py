"""Training of built programs in one process, against 20 steps of paddlepaddle 1.8.5."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet import fluid
from fleet.errors import TranspileError
from fleet.fluid import unique_name
from fleet.fluid.program import Program, program_guard
from fleet.fluid.scope import Scope, global_scope, scope_guard
from tests.support import fluid_models
from tests.support.fluid import recorded_feeds

GOLDEN = Path(__file__).parents[3] / "golden" / "fluid"
MODELS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "training.json").read_text())["models"]
ARRAYS = dict(np.load(GOLDEN / "training.npz"))
RATES = {"sgd": 2e-6, "sgd_decay": 2e-6, "sgd_l2": 2e-6, "adagrad": 6e-6, "adam": 2e-4, "adam_lazy": 2e-4}
BUILT = {
    "mlp": fluid_models.mlp,
    "fit_a_line": fluid_models.fit_a_line,
    "word2vec": lambda: fluid_models.word2vec(ids=101, width=8, negatives=3),
    "simnet_bow": lambda: fluid_models.simnet_bow(ids=101, width=8, batch=16),
    "ctr": lambda: fluid_models.ctr(
        slots=4, ids=101, width=8, hidden=32, pool=True, thresholds=256, window=5
    ),
    "deepfm": lambda: fluid_models.deepfm(ids=101, width=8, hidden=16),
}
TABLES = {"simnet_bow": "__emb__", "ctr": "SparseFeatFactors"}
CASES = [(model, name) for model in BUILT for name in MODELS[model]["cases"]]


def optimizer(name: str, rate: float) -> Any:
    if name == "sgd_decay":
        decayed = fluid.layers.exponential_decay(rate, 5, 0.9, staircase=True)
        return fluid.optimizer.SGD(learning_rate=decayed)
    if name == "sgd":
        return fluid.optimizer.SGD(learning_rate=rate)
    if name == "sgd_l2":
        return fluid.optimizer.SGD(learning_rate=rate, regularization=fluid.regularizer.L2Decay(0.01))
    if name == "adam_lazy":
        return fluid.optimizer.Adam(learning_rate=0.01, lazy_mode=True)
    return {"adam": fluid.optimizer.Adam, "adagrad": fluid.optimizer.Adagrad}[name](learning_rate=0.01)


def advance_sparse_adam(table: str) -> None:
    """Put the bias correction of a table one step ahead, as Paddle's sparse Adam does and ours does not."""
    for number, beta in (("1", 0.9), ("2", 0.999)):
        variable = global_scope().find_var(f"{table}_beta{number}_pow_acc_0")
        assert variable is not None
        variable.get_tensor().set(np.array([beta**2], np.float32))


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_built_program_trains_as_the_original_does(model: str, name: str) -> None:
    main, startup, recorded = Program(), Program(), MODELS[model]
    with unique_name.guard(), program_guard(main, startup), scope_guard(Scope()):
        made = BUILT[model]()
        optimizer(name, recorded["rate_of_sgd"]).minimize(made.loss)
        assert made.loss.name == recorded["cases"][name]["loss"]
        executor = fluid.Executor(fluid.CPUPlace())
        executor.run(startup)
        for parameter, shape in recorded["parameters"].items():
            variable = global_scope().find_var(parameter)
            assert variable is not None
            assert variable.get_tensor().shape() == shape
            variable.get_tensor().set(ARRAYS[f"{model}/initial/{parameter}"])
        if name.startswith("adam") and model in TABLES:
            advance_sparse_adam(TABLES[model])
        metrics = [each for each in made.fetched if f"{model}/{name}/{each}" in ARRAYS]
        fetches = [made.loss, *(made.fetched[each] for each in metrics)]
        fetched = [
            executor.run(main, feed=feed, fetch_list=fetches)
            for feed in recorded_feeds(ARRAYS, model, recorded["lengths"], steps=20)
        ]
        tolerance = RATES[name]
        losses, *measured = zip(*fetched, strict=True)
        assert losses[0].shape == (1,)
        np.testing.assert_allclose(
            np.array(losses), ARRAYS[f"{model}/{name}/losses"], rtol=2e-5, atol=tolerance
        )
        for each, values in zip(metrics, measured, strict=True):
            expected = ARRAYS[f"{model}/{name}/{each}"]
            assert (values[0].shape, values[0].dtype) == ((1,), expected.dtype)
            np.testing.assert_allclose(np.array(values), expected, rtol=0, atol=2e-6)
        for parameter in recorded["parameters"]:
            variable = global_scope().find_var(parameter)
            assert variable is not None
            expected = ARRAYS[f"{model}/{name}/final/{parameter}"]
            np.testing.assert_allclose(np.array(variable.get_tensor()), expected, rtol=0, atol=tolerance)


def test_a_fetched_gradient_has_the_term_of_its_regularizer_and_is_not_clipped() -> None:
    x = np.array([[1.0, 2.0], [3.0, -4.0]], "float32")
    weight = np.array([[0.5], [-1.0]], "float32")
    plain = x.sum(0, keepdims=True).T / 2  # of the mean over two rows
    terms = {"l2": 0.5 * weight, "l1": 0.5 * np.sign(weight), "clipped": 0.0}
    for name, term in terms.items():
        with program_guard(main := fluid.Program(), startup := fluid.Program()), scope_guard(Scope()):
            data = fluid.layers.data("x", [2])
            start = fluid.initializer.NumpyArrayInitializer(weight)
            attr = fluid.ParamAttr(name="w", initializer=start)
            loss = fluid.layers.mean(fluid.layers.fc(data, 1, param_attr=attr, bias_attr=False))
            decay = {"l1": fluid.regularizer.L1Decay, "l2": fluid.regularizer.L2Decay}.get(name)
            fluid.optimizer.SGD(
                0.1,
                regularization=decay(0.5) if decay is not None else None,
                grad_clip=fluid.clip.GradientClipByGlobalNorm(0.1) if decay is None else None,
            ).minimize(loss)
            executor = fluid.Executor()
            executor.run(startup)
            (found,) = executor.run(main, feed={"x": x}, fetch_list=["w@GRAD"])
        np.testing.assert_allclose(found, plain + term, rtol=1e-6)


@pytest.mark.usefixtures("own_programs")
def test_the_gradient_of_a_parameter_that_is_not_trained_is_that_of_one_step() -> None:
    loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.data("x", [2]), 1))
    fluid.optimizer.SGD(0.1, parameter_list=["fc_0.b_0"]).minimize(loss)
    executor = fluid.Executor()
    executor.run(fluid.default_startup_program())
    feed = {"x": np.array([[1.0, 2.0]], "float32")}
    found = [executor.run(feed=feed, fetch_list=["fc_0.w_0@GRAD"])[0].ravel().tolist() for _ in range(2)]
    assert found == [[1.0, 2.0]] * 2


@pytest.mark.usefixtures("own_programs")
def test_minimize_returns_the_operators_that_scale_rates_among_the_updates() -> None:
    attr = fluid.ParamAttr(learning_rate=0.5)
    loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.data("x", [2]), 1, param_attr=attr))
    operators, _ = fluid.optimizer.SGD(0.1).minimize(loss)
    assert [op.type for op in operators] == ["sgd", "scale", "sgd"]


@pytest.mark.usefixtures("own_programs")
def test_a_clone_of_a_program_without_a_backward_pass_keeps_data_that_is_not_read() -> None:
    fluid.layers.data("unread", [2])
    fluid.layers.mean(fluid.layers.data("x", [2]))
    assert "unread" in fluid.default_main_program().clone(for_test=True).global_block().vars


@pytest.mark.usefixtures("own_programs")
def test_backward_is_an_attribute_as_in_paddle() -> None:
    loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.data("x", [2]), 1))
    assert fluid.append_backward is fluid.backward.append_backward
    assert [gradient.name for _, gradient in fluid.backward.append_backward(loss)] == [
        "fc_0.w_0@GRAD",
        "fc_0.b_0@GRAD",
    ]


@pytest.mark.usefixtures("own_programs")
def test_the_largest_whole_number_is_a_whole_number() -> None:
    found = fluid.layers.reduce_max(fluid.layers.data("x", [3], dtype="int64"), dim=1)
    (value,) = fluid.Executor().run(feed={"x": np.array([[1, 5, 2]])}, fetch_list=[found])
    assert value.dtype == np.int64
    assert value.tolist() == [5]


@pytest.mark.usefixtures("own_programs")
def test_an_index_with_a_step_is_refused() -> None:
    x = fluid.layers.data("x", [4])
    with pytest.raises(TranspileError, match=r"index 1 is slice\(0, 4, 2\)"):
        x[:, 0:4:2]
    with pytest.raises(TypeError, match="not iterable"):
        list(x)  # type: ignore[call-overload]
