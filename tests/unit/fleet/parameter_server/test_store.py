"""The one place where a server's values change, and what each change says of itself."""

from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes import Async, Mode, Origin, Sync, Target, Update
from fleet.parameter_server.store import DenseStore, DenseUpdate, Put
from tests.support.modes import OneServer


def recorded(mode: Mode, trainers: int) -> tuple[OneServer, list[Update]]:
    """Return a server, and the updates that its store applies from now on."""
    server, updates = OneServer(mode, trainers), list[Update]()
    rule = server.shard.store._rule

    def record(target: Target, update: Update) -> None:
        updates.append(update)
        rule(target, update)

    server.shard.store._rule = record
    return server, updates


def value_of(store: DenseStore, block: int) -> float:
    into = bytearray(len(store.view(block)))
    store.read(block, memoryview(into))
    return float(torch.frombuffer(into, dtype=torch.float32)[0])


def test_an_update_says_of_which_lives_and_steps_of_which_trainers_it_is_made():
    server, updates = recorded(Sync(), 3)
    server.mode.admit(1, 4)
    for trainer in (2, 1, 0):
        server.begin(trainer)
        server.send(trainer, 0, 1.0)
    assert [update.origins for update in updates] == [(Origin(0, 0, 0), Origin(1, 4, 0), Origin(2, 0, 0))]


def test_updates_are_numbered_in_the_order_in_which_they_are_applied():
    server, updates = recorded(Async(), 2)
    server.mode.admit(1, 1)
    for trainer, block in ((1, 0), (0, 1), (0, 0)):
        server.begin(trainer)
        server.send(trainer, block, 1.0)
    assert [(update.sequence, update.key, update.origins) for update in updates] == [
        (1, 0, (Origin(1, 1, 0),)),
        (2, 1, (Origin(0, 0, 0),)),
        (3, 0, (Origin(0, 0, 0),)),
    ]


def test_what_a_gradient_was_computed_on_is_in_the_update_where_the_rule_needs_it():
    server, updates = recorded(Async(dc_asgd=True), 1)
    server.begin(0)
    server.send(0, 0, 1.0)
    server.begin(0, 1)
    server.send(0, 0, 1.0, step=1)
    first, second = (update.seen for update in updates)
    assert first is second is not None  # the trainer's own copy, renewed with each answer
    without, updates = recorded(Async(), 1)
    without.begin(0)
    without.send(0, 0, 1.0)
    assert updates[0].seen is None


def test_a_value_that_is_put_takes_the_place_of_another_and_brings_its_state():
    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    store = OneServer(Sync(), 1, momentum).shard.store
    store.apply(Put(0, torch.tensor([3.0]), {"momentum_buffer": torch.tensor([2.0])}))
    store.apply(Put(0, torch.tensor([7.0])))
    assert value_of(store, 0) == 7.0
    assert dict(store.state())[0]["momentum_buffer"].tolist() == [2.0]


def test_nothing_is_applied_after_a_rule_has_failed():
    store = OneServer(Sync(), 1).shard.store

    def broken(target: Target, update: Update) -> None:
        raise ArithmeticError("no root")

    store._rule = broken
    for change in (Update(0, torch.ones(1)), Put(0, torch.ones(1))):
        with pytest.raises(FleetError, match="could not be stepped: ArithmeticError: no root"):
            store.apply(change)
    assert value_of(store, 0) == 0.0


def test_a_snapshot_does_not_change_with_the_next_update():
    server = OneServer(Async(), 1)
    copies = server.shard.store.snapshot()
    server.begin(0)
    server.send(0, 0, 1.0)
    assert [float(piece.value.flatten()[0]) for piece in copies] == [0.0, 0.0]


CLASSES = [
    pytest.param(
        torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, id="sgd"
    ),
    pytest.param(torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, id="adam"),
    pytest.param(torch.optim.AdamW, {"lr": 0.01}, id="adamw"),
    pytest.param(torch.optim.Adagrad, {"lr": 0.1}, id="adagrad"),
    pytest.param(torch.optim.RMSprop, {"lr": 0.01, "centered": True}, id="rmsprop"),
    pytest.param(torch.optim.Adadelta, {}, id="adadelta"),
]


class Renamed(torch.optim.SGD):
    """Takes its options by another way than its constructor says."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def options_of(optimizer_class: type[torch.optim.Optimizer], chosen: dict[str, Any]) -> dict[str, Any]:
    optimizer = optimizer_class([torch.zeros(1)], **chosen)
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


@pytest.mark.parametrize(("optimizer_class", "chosen"), CLASSES)
def test_two_slices_are_stepped_as_the_whole_is(optimizer_class, chosen):
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(10, 7))
    optimizer = optimizer_class([whole], **chosen)
    arena = whole.detach().clone()
    options = options_of(optimizer_class, chosen)
    updates = [DenseUpdate(optimizer_class, part, options) for part in (arena[:6], arena[6:])]
    for step in range(5):
        gradient = torch.randn(10, 7)
        whole.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = options["lr"] / (step + 1)
        optimizer.step()
        for update, part in zip(updates, (gradient[:6], gradient[6:]), strict=True):
            update.apply(part, {"lr": options["lr"] / (step + 1)})
    assert torch.equal(arena, whole)


def test_a_rate_that_is_a_tensor_is_on_the_cpu_where_the_script_has_another_default_device():
    value = torch.ones(2, 3)
    options = options_of(torch.optim.SGD, {"lr": 0.5})
    with torch.device("meta"):
        update = DenseUpdate(torch.optim.SGD, value, options, tensors={"lr": "float32"})
        update.apply(torch.ones(2, 3, device="cpu"), {"lr": 0.25})
    assert torch.equal(value, torch.full((2, 3), 0.75))


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize(
    "optimizer_class",
    [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam],
)
def test_a_rate_that_is_a_tensor_steps_as_a_tensor_does(optimizer_class, foreach):
    torch.manual_seed(0)
    start, gradients = torch.randn(10, 7), torch.randn(8, 10, 7)
    differs = False
    for lr in (0.7, 0.1, 0.05, 0.01, 3e-3, 1e-3):
        whole = torch.nn.Parameter(start.clone())
        value, number = start.clone(), start.clone()
        optimizer = optimizer_class([whole], lr=torch.tensor(lr))
        options = {**options_of(optimizer_class, {"lr": lr}), "foreach": foreach}
        update = DenseUpdate(optimizer_class, value, options, tensors={"lr": "float32"})
        as_number = DenseUpdate(optimizer_class, number, options)
        for step, gradient in enumerate(gradients):
            rate = optimizer.param_groups[0]["lr"].fill_(lr * 0.9**step)
            whole.grad = gradient.clone()
            for each in (update, as_number):
                each.apply(gradient.clone(), {"lr": rate.item()})
            optimizer.step()
        assert torch.equal(value, whole)
        differs = differs or not torch.equal(number, whole)
    assert differs or optimizer_class is not torch.optim.Adam, "a number has other bits"


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_update_is_the_fused_optimizers_own(optimizer_class):
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(10, 7))
    value = whole.detach().clone()
    optimizer = optimizer_class([whole], lr=0.1, weight_decay=0.01, fused=True)
    options = options_of(optimizer_class, {"lr": 0.1, "weight_decay": 0.01, "foreach": True})
    update = DenseUpdate(optimizer_class, value, options, fused=True)
    for _ in range(3):
        whole.grad = torch.randn(10, 7)
        update.apply(whole.grad.clone(), {"lr": 0.1})
        optimizer.step()
    assert torch.equal(value, whole)


def test_a_class_without_a_fused_kernel_is_refused_by_name():
    options = options_of(torch.optim.Adadelta, {})
    with pytest.raises(
        ConfigurationError, match=r"server_kernels is 'fused', and Adadelta has no fused kernel"
    ):
        DenseUpdate(torch.optim.Adadelta, torch.zeros(3), options, fused=True)


def test_the_state_has_torchs_entries_and_none_before_the_first_step():
    update = DenseUpdate(torch.optim.Adam, torch.zeros(3), options_of(torch.optim.Adam, {"lr": 0.1}))
    assert update.state() == {}
    update.apply(torch.ones(3), {})
    assert set(update.state()) == {"step", "exp_avg", "exp_avg_sq"}


def test_options_that_no_constructor_names_are_set_all_the_same():
    value = torch.zeros(2)
    DenseUpdate(Renamed, value, {"lr": 0.5, "momentum": 0}).apply(torch.ones(2), {})
    assert torch.equal(value, torch.full((2,), -0.5))


def test_a_class_that_refuses_its_options_is_named():
    with pytest.raises(ConfigurationError, match=r"SGD cannot be built .*Invalid learning rate: -1"):
        DenseUpdate(torch.optim.SGD, torch.zeros(2), {"lr": -1})


def test_a_server_never_captures_a_graph():
    options = {**options_of(torch.optim.Adam, {"lr": 0.1}), "capturable": True}
    DenseUpdate(torch.optim.Adam, torch.zeros(2), options).apply(torch.ones(2), {})
