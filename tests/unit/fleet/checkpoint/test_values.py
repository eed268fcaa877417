"""Plain values come back exactly, and what no checkpoint can hold is named by its place."""

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from fleet.checkpoint import TrainerPart, TrainStatus, restore_part, restore_states
from fleet.checkpoint.values import decode, encode
from fleet.errors import CheckpointError, ConfigurationError
from fleet.fluid import Program

VALUES = [
    None,
    True,
    7,
    0.1,
    math.inf,
    "text",
    [1, [2]],
    (1, (2.5, None)),
    {"a": {3: "three", "b": ()}},
    Counter({30: 1, 80: 2}),
    {},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_plain_value_comes_back_with_its_type(value):
    back = TrainerPart.from_bytes(TrainerPart(TrainStatus(state={"x": value})).to_bytes(), "here").status
    assert back.state["x"] == value
    assert type(back.state["x"]) is type(value)


def test_tensors_and_arrays_come_back_to_the_bit():
    state: dict[str, Any] = {
        "tensor": torch.randn(3, 2, dtype=torch.float64),
        "half": torch.randn(4).to(torch.bfloat16),
        "scalar": torch.tensor(5),
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "nan": float("nan"),
    }
    back = TrainerPart.from_bytes(TrainerPart(TrainStatus(state=state)).to_bytes(), "here").status.state
    for name in ("tensor", "half", "scalar"):
        assert torch.equal(back[name], state[name])
        assert back[name].dtype == state[name].dtype
    assert np.array_equal(back["array"], state["array"])
    assert back["array"].dtype == np.int32
    assert math.isnan(back["nan"])


def test_places_that_read_alike_keep_their_own_tensors():
    state = {
        "net": {"ema.w": torch.ones(2)},
        "net.ema": {"w": torch.zeros(2)},
        "keys": {1: torch.tensor(1), "1": torch.tensor(2)},
        "keys.1 (2)": np.arange(3),
    }
    back = TrainerPart.from_bytes(TrainerPart(TrainStatus(state=state)).to_bytes(), "here").status.state
    assert torch.equal(back["net"]["ema.w"], torch.ones(2))
    assert torch.equal(back["net.ema"]["w"], torch.zeros(2))
    assert (int(back["keys"][1]), int(back["keys"]["1"])) == (1, 2)
    assert back["keys.1 (2)"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    ],
)
def test_the_schedulers_of_torch_can_be_kept(make):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    state = make(optimizer).state_dict()
    tensors: dict[str, torch.Tensor] = {}
    assert decode(encode(state, tensors, "state"), tensors) == state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        pytest.param({"a": [1, len]}, r"state\.a\.1 is a builtin_function_or_method", id="function"),
        pytest.param({"a": {1.5: 2}}, r"state\.a has the key 1\.5", id="key"),
        pytest.param({"a": {1, 2}}, r"state\.a is a set", id="set"),
        pytest.param({"a": np.array(["x"])}, r"state\.a is an array of <U1", id="array-of-text"),
        pytest.param({"a": [np.array([None])]}, r"state\.a\.0 is an array of object", id="array-of-objects"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named_by_its_place(state, words):
    with pytest.raises(ConfigurationError, match=words):
        TrainerPart(TrainStatus(state=state)).to_bytes()


def test_a_story_of_another_type_or_depth_is_refused():
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
