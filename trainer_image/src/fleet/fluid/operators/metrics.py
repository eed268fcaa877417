"""Operators that compute metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleet.fluid.operators.kinds import Gradient, Shape, kind


@kind(
    "top_k",
    "X",
    "Out Indices",
    shapes=lambda shapes, attrs: ((*shapes["X"][:-1], attrs["k"]),) * 2,
    dtypes={"Indices": "int64"},
    shares=("Out", "Indices"),
    grad=Gradient(("X",), ("Indices", "Out@GRAD", "X")),
    k=1,
)
def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = x.max(-1, keepdim=True) if k == 1 else torch.topk(x, k)
    return found.values, found.indices


@kind(
    "accuracy",
    "Out Indices Label",
    "Accuracy Correct Total",
    shapes=lambda _, __: ((1,),) * 3,
    dtypes={"Accuracy": "float32", "Correct": "int32", "Total": "int32"},
)
def _accuracy(_: Tensor, indices: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hits = (indices == label).any(-1).sum().reshape(1)
    total = hits.new_full((1,), len(indices))
    return hits.float() / max(len(indices), 1), hits.int(), total.int()


def _statistics(_: Mapping[str, Any], attrs: Mapping[str, Any]) -> Sequence[Shape]:
    buckets, steps = attrs["num_thresholds"] + 1, attrs["slide_steps"]
    state = ((1 + steps) * buckets + 1,) if steps else (1, buckets)
    return (1,), state, state


@kind(
    "auc",
    "Predict Label StatPos StatNeg",
    "AUC StatPosOut StatNegOut",
    shapes=_statistics,
    dtypes={"AUC": "float64", "StatPosOut": "int64", "StatNegOut": "int64"},
    lod="",
    curve="ROC",
    num_thresholds=4095,
    slide_steps=1,
)
def _auc(
    predict: Tensor,
    label: Tensor,
    positives: Tensor,
    negatives: Tensor,
    num_thresholds: int,
    slide_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # Truncated as in Paddle, so that only a probability of 1 falls into the last bucket.
    buckets = (predict.detach()[:, -1] * num_thresholds).long()
    labels = label.reshape(-1) != 0
    counted = [
        _count(state, torch.bincount(buckets[chosen], minlength=num_thresholds + 1), slide_steps)
        for state, chosen in ((positives, labels), (negatives, ~labels))
    ]
    (positive, positives), (negative, negatives) = counted
    # The area under the curve by the trapezoidal rule, from the highest threshold down.
    hits, alarms = (counts.flip(0).cumsum(0).double() for counts in (positive, negative))
    area = (alarms.diff(prepend=alarms.new_zeros(1)) * (hits + hits - positive.flip(0)) / 2).sum()
    whole = hits[-1] * alarms[-1]
    return (area / whole if whole > 0 else area).reshape(1), positives, negatives


def _count(state: Tensor, counts: Tensor, slide_steps: int) -> tuple[Tensor, Tensor]:
    """Add a batch's counts to the state; return the window's total counts, and the new state.

    The state of a window contains the counts of each of its batches, their sum, and the number of batches.
    """
    if not slide_steps:
        total = state.reshape(-1)[: len(counts)] + counts  # the startup program creates an additional element
        return total, total.reshape(1, -1)
    state, size = state.clone(), len(counts)
    place = int(state[-1]) % slide_steps * size
    window = state[slide_steps * size : (slide_steps + 1) * size]
    window += counts - state[place : place + size]
    state[place : place + size] = counts
    state[-1] += 1
    return window, state
