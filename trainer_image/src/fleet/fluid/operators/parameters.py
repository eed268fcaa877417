"""Operators that create constants and random numbers, clip gradients, and update parameters."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Generator, Tensor

from fleet.fluid.operators.kinds import kind

_CUT: Final = 2.0
"""The number of standard deviations at which Paddle truncates a normal distribution."""


def _filled(shape: list[int], value: float, dtype: str) -> Tensor:
    return torch.full(shape, int(value) if "int" in dtype else value, dtype=getattr(torch, dtype))


@kind(
    "fill_constant",
    "",
    "Out",
    shapes=lambda _, attrs: (tuple(attrs["shape"]),),
    dtypes={"Out": "attribute:dtype"},
    shape=[1],
    value=0.0,
    str_value="",
    dtype="float32",
    force_cpu=False,
)
def _fill_constant(shape: list[int], value: float, dtype: str) -> Tensor:
    return _filled(shape, value, dtype)


@kind(
    "fill_constant_batch_size_like",
    "Input",
    "Out",
    shapes=lambda shapes, attrs: (
        tuple(
            shapes["Input"][attrs["input_dim_idx"]] if at == attrs["output_dim_idx"] else size
            for at, size in enumerate(attrs["shape"])
        ),
    ),
    dtypes={"Out": "attribute:dtype"},
    lod="",
    shape=[1],
    value=0.0,
    str_value="",
    dtype="float32",
    force_cpu=False,
    input_dim_idx=0,
    output_dim_idx=0,
)
def _fill_like(
    x: Tensor,
    shape: list[int],
    value: float,
    dtype: str,
    input_dim_idx: int,
    output_dim_idx: int,
    lengths: Tensor | None = None,
) -> Tensor:
    sizes = list(shape)
    # If the input has sequences, the size of the batch is their number.
    sizes[output_dim_idx] = (
        len(lengths) if lengths is not None and input_dim_idx == 0 else x.shape[input_dim_idx]
    )
    return _filled(sizes, value, dtype).to(x.device)


def _initial(type: str, fill: Callable[[Tensor, dict[str, Any]], object], **attrs: Any) -> None:  # noqa: A002 - as in `Operator`
    """Register an operator that creates a tensor, which `fill` fills in place."""

    @kind(
        type,
        "",
        "Out",
        shapes=lambda _, found: (tuple(found["shape"]),),
        dtypes={"Out": "attribute:dtype"},
        shape=[1],
        dtype="float32",
        **attrs,
    )
    def _compute(attributes: dict[str, Any]) -> Tensor:
        dtype = getattr(torch, attributes["dtype"])
        # On the CPU in any case, so that a seed gives the same values on every device.
        values = torch.empty(tuple(attributes["shape"]), dtype=dtype, device="cpu")
        with torch.no_grad():
            fill(values, attributes)
        return values


def _generator(attrs: dict[str, Any]) -> Generator | None:
    """Return a random generator for a seed, or None for torch's global generator."""
    return torch.Generator("cpu").manual_seed(int(attrs["seed"])) if attrs.get("seed") else None


def _uniform(values: Tensor, attrs: dict[str, Any]) -> None:
    values.uniform_(attrs["min"], attrs["max"], generator=_generator(attrs))
    for row in range(attrs["diag_num"]):
        values.view(-1)[row * (attrs["diag_step"] + 1)] = attrs["diag_val"]


def _truncated(values: Tensor, attrs: dict[str, Any]) -> None:
    mean, std = attrs["mean"], attrs["std"]
    low, high = mean - _CUT * std, mean + _CUT * std
    torch.nn.init.trunc_normal_(values, mean, std, low, high, generator=_generator(attrs))


def _given(values: Tensor, attrs: dict[str, Any]) -> None:
    kinds = ("fp32_values", "int32_values", "int64_values", "bool_values")
    given: list[Any] = next((attrs[each] for each in kinds if attrs.get(each)), [])
    values.copy_(torch.tensor(given).view(values.shape))


_initial("uniform_random", _uniform, min=-1.0, max=1.0, seed=0, diag_num=0, diag_step=0, diag_val=1.0)
_initial(
    "gaussian_random",
    lambda values, attrs: values.normal_(attrs["mean"], attrs["std"], generator=_generator(attrs)),
    mean=0.0,
    std=1.0,
    seed=0,
)
_initial("truncated_gaussian_random", _truncated, mean=0.0, std=1.0, seed=0)
_initial("assign_value", _given, fp32_values=[], int32_values=[], int64_values=[], bool_values=[])


def _not_computed(*_: Any) -> Any:
    raise NotImplementedError("an optimizer of fleet.optim computes this operator")


def _update(type: str, slots: str, **attrs: Any) -> None:  # noqa: A002 - as in `Operator`
    """Register an operator that updates a parameter and its state with `fleet.optim`."""
    outputs = " ".join(f"{slot}Out" for slot in slots.split())
    kind(type, f"Param Grad LearningRate {slots}", f"ParamOut {outputs}", shapes=lambda _, __: (), **attrs)(
        _not_computed
    )


_update("sgd", "")
_update("momentum", "Velocity", mu=0.9, use_nesterov=False)
_update("adagrad", "Moment", epsilon=1e-6)
_update(
    "adam",
    "Moment1 Moment2 Beta1Pow Beta2Pow",
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    lazy_mode=False,
    min_row_size_to_use_multithread=1000,
)
_update("rmsprop", "Moment MeanSquare MeanGrad", decay=0.95, epsilon=1e-6, momentum=0.0, centered=False)
kind("merge_selected_rows", "X", "Out")(_not_computed)
kind("get_tensor_from_selected_rows", "X", "Out")(_not_computed)
kind("clip_by_norm", "X", "Out", max_norm=1.0)(_not_computed)
