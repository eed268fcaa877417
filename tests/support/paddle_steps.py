"""Twenty recorded steps of paddlepaddle 1.8.5's optimizers, and equivalent optimizers of fleet."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from fleet import optim

GOLDEN = Path(__file__).parents[1] / "golden" / "fluid"
RECORD = json.loads((GOLDEN / "optimizers.json").read_text())
ARRAYS = np.load(GOLDEN / "optimizers.npz")
CASES: dict[str, dict[str, Any]] = RECORD["cases"]
CONSTANTS = RECORD["constants"]
CLASSES: dict[str, type[optim.Optimizer]] = {
    "SGDOptimizer": optim.SGD,
    "MomentumOptimizer": optim.Momentum,
    "AdagradOptimizer": optim.Adagrad,
    "AdamOptimizer": optim.Adam,
    "RMSPropOptimizer": optim.RMSProp,
}
NAMES = ("w", "b", "table_dense", "table_sparse")
TOLERANCE = 6e-6
LAZY = [name for name in CASES if name.startswith("adam_lazy") and "l2" not in name]
SETTINGS = {
    name: (CLASSES[case["optimizer"]], case["arguments"])
    for name, case in CASES.items()
    if not case["clip"] and not case["regularization"] and not case["param_attr"]
}


def parameters() -> dict[str, Parameter]:
    return {name: Parameter(torch.from_numpy(ARRAYS[f"initial/{name}"].copy())) for name in NAMES}


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"lr" if name == "learning_rate" else name: value for name, value in arguments.items()}


def decay(regularizer: str | None) -> dict[str, float]:
    return {"l2": {"weight_decay": CONSTANTS["l2"]}, "l1": {"l1_decay": CONSTANTS["l1"]}, None: {}}[
        regularizer
    ]


def optimizer_of(case: dict[str, Any], trained: dict[str, Parameter]) -> optim.Optimizer:
    groups = []
    for name, parameter in trained.items():
        attr = case["param_attr"].get(name, {})
        if attr.get("trainable", True):
            of_parameter = decay(attr.get("regularizer", case["regularization"]))
            groups.append({"params": [parameter], "factor": attr.get("learning_rate", 1.0), **of_parameter})
    return CLASSES[case["optimizer"]](groups, **options_of(case["arguments"]))


def give_gradients(trained: dict[str, Parameter], step: int) -> None:
    ids, of_rows = torch.from_numpy(ARRAYS["feed/ids"][step]).view(1, -1), ARRAYS["feed/ge"][step]
    sparse = torch.sparse_coo_tensor(ids, torch.from_numpy(of_rows), (7, 2), check_invariants=True)
    trained["w"].grad = torch.from_numpy(ARRAYS["feed/gw"][step].copy())
    trained["b"].grad = torch.from_numpy(ARRAYS["feed/gb"][step].copy())
    trained["table_dense"].grad, trained["table_sparse"].grad = sparse.to_dense(), sparse
