"""What is in no shard comes back, and the state of an optimizer as itself would have laid it out."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from fleet.checkpoint import (
    GradientOrder,
    OwnRows,
    TrainerPart,
    TrainStatus,
    capture_part,
    restore_part,
    restore_states,
)
from fleet.errors import CheckpointError
from fleet.fluid import Program
from fleet.nn import DistributedEmbedding
from fleet.plan import Source
from fleet.tables import TableRows


def own_rows(ids: list[int], **state: torch.Tensor) -> TrainerPart:
    rows = TableRows(np.array(ids, dtype=np.int64), torch.empty(len(ids), 0), state)
    return TrainerPart(own_rows=OwnRows(7, {"model.clicks": rows}))


def test_the_state_of_a_trainers_own_rows_comes_back():
    state = {"sum": torch.rand(3, 4), "norm": torch.rand(3, 1)}
    found = TrainerPart.from_bytes(own_rows([-5, 0, 1 << 40], **state).to_bytes(), "the file").own_rows
    assert found.steps == 7
    rows = found.tables["model.clicks"]
    assert rows.ids.tolist() == [-5, 0, 1 << 40]
    assert rows.state.keys() == state.keys()
    assert all(torch.equal(rows.state[name], state[name]) for name in state)


@pytest.mark.parametrize(
    "part",
    [
        own_rows([3, 3], sum=torch.rand(2, 4)),
        own_rows([4, 3], sum=torch.rand(2, 4)),
        own_rows([3, 4], sum=torch.rand(3, 4)),
        own_rows([3, 4], sum=torch.rand(2)),
        own_rows([3, 4], sum=torch.zeros(2, 4, dtype=torch.int32)),
    ],
    ids=["twice", "not-ascending", "too-many", "flat", "integers"],
)
def test_rows_that_no_trainer_has_saved_are_refused(part):
    with pytest.raises(
        CheckpointError, match=r"the file is not the trainer's part of a checkpoint: .*clicks"
    ):
        TrainerPart.from_bytes(part.to_bytes(), "the file")


@pytest.mark.parametrize("order", [None, GradientOrder(("b", None, "a")), GradientOrder(("a", None), ("a",))])
def test_the_order_of_gradients_comes_back(order):
    assert TrainerPart.from_bytes(TrainerPart(order=order).to_bytes(), "the file").order == order


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(GradientOrder((3, None)), id="a-number"),  # type: ignore[arg-type]
        pytest.param(GradientOrder(("a", None), ("b",)), id="another"),
    ],
)
def test_an_order_of_what_are_no_parameters_is_refused(order):
    with pytest.raises(CheckpointError, match="the order of gradients has an entry that is not a parameter"):
        TrainerPart.from_bytes(TrainerPart(order=order).to_bytes(), "the file")


def test_a_fused_optimizer_goes_on_with_the_state_of_parameters_of_any_layout():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8)
    adam = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    source = Program.from_optimizer(adam, model).source
    assert source is not None

    def step() -> torch.Tensor:
        adam.zero_grad()
        model(images).square().sum().backward()
        adam.step()
        return model.weight.detach().clone()

    step()
    weights = {name: value.detach().clone() for name, value in source.parameters.items()}
    saved = {
        name: {
            entry: kept.clone(memory_format=torch.contiguous_format)
            for entry, kept in adam.state[value].items()
        }
        for name, value in source.parameters.items()
    }
    expected = step()
    with torch.no_grad():
        for name, value in source.parameters.items():
            value.copy_(weights[name])
    restore_states(saved, source)
    torch.testing.assert_close(step(), expected)


def source_of(model: torch.nn.Module) -> Source:
    trained = [each for each in model.parameters() if each.requires_grad]
    source = Program.from_optimizer(torch.optim.SGD(trained, lr=0.1), model).source
    assert source is not None
    return source


def student_and_teacher(width: int = 2) -> Any:
    model = torch.nn.ModuleDict({"student": torch.nn.Linear(2, 2), "teacher": torch.nn.Linear(2, width)})
    model["teacher"].requires_grad_(False)
    return model


def captured(model: torch.nn.Module) -> TrainerPart:
    part = capture_part(TrainStatus(), 1, source_of(model), {})
    return TrainerPart.from_bytes(part.to_bytes(), "the file")


def test_what_shards_have_is_not_in_a_trainers_part():
    model = student_and_teacher()
    model["head"] = torch.nn.Linear(2, 2)
    model["head"].weight = model["student"].weight
    model["mirror"] = torch.nn.Linear(2, 2)
    model["mirror"].weight = model["teacher"].weight
    model["mirror"].bias = model["student"].bias
    model["sparse"] = torch.nn.Embedding(3, 2, sparse=True)
    model["served"] = DistributedEmbedding(9, 4, name="served")
    model["lazy"] = torch.nn.LazyLinear(2)
    trained = [*model["student"].parameters(), model["head"].bias, model["sparse"].weight]
    source = Program.from_optimizer(torch.optim.SGD([*trained, *model["served"].parameters()], lr=0.1), model)
    assert source.source is not None
    part = capture_part(TrainStatus(), 1, source.source, {})
    assert sorted(part.parameters) == ["teacher.bias", "teacher.weight"]


def test_what_a_state_dict_leaves_out_is_not_in_a_trainers_part():
    def without_teacher(_: object, state: dict[str, object], *__: object) -> None:
        for name in [each for each in state if each.startswith("teacher.")]:
            del state[name]

    model = student_and_teacher()
    model.register_state_dict_post_hook(without_teacher)
    assert captured(model).parameters == {}


def test_a_part_of_an_earlier_version_leaves_frozen_parameters_alone_and_says_so(caplog):
    model = student_and_teacher()
    part = replace(captured(model), parameters={})
    before = model["teacher"].weight.clone()
    restore_part(part, source_of(model))
    assert torch.equal(model["teacher"].weight, before)
    assert "has no values of teacher.weight, teacher.bias: these parameters keep the values" in caplog.text


def test_a_frozen_parameter_of_another_shape_is_refused_before_anything_is_changed():
    part, model = captured(student_and_teacher()), student_and_teacher(3)
    before = model["teacher"].weight.clone()
    with pytest.raises(CheckpointError, match=r"have different parameters: teacher\.bias, teacher\.weight"):
        restore_part(part, source_of(model))
    assert torch.equal(model["teacher"].weight, before)


def test_what_no_file_of_tensors_can_hold_is_left_out_and_named(caplog):
    model = student_and_teacher()
    adjacency = torch.eye(2).to_sparse()
    model["teacher"].register_parameter("graph", torch.nn.Parameter(adjacency, requires_grad=False))
    part = capture_part(TrainStatus(), 1, source_of(model), {})
    assert sorted(part.parameters) == ["teacher.bias", "teacher.weight"]
    assert "a checkpoint leaves out teacher.graph" in caplog.text
    part.to_bytes()


def test_metadata_of_another_type_or_depth_is_refused():
    kept = json.loads(load_metadata(TrainerPart(TrainStatus(3, 4)).to_bytes())["trainer"])
    changed = [
        json.dumps({**kept, field: value})
        for field, value in [
            ("step", "4"),
            ("step", -1),
            ("step", 2**64),
            ("epoch_no", -2),
            ("epoch_no", 1.5),
            ("state", []),
            ("groups", {"dict": []}),
            ("groups", [1]),
            ("optimizer_state", [1]),
            ("loop", [0, 1]),
            ("loop", [0, 1, 0]),
            ("buffers", 1),
        ]
    ]
    deep = json.dumps({**kept, "state": None}).replace("null", "[" * 100_000 + "]" * 100_000)
    for story in [*changed, deep, "[]", "1"]:
        with pytest.raises(CheckpointError, match="what was read is not the trainer's part"):
            TrainerPart.from_bytes(save({}, {"format": "pt", "trainer": story}), "what was read")


def load_metadata(data: bytes) -> dict[str, str]:
    """Return what a safetensors file says of itself."""
    header: dict[str, dict[str, str]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header["__metadata__"]


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x02\0\0\0\0\0\0\0{}"])
def test_bytes_that_are_no_trainers_part_are_refused(data):
    with pytest.raises(CheckpointError, match="what was read is not the trainer's part"):
        TrainerPart.from_bytes(data, "what was read")


def test_a_trainers_own_state_goes_to_the_device_of_its_parameter():
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    source = Program.from_optimizer(optimizer).source
    assert source is not None
    (name,) = source.parameters
    groups = [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"}]
    kept = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}
    restore_part(TrainerPart(groups=groups, optimizer_state={name: kept}), source)
    state = optimizer.state[parameter]
    assert state["exp_avg"].device.type == "meta"
    assert float(state["step"]) == 3.0


@pytest.mark.parametrize(
    ("capturable", "step_device"), [pytest.param(False, "cpu", id="step-on-cpu"), (True, "meta")]
)
def test_the_state_of_a_scalar_parameter_goes_to_its_device_and_its_count_where_torch_keeps_it(
    capturable, step_device
):
    parameter = torch.nn.Parameter(torch.zeros((), device="meta"))
    optimizer = torch.optim.Adam([parameter], capturable=capturable)
    source = Program.from_optimizer(optimizer).source
    assert source is not None
    (name,) = source.parameters
    entries = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(1.0), "history": [torch.ones(2), "text"]}
    restore_states({name: entries, "of another model": {}}, source)
    state = optimizer.state[parameter]
    assert state["exp_avg"].device.type == state["history"][0].device.type == "meta"
    assert state["step"].device.type == step_device
    assert state["history"][1] == "text"


def test_how_a_step_is_computed_stays_this_processs_choice():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.1, foreach=False)
    source = Program.from_optimizer(optimizer).source
    assert source is not None
    saved = {"lr": 0.5, "foreach": None, "fused": True, "capturable": True, "differentiable": False}
    restore_part(TrainerPart(groups=[saved]), source)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["foreach"], group["fused"], group["capturable"]) == (0.5, False, None, False)
