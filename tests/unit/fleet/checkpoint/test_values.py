"""Values come back exactly, and unsupported ones are refused by their path."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from fleet.checkpoint import TrainerPart, TrainStatus
from fleet.checkpoint.values import decode, encode
from fleet.errors import ConfigurationError

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
        pytest.param({"a": np.longdouble(1)}, r"state\.a is a longdouble", id="number-of-numpy-alone"),
        pytest.param({"a": np.array(["x"])}, r"state\.a is an array of <U1", id="array-of-text"),
        pytest.param({"a": [np.array([None])]}, r"state\.a\.0 is an array of object", id="array-of-objects"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_by_its_place(state, words):
    with pytest.raises(ConfigurationError, match=words):
        TrainerPart(TrainStatus(state=state)).to_bytes()
