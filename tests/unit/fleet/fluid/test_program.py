from typing import Any

import numpy as np
import pytest
import torch

import fleet
from fleet.errors import TranspileError
from fleet.fluid import Program
from fleet.plan import fingerprint_of
from tests.support.programs import Parameters, captured, never


class Poisoned(torch.nn.Linear):
    def forward(self, *inputs):
        raise AssertionError("capture ran the model")


# Some tests hand over what the annotations forbid, and all look into what may be None in general.
capture: Any = Program.capture
from_optimizer: Any = Program.from_optimizer


def sgd(module: torch.nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def types(program: Program) -> list[str]:
    return [op.type for op in program.global_block().ops]


def test_the_model_is_neither_run_nor_changed_and_chance_stays_untouched():
    module = Poisoned(3, 2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    chance = torch.get_rng_state()
    optimizer = sgd(module, momentum=0.9)
    capture(module, never, optimizer)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in module.parameters())


def test_forward_and_backward_read_what_loss_fn_names():
    def loss_fn(model, pixels, label, *, weight=1.0):
        raise AssertionError

    module = Parameters({"w": (2, 3), "b": (3,)})
    program = capture(module, loss_fn, sgd(module))
    forward, backward = program.global_block().ops[:2]
    assert forward.input("X") == backward.input("X") == ["pixels", "label", "weight"]
    assert forward.input("Param") == ["w", "b"]
    assert forward.output("Loss") == backward.input("Loss") == ["loss"]
    assert program.global_block().var("pixels").is_data


def test_gradients_come_last_created_first_and_optimize_operators_by_name():
    program = captured({"z": (2,), "a": (3,), "m": (4,)})
    ops = program.global_block().ops
    assert types(program) == ["forward", "backward", *["accumulate_grad"] * 3, *["sgd"] * 3]
    assert [op.output("Grad")[0] for op in ops[2:5]] == ["m@GRAD", "a@GRAD", "z@GRAD"]
    assert [op.input("Param")[0] for op in ops[5:]] == ["a", "m", "z"]


@pytest.mark.parametrize(
    ("optimizer", "options", "kind", "slots", "attrs"),
    [
        pytest.param("SGD", {}, "sgd", [], {"lr": 0.1}, id="sgd"),
        pytest.param(
            "SGD",
            {"momentum": 0.9, "nesterov": True},
            "momentum",
            ["Velocity"],
            {"mu": 0.9, "use_nesterov": True},
            id="momentum",
        ),
        pytest.param(
            "Adam",
            {"betas": (0.8, 0.99), "eps": 1e-6},
            "adam",
            ["Moment1", "Moment2", "Beta1Pow", "Beta2Pow"],
            {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6},
            id="adam",
        ),
        pytest.param("Adagrad", {"eps": 1e-6}, "adagrad", ["Moment"], {"epsilon": 1e-6}, id="adagrad"),
        pytest.param(
            "RMSprop",
            {"alpha": 0.9},
            "rmsprop",
            ["MeanSquare", "MeanGrad", "Moment"],
            {"decay": 0.9},
            id="rmsprop",
        ),
        pytest.param("Adamax", {}, "adamax", ["Moment", "InfNorm", "Beta1Pow"], {"beta1": 0.9}, id="adamax"),
        pytest.param(
            "Adadelta", {}, "adadelta", ["AvgSquaredGrad", "AvgSquaredUpdate"], {"rho": 0.9}, id="adadelta"
        ),
        pytest.param("NAdam", {}, "nadam", [], {"betas": [0.9, 0.999]}, id="unknown-to-the-original"),
    ],
)
def test_optimize_operators_have_the_original_s_types_and_slots(optimizer, options, kind, slots, attrs):
    program = captured({"w": (2, 3)}, optimizer, **options)
    block = program.global_block()
    op = block.ops[-1]
    assert op.type == kind
    assert op.input_names == ["Param", "Grad", "LearningRate", *slots]
    assert op.output_names == ["ParamOut", *(f"{slot}Out" for slot in slots)]
    assert (op.input("Param"), op.input("Grad"), op.input("LearningRate")) == (
        ["w"],
        ["w@GRAD"],
        ["learning_rate_0"],
    )
    assert {name: op.attr(name) for name in attrs} == attrs
    for slot in slots:
        assert block.var(op.input(slot)[0]).shape == ((1,) if slot.endswith("Pow") else (2, 3))


def test_a_subclass_is_named_after_itself():
    class MySGD(torch.optim.SGD):
        pass

    module = Parameters({"w": (2,)})
    program = capture(module, never, MySGD(module.parameters(), lr=0.1, momentum=0.9))
    assert types(program)[-1] == "mysgd"


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        pytest.param("SGD", {"weight_decay": 0.5}, ["scale", "sum", "sgd"], id="coupled"),
        pytest.param("Adam", {"weight_decay": 0.5}, ["scale", "sum", "adam"], id="coupled-adam"),
        pytest.param("SGD", {}, ["sgd"], id="none"),
        pytest.param("AdamW", {"weight_decay": 0.5}, ["adamw"], id="decoupled"),
        pytest.param(
            "Adam", {"weight_decay": 0.5, "decoupled_weight_decay": True}, ["adam"], id="decoupled-adam"
        ),
    ],
)
def test_weight_decay(optimizer, options, expected):
    program = captured({"w": (2,)}, optimizer, **options)
    assert types(program)[3:] == expected
    if "scale" in expected:
        scale, total, _ = program.global_block().ops[3:]
        assert (scale.input("X"), scale.attr("scale")) == (["w"], 0.5)
        assert total.input("X") == ["w@GRAD", scale.output("Out")[0]]
        assert total.output("Out") == ["w@GRAD"]


def test_the_startup_program_creates_what_persists():
    program = captured({"w": (2,)}, momentum=0.9)
    startup: Any = program.startup_program
    created = [op.output("Out")[0] for op in startup.global_block().ops]
    assert created == ["w", "learning_rate_0", "w_velocity_0"]
    assert [variable.name for variable in program.list_vars() if variable.persistable] == created


def test_what_is_frozen_or_tied_appears_once_or_not_at_all():
    module = torch.nn.Module()
    module.a = torch.nn.Linear(2, 2, bias=False)
    module.b = torch.nn.Linear(2, 2, bias=False)
    module.b.weight = module.a.weight
    module.c = torch.nn.Linear(2, 2, bias=False)
    module.c.weight.requires_grad_(False)
    program = capture(module, never, sgd(module))
    assert list(program.source.parameters) == ["a.weight"]
    assert program.source.parameters["a.weight"] is module.a.weight


def test_the_source_keeps_the_objects():
    module = Parameters({"w": (2,)})
    optimizer = sgd(module)
    program = capture(module, never, optimizer)
    source = program.source
    assert (source.module, source.loss_fn, source.optimizer, source.named) == (module, never, optimizer, True)
    assert program.clone().source is source
    assert program.startup_program.source is source


def test_capture_sets_the_default_programs_and_a_loop_s_program_does_not():
    module = Parameters({"w": (2,)})
    program = capture(module, never, sgd(module))
    from_optimizer(sgd(module))
    assert fleet.default_main_program() is program
    assert fleet.default_startup_program() is program.startup_program


def test_names_of_a_loop_s_program():
    module = Parameters({"w": (2,), "b": (3,)})
    by_model = from_optimizer(sgd(module), module)
    by_torch = from_optimizer(torch.optim.SGD(module.named_parameters(), lr=0.1))
    by_position = from_optimizer(torch.optim.SGD([{"params": [module.b]}, {"params": [module.w]}], lr=0.1))
    assert list(by_model.source.parameters) == list(by_torch.source.parameters) == ["w", "b"]
    assert by_model == by_torch
    assert list(by_position.source.parameters) == ["param_0_0", "param_1_0"]
    assert by_position.source.parameters["param_1_0"] is module.w
    assert (by_model.source.named, by_torch.source.named, by_position.source.named) == (True, True, False)
    assert by_position.global_block().ops[0].input("X") == []


def test_options_of_any_numeric_kind_become_plain():
    module = Parameters({"w": (2,)})
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.5), momentum=np.float64(0.25))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # leaves initial_lr in the group
    op = from_optimizer(optimizer).global_block().ops[-1]
    assert (op.attr("lr"), op.attr("mu"), op.has_attr("initial_lr")) == (0.5, 0.25, False)


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_a_schedule_that_begins_at_zero_does_not_hide_an_optimizer_of_whole_parameters(name):
    assert captured({"w": (2, 2)}, name, lr=0.0).global_block().ops[-1].attr("elementwise") is False


def test_the_fingerprint_is_the_same_on_every_platform_and_in_any_order():
    agreement = {"trainers": "2", "parameter wé": "float32[2]"}
    pinned = "058dfd2c64f672f44ce90da59d3469bea7421d526239a389b893adfa0a9ebc50"
    assert fingerprint_of(agreement) == pinned
    assert fingerprint_of(dict(reversed(agreement.items()))) == pinned
    assert captured().fingerprint() == captured().fingerprint() != captured(momentum=0.9).fingerprint()


def any_feed(model, **feed): ...


def any_number(model, *feed): ...


def feeds_w(model, w): ...


def feeds_loss(model, loss): ...


class Demanding(torch.optim.Optimizer):
    def __init__(self, params: Any, something: object) -> None:
        super().__init__(params, {"lr": 0.1, "hook": print})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda m: capture(never, never, sgd(m)), "Module as its model", id="no-model"),
        pytest.param(lambda m: capture(m, never, torch.optim.SGD), "found the class SGD", id="a-class"),
        pytest.param(lambda m: capture(m, never, None), "no optimizer: .* a NoneType", id="no-optimizer"),
        pytest.param(lambda m: capture(m, None, sgd(m)), "loss_fn must be a function", id="no-loss"),
        pytest.param(lambda m: capture(m, torch.nn.MSELoss(), sgd(m)), "found a MSELoss", id="a-loss-module"),
        pytest.param(lambda m: capture(m, lambda: 0, sgd(m)), "must be the model", id="no-arguments"),
        pytest.param(
            lambda m: capture(m, any_feed, sgd(m)),
            r"\*\*feed has no name",
            id="kwargs",
        ),
        pytest.param(lambda m: capture(m, any_number, sgd(m)), r"\*feed has no name", id="args"),
        pytest.param(
            lambda m: capture(m, feeds_w, sgd(m)),
            "w has the name of one of the model",
            id="feed",
        ),
        pytest.param(lambda m: capture(m, feeds_loss, sgd(m)), "name of the result", id="feed-loss"),
        pytest.param(
            lambda m: capture(m, never, torch.optim.LBFGS(m.parameters())),
            "^LBFGS evaluates",
            id="lbfgs",
        ),
        pytest.param(
            lambda m: capture(Parameters({"w": (2,)}), never, sgd(m)),
            r"parameter 0 of .* group 0, of shape \[2\], is not one of the model's",
            id="another-model",
        ),
        pytest.param(
            lambda m: capture(m, never, Demanding(m.parameters(), 1)),
            "Demanding's option hook is a builtin",
            id="an-option-that-cannot-travel",
        ),
        pytest.param(
            lambda m: capture(m.requires_grad_(False), never, sgd(m)),
            "nothing to train",
            id="all-frozen",
        ),
        pytest.param(lambda m: from_optimizer(sgd(m), 3), "Module or None, found a int", id="loop-model"),
        pytest.param(
            lambda m: from_optimizer(torch.optim.SGD([("v", m.w), ("v", m.b)], lr=0.1)),
            "two parameters are named 'v'",
            id="one-name-twice",
        ),
    ],
)
def test_what_cannot_be_captured_is_an_error(call, message):
    with pytest.raises(TranspileError, match=message):
        call(Parameters({"w": (2,), "b": (3,)}))


def test_the_weight_of_a_sparse_embedding_is_a_table_and_no_parameter():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(5, 2, sparse=True))
    program = capture(model, never, sgd(model))
    assert [variable.name for variable in program.global_block().all_parameters()] == ["0.weight", "0.bias"]
    assert program.source is not None
    assert program.source.own_tables == {"1.weight": model[1].weight}
    assert program.spec is not None
    assert program.spec.agreement()["table 1.weight"] == (
        "dimension 2, 5 ids, rows of the module's own, stepped as SGD of param group 0"
    )


def test_a_sparse_embedding_of_doubles_is_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True).double())
    with pytest.raises(TranspileError, match=r"0\.weight has sparse gradients of torch\.float64"):
        capture(model, never, sgd(model))


def test_a_module_of_ones_own_with_sparse_gradients_is_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    setattr(model[0], "sparse", True)  # noqa: B010 - no attribute that torch declares
    with pytest.raises(TranspileError, match="module 0 has sparse=True"):
        capture(model, never, sgd(model))


def test_a_lazy_module_is_refused_by_position():
    model = torch.nn.LazyLinear(3)
    with pytest.raises(TranspileError, match=r"parameter 0 .* has no shape yet; run the lazy module once"):
        capture(model, never, sgd(model))


def test_parameters_that_share_memory_are_refused_and_one_that_is_used_twice_is_not():
    module: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    program = capture(module, never, sgd(module))
    assert [op.input("Param") for op in program.global_block().ops if op.type == "sgd"] == [
        ["0.bias"],
        ["0.weight"],
        ["1.bias"],
    ]
    module[1].weight = torch.nn.Parameter(module[0].weight.detach())
    with pytest.raises(TranspileError, match=r"0\.weight and 1\.weight share memory, .* in head\.weight ="):
        capture(module, never, sgd(module))


def test_parameters_that_lie_side_by_side_in_one_storage_are_fine():
    flat = torch.zeros(6)
    named = [(name, torch.nn.Parameter(flat[at : at + 3])) for name, at in (("a", 0), ("b", 3))]
    assert from_optimizer(torch.optim.SGD(named, lr=0.1)).global_block().var("b").shape == (3,)
