"""What dense parameters may be and how they may be stepped: equal to one PyTorch process, bit by bit."""

import logging
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from fleet.plan import ClipGradByGlobalNorm
from tests.support.threads import one_torch_thread
from tests.support.training import (
    NoSync,
    Training,
    assert_same_bits,
    train_alone,
    train_together,
)

pytestmark = pytest.mark.usefixtures("each_transport")

ROWS, COLUMNS = 600, 30  # 18000 elements: cut in two at two servers


def numbers(step: int, trainer: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + trainer))


class Wide(torch.nn.Module):
    """One parameter that is cut and two that are not, of any dtypes."""

    def __init__(self, **dtypes: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"w": (ROWS, COLUMNS), "v": (COLUMNS, 3), "b": (3,)}.items():
            value = torch.randn(shape, generator=generator) * 0.1
            dtype = dtypes.get(name, torch.float32)
            self.register_parameter(name, torch.nn.Parameter(value.to(dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, v, b = (getattr(self, name).double() for name in ("w", "v", "b"))
        out: torch.Tensor = torch.tanh(x.double() @ w) @ v + b
        return out


def backward(model: Any, step: int, trainer: int, no_sync: NoSync) -> None:
    x = numbers(step, trainer, 8, ROWS)
    (model(x) - 1.0).square().mean().backward()


def adam(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, **{"lr": 0.01, **options})


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def assert_equal_to_one_process(training: Training, **arguments: Any) -> None:
    with one_torch_thread():
        expected = train_alone(training)
    start = {name: value.detach() for name, value in training.model().named_parameters()}
    assert any(not torch.equal(value, start[name]) for name, value in expected.items()), "nothing was trained"
    assert all(value.isfinite().all() for value in expected.values())
    for found in train_together(training, **arguments):
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), id="sgd-coupled"),
        pytest.param(
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            id="nesterov-coupled",
        ),
        pytest.param(lambda p: adam(p, weight_decay=0.1), id="adam-coupled"),
        pytest.param(lambda p: adam(p, weight_decay=0.1, decoupled_weight_decay=True), id="adam-decoupled"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), id="adamw"),
        pytest.param(lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1), id="adagrad-coupled"),
        pytest.param(lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1), id="rmsprop-coupled"),
        pytest.param(lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=0.1), id="adadelta-coupled"),
    ],
)
def test_weight_decay(optimizer):
    assert_equal_to_one_process(Training(Wide, optimizer, backward))


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.7),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 3], gamma=0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.001, max_lr=0.02, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=6),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, factor=0.1, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, factor=0.1, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.9)],
        milestones=[2],
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3),
}


def test_every_scheduler_of_torch_is_tried():
    assert {*SCHEDULERS, "LRScheduler"} == set(lr_scheduler.__all__)


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, optimizer):
    """The cyclic ones move momentum, or Adam's first beta, along with the learning rate."""
    metrics = (1.0, 2.0, 0.5, 3.0, 4.0) if name == "ReduceLROnPlateau" else ()
    rates: list[float] = []

    def scheduler(of: torch.optim.Optimizer) -> Any:
        made = SCHEDULERS[name](of)
        step = made.step

        def noting(*arguments: Any) -> None:
            rates.append(of.param_groups[0]["lr"])
            step(*arguments)

        made.step = noting
        return made

    training = Training(Wide, optimizer, backward, scheduler=scheduler, metrics=metrics, steps=(5, 5))
    assert_equal_to_one_process(training)
    assert len(set(rates)) > 1, "the learning rate never changed"


def test_param_groups_with_their_own_hyper_parameters():
    def groups(model: Any) -> Any:
        return [
            {"params": [model.w], "weight_decay": 0.1},
            {"params": [model.v], "lr": 0.1, "betas": (0.5, 0.6)},
            {"params": [model.b], "eps": 1e-3, "amsgrad": True, "maximize": True},
        ]

    def by_group(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.LambdaLR(
            optimizer, [lambda step: 1 / (step + 1), lambda _: 1.0, lambda step: step + 1.0]
        )

    assert_equal_to_one_process(Training(Wide, adam, backward, groups=groups, scheduler=by_group))


def test_frozen_parameters():
    def model() -> torch.nn.Module:
        made = Wide()
        made.get_parameter("v").requires_grad_(False)
        return made

    assert_equal_to_one_process(Training(model, adam, backward))


def test_parameters_that_the_optimizer_does_not_have():
    assert_equal_to_one_process(Training(Wide, adam, backward, groups=lambda model: [model.w]))


class Tied(torch.nn.Module):
    """A language model in small: what reads a row of `words.weight` and what scores it are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(ROWS, COLUMNS)
        self.mix = torch.nn.Linear(COLUMNS, COLUMNS)
        self.score = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.score.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.score(torch.tanh(self.mix(self.words(ids))))
        return out


def test_tied_parameters():
    def predict(model: Any, step: int, trainer: int, no_sync: NoSync) -> None:
        ids = torch.arange(20) * (trainer + 2) + step
        torch.nn.functional.cross_entropy(model(ids), ids + 1).backward()
        assert model.score.weight is model.words.weight

    assert_equal_to_one_process(Training(Tied, adam, predict))


def test_parameters_without_a_gradient_in_some_steps_on_some_trainers():
    def partly(model: Any, step: int, trainer: int, no_sync: NoSync) -> None:
        x = numbers(step, trainer, 8, ROWS)
        hidden = torch.tanh(x @ model.w) if step % 3 != 1 else torch.ones(8, COLUMNS)  # on nobody
        out = hidden @ model.v if (step + trainer) % 2 else hidden[:, :3] * 1.0  # on one of them
        (out + model.b).square().mean().backward()

    assert_equal_to_one_process(Training(Wide, adam, partly, steps=(6, 6)))


def coarse_adam(groups: Any) -> torch.optim.Optimizer:
    return adam(groups, eps=1e-3)  # the default is zero in float16


@pytest.mark.parametrize("optimizer", [coarse_adam, momentum])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, optimizer):
    model = lambda: Wide(w=dtype, v=dtype, b=dtype)  # noqa: E731
    assert_equal_to_one_process(Training(model, optimizer, backward, steps=(3, 3, 3)))


def test_dtypes_mixed_in_one_model():
    def model() -> torch.nn.Module:
        made = Wide(w=torch.bfloat16, v=torch.float64)
        made.register_parameter(
            "h", torch.nn.Parameter(torch.full((ROWS, COLUMNS), 0.5, dtype=torch.float16))
        )
        return made

    def mixed(model: Any, step: int, trainer: int, no_sync: NoSync) -> None:
        out = model(numbers(step, trainer, 8, ROWS))
        (out.square().mean() + model.h.double().square().mean() * 100).backward()

    assert_equal_to_one_process(Training(model, coarse_adam, mixed, steps=(3, 3, 3)))


def test_several_backward_passes_within_no_sync():
    def twice(model: Any, step: int, trainer: int, no_sync: NoSync) -> None:
        with no_sync():
            backward(model, step, trainer, no_sync)
            backward(model, step + 50, trainer, no_sync)
        backward(model, step + 70, trainer, no_sync)

    assert_equal_to_one_process(Training(Wide, momentum, twice))


def test_a_trainer_with_less_data_leaves_the_mean_to_the_others(caplog):
    with caplog.at_level(logging.INFO, "fleet.parameter_server"):
        training = Training(Wide, adam, backward, steps=(5, 2, 3))
        with one_torch_thread():
            expected = train_alone(training)
        longest, *_ = train_together(training)
    assert_same_bits(longest, expected)
    assert "from step 2 on, gradients are averaged over trainers 0 and 2" in caplog.text
    assert "from step 3 on, gradients are averaged over trainer 0: the other trainers have" in caplog.text


def test_scalars_and_parameters_without_elements():
    def model() -> torch.nn.Module:
        made = Wide()
        made.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.5)))
        made.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 3)))
        return made

    def scaled(model: Any, step: int, trainer: int, no_sync: NoSync) -> None:
        out = model(numbers(step, trainer, 8, ROWS)) * model.scale + model.nothing.sum()
        out.square().mean().backward()

    assert_equal_to_one_process(Training(model, adam, scaled))
    clipped = train_together(Training(model, adam, scaled), grad_clip=ClipGradByGlobalNorm(0.1))
    assert_same_bits(*clipped)
