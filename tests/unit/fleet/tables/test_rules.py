"""Row rules beside torch's optimizers, and the one that torch does not have beside the paper's algorithm."""

import numpy as np
import pytest
import torch

from fleet import optim
from fleet.errors import ConfigurationError
from fleet.tables import Constant, Table, TableConfig, Uniform
from fleet.tables.rules import FTRL, SGD, Adagrad, Adam, Momentum, RMSprop, RowwiseAdagrad, rule_of
from tests.support.tables import assert_equal

ROWS, DIMENSION, STEPS = 12, 5, 30


def updates(seed=0):
    """Yield for each step the ids that have a gradient, and it."""
    random = np.random.default_rng(seed)
    for _ in range(STEPS):
        ids = np.sort(random.choice(ROWS, random.integers(1, ROWS), replace=False))
        yield ids, torch.from_numpy(random.normal(size=(ids.size, DIMENSION)).astype(np.float32))


def trained(rule, **options):
    table = Table(TableConfig("t", DIMENSION, rule, ROWS, Uniform(-1.0, 1.0), options=options))
    for step, (ids, gradient) in enumerate(updates(), start=1):
        table.update(ids, gradient, step)
    return table.look_up(np.arange(ROWS))


def first_values():
    table = Table(TableConfig("t", DIMENSION, SGD(), ROWS, Uniform(-1.0, 1.0)))
    return table.look_up(np.arange(ROWS))


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning"
)  # torch's Adagrad makes such tensors
@pytest.mark.parametrize(
    ("rule", "theirs", "options"),
    [
        (SGD(), torch.optim.SGD, {"lr": 0.1}),
        (Adagrad(), torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
        (Adam(), torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}),
    ],
)
def test_rows_are_stepped_as_torch_steps_sparse_gradients(rule, theirs, options):
    weight = torch.nn.Parameter(first_values())
    optimizer = theirs([weight], **options)
    for ids, gradient in updates():
        weight.grad = torch.sparse_coo_tensor(
            torch.from_numpy(ids)[None], gradient, weight.shape, check_invariants=True
        )
        optimizer.step()
    torch.testing.assert_close(trained(rule, **options), weight.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("rule", "theirs", "options"),
    [
        (SGD(), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
        (Momentum(), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (Momentum(), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (Adagrad(), torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.01}),
        (RMSprop(), torch.optim.RMSprop, {"lr": 0.1, "alpha": 0.9, "weight_decay": 0.01}),
    ],
)
def test_each_row_is_stepped_as_torch_steps_a_parameter_whenever_it_has_a_gradient(rule, theirs, options):
    rows = [torch.nn.Parameter(row.clone()) for row in first_values()]
    optimizers = [theirs([row], **options) for row in rows]
    for ids, gradient in updates():
        for number, of_row in zip(ids, gradient, strict=True):
            rows[number].grad = of_row
            optimizers[number].step()
    expected = torch.stack([row.detach() for row in rows])
    torch.testing.assert_close(trained(rule, **options), expected, rtol=2e-6, atol=2e-6)


def test_adam_adds_the_decay_of_rows_that_have_a_gradient_to_it():
    first, second, eps, rate, decay = 0.8, 0.99, 1e-6, 0.1, 0.05
    values = first_values().double().numpy()
    mean, square = np.zeros((ROWS, DIMENSION)), np.zeros((ROWS, DIMENSION))
    for step, (ids, gradient) in enumerate(updates(), start=1):
        grad = gradient.double().numpy() + decay * values[ids]
        mean[ids] = first * mean[ids] + (1 - first) * grad
        square[ids] = second * square[ids] + (1 - second) * grad**2
        corrected = rate * np.sqrt(1 - second**step) / (1 - first**step)
        values[ids] -= corrected * mean[ids] / (np.sqrt(square[ids]) + eps)
    found = trained(Adam(), lr=rate, betas=(first, second), eps=eps, weight_decay=decay).double().numpy()
    np.testing.assert_allclose(found, values, rtol=2e-5, atol=2e-6)


def test_rowwise_adagrad_scales_a_row_by_one_sum():
    options = {"lr": 0.1, "eps": 1e-8, "initial_accumulator_value": 0.5, "weight_decay": 0.01}
    values, total = first_values().double().numpy(), np.full(ROWS, 0.5)
    for ids, gradient in updates():
        for number, of_row in zip(ids, gradient.double().numpy(), strict=True):
            of_row = of_row + 0.01 * values[number]
            total[number] += np.mean(of_row**2)
            values[number] -= 0.1 * of_row / (np.sqrt(total[number]) + 1e-8)
    found = trained(RowwiseAdagrad(), **options).double().numpy()
    np.testing.assert_allclose(found, values, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("l1", [0.0, 0.7])
def test_ftrl_is_the_paper_s(l1):
    alpha, beta, l2 = 0.3, 1.5, 0.2
    weights, linear = first_values().double().numpy(), np.zeros((ROWS, DIMENSION))
    squared = np.full((ROWS, DIMENSION), 0.1)
    for ids, gradient in updates():
        for number, of_row in zip(ids, gradient.double().numpy(), strict=True):
            for i, g in enumerate(of_row):
                sigma = (np.sqrt(squared[number, i] + g * g) - np.sqrt(squared[number, i])) / alpha
                linear[number, i] += g - sigma * weights[number, i]
                squared[number, i] += g * g
                z, n = linear[number, i], squared[number, i]
                weights[number, i] = 0.0
                if abs(z) > l1:
                    weights[number, i] = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2)
    found = trained(FTRL(), lr=alpha, beta=beta, l1=l1, l2=l2, initial_accumulator_value=0.1).numpy()
    np.testing.assert_allclose(found, weights, rtol=2e-4, atol=2e-5)
    assert (found == 0.0).any() == (l1 > 0)


@pytest.mark.parametrize("rule", [SGD(), Momentum(), Adagrad(), RowwiseAdagrad(), Adam(), RMSprop(), FTRL()])
def test_any_number_of_threads_comes_to_the_same_bits(rule):
    ids, found = np.arange(8000), []
    gradient = torch.randn(ids.size, 17, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            table = Table(TableConfig("t", 17, rule, options={"lr": 0.1}))
            for step in range(1, 4):
                table.update(ids, gradient.clone(), step)
            found.append(table.rows())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert_equal(other, found[0])


@pytest.mark.parametrize("rule", [SGD(), Momentum(), Adagrad(), RowwiseAdagrad(), Adam(), RMSprop(), FTRL()])
def test_a_row_is_stepped_alike_whatever_else_is_in_the_update(rule):
    together = Table(TableConfig("t", DIMENSION, rule, first_values=Constant(0.5)))
    apart = Table(TableConfig("t", DIMENSION, rule, first_values=Constant(0.5)))
    for step, (ids, gradient) in enumerate(updates(), start=1):
        for part in (ids % 3 == rest for rest in range(3)):
            apart.update(ids[part], gradient[torch.from_numpy(part)], step)
        together.update(ids, gradient, step)
    assert torch.equal(together.rows().values, apart.rows().values)


@pytest.mark.parametrize("returned", [None, "0.1", float("nan"), float("inf")])
def test_a_schedule_that_returns_no_number_is_named(returned):
    table = Table(TableConfig("clicks", 2, SGD(), options={"lr": lambda _: returned}))
    with pytest.raises(
        ConfigurationError, match=r"table clicks: the schedule of lr returns \S+ for update 3"
    ):
        table.update(np.array([1]), torch.ones(1, 2), 3)


def test_what_state_begins_with_has_no_schedule():
    with pytest.raises(ConfigurationError, match="initial_accumulator_value is an initial value of state"):
        TableConfig("clicks", 2, Adagrad(), options={"initial_accumulator_value": lambda _: 0.1})


def group_of(optimizer: type, **options: object) -> dict[str, object]:
    """Return the param group of an optimizer with these options."""
    made = optimizer([torch.nn.Parameter(torch.zeros(1))], **options)
    return {name: value for name, value in made.param_groups[0].items() if name != "params"}


@pytest.mark.parametrize(
    ("optimizer", "options", "rule"),
    [
        (torch.optim.SGD, {"lr": 0.5}, "SGD"),
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, "Momentum"),
        (torch.optim.Adagrad, {"lr": 0.5}, "Adagrad"),
        (torch.optim.Adam, {"lr": 0.5}, "Adam"),
        (torch.optim.SparseAdam, {"lr": 0.5}, "Adam"),
        (torch.optim.AdamW, {"lr": 0.5, "weight_decay": 0.0}, "Adam"),
        (torch.optim.RMSprop, {"lr": 0.5}, "RMSprop"),
        (optim.SGD, {"lr": 0.5, "l1_decay": 0.1}, "PaddleSGD"),
        (optim.Momentum, {"lr": 0.5, "use_nesterov": True}, "PaddleMomentum"),
        (optim.Adagrad, {"lr": 0.5, "initial_accumulator_value": 0.1}, "PaddleAdagrad"),
        (optim.Adam, {"lr": 0.5, "lazy_mode": True}, "PaddleAdam"),
        (optim.RMSProp, {"lr": 0.5, "centered": True, "momentum": 0.9}, "PaddleRMSProp"),
    ],
    ids=[
        "sgd",
        "momentum",
        "adagrad",
        "adam",
        "sparse-adam",
        "adamw-without-decay",
        "rmsprop",
        "paddles-sgd",
        "paddles-momentum",
        "paddles-adagrad",
        "paddles-adam",
        "paddles-rmsprop",
    ],
)
def test_a_class_has_a_rule_with_its_options(optimizer, options, rule):
    found, of_rule = rule_of("users", optimizer, group_of(optimizer, **options))
    assert type(found).__name__ == rule
    assert of_rule["lr"] == 0.5
    assert of_rule.keys() <= found.defaults().keys()


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        (torch.optim.Adadelta, {}, "as torch.optim.adadelta.Adadelta does; expected SGD"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.AdamW, {"weight_decay": 0.1}, "weight_decay=0.1"),
        (torch.optim.AdamW, {"weight_decay": 0.0, "amsgrad": True}, "amsgrad=True"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum=0.9"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
    ],
    ids=["unknown", "amsgrad", "adamw-with-decay", "adamw-amsgrad", "rmsprop-momentum", "dampening"],
)
def test_what_no_rule_does_is_refused_with_a_remedy(optimizer, options, words):
    with pytest.raises(ConfigurationError, match="table users: rows cannot be stepped") as refusal:
        rule_of("users", optimizer, group_of(optimizer, **options))
    assert words in str(refusal.value)
    assert "rule=fleet.tables.rules" in str(refusal.value)
