"""Updates of a parameter server's blocks: gradient clipping, and steps of the user's torch.optim class.

PyTorch itself computes the steps: each block has its own optimizer instance on a view of the server's values.
This module only adds features that a single process does not need: norms over the blocks of several servers,
and the correction of delayed gradients.
"""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import ConfigurationError
from fleet.plan.optimizers import build_optimizer
from fleet.without_dynamo import direct_step

__all__ = ["DenseUpdate", "clip_coefficient", "compensate_delay", "sum_of_squares", "total_of"]

_EPSILON: Final = 1e-6
"""The constant that `torch.nn.utils.clip_grad_norm_` adds to the norm before it divides by the norm."""


class DenseUpdate:
    """A block and the optimizer that steps it; callers must serialize access.

    Parameters
    ----------
    optimizer_class : type
        The user's torch.optim class.
    value : Tensor
        The block's value, a view of the server's memory, which is stepped in place.
    options : mapping
        The options of the block's param group at capture, including kernel flags.
    fused : bool
        Whether to use the fused kernel of the class instead of the kernel that the flags select.
    tensors : mapping of str to str
        The options that the class receives as tensors, with their dtypes.

    Raises
    ------
    ConfigurationError
        The class refuses the options, or has no fused kernel.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        value: Tensor,
        options: Mapping[str, Any],
        *,
        fused: bool = False,
        tensors: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._value = value.detach()
        self._tensors = {name: getattr(torch, dtype) for name, dtype in tensors.items()}
        # CUDA graph capture is a property of the trainer's GPU; a server's values are in host memory.
        chosen = {name: option for name, option in options.items() if name != "capturable"}
        if self._tensors and chosen.get(
            "foreach"
        ):  # torch allows tensor options with foreach only for graph capture
            chosen["foreach"] = False
        if fused:
            _check_fused(optimizer_class)
            chosen |= {"fused": True, "foreach": None}
        try:
            self._optimizer = build_optimizer(optimizer_class, [self._value], self._typed(chosen))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"{optimizer_class.__name__} cannot be built on a parameter server with the options "
                f"{chosen}: {error}; expected a constructor that takes (params, **options) with the options "
                "of its param groups"
            ) from error
        self._step = direct_step(self._optimizer)

    def apply(self, gradient: Tensor, hyper_parameters: Mapping[str, Any]) -> None:
        """Step the block.

        Parameters
        ----------
        gradient : Tensor
            The reduced gradient, of the block's shape.
        hyper_parameters : mapping
            The options of this step; they replace those of the previous step.
        """
        options = self._typed(hyper_parameters) if self._tensors else hyper_parameters
        self._optimizer.param_groups[0].update(options)
        self._value.grad = gradient
        try:
            self._step()
        finally:
            self._value.grad = None

    def _typed(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options, with those that the class expects as tensors converted to tensors."""
        tensors = {
            name: torch.tensor(options[name], dtype=dtype, device="cpu")
            for name, dtype in self._tensors.items()
            if name in options
        }
        return {**options, **tensors}

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state by name, without copying tensors; empty before the first step."""
        return dict(self._optimizer.state.get(self._value, {}))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace the state with one that `state` returned; tensors are copied."""
        self._optimizer.state[self._value] = {
            name: entry.detach().clone() if isinstance(entry, Tensor) else entry
            for name, entry in state.items()
        }


def _check_fused(optimizer_class: type[Optimizer]) -> None:
    if "fused" not in inspect.signature(optimizer_class).parameters:
        raise ConfigurationError(
            f"strategy.server_kernels is 'fused', and {optimizer_class.__name__} has no fused kernel; use "
            "'default', or a class that has one, such as SGD, Adam, AdamW or Adagrad"
        )


def sum_of_squares(gradient: Tensor) -> float:
    """Return the sum of a gradient's squared elements; nan and inf propagate.

    The sum has double precision, so that neither the slicing of a parameter into blocks nor its dtype changes
    the norm.
    """
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    return float(norm * norm)


def total_of(sums: Mapping[int, float]) -> float:
    """Return the total of the sums, added in block order so that it is bitwise identical on all servers."""
    return sum((sums[block] for block in sorted(sums)), start=0.0)


def clip_coefficient(sum_of_squares: float, max_norm: float) -> float:
    """Return the factor that scales a norm down to `max_norm`: at most 1, and nan if the norm is nan.

    Parameters
    ----------
    sum_of_squares : float
        The square of the norm.
    max_norm : float

    Returns
    -------
    float
        The factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients.
    """
    coefficient = max_norm / (float(sum_of_squares) ** 0.5 + _EPSILON)
    return 1.0 if coefficient > 1.0 else coefficient


def compensate_delay(gradient: Tensor, value: Tensor, sent: Tensor) -> Tensor:
    """Correct a gradient, to first order, for the steps made since its trainer received the value.

    Parameters
    ----------
    gradient, value, sent : Tensor
        The gradient, the current value, and the value for which the gradient was computed, all of the same
        shape. None of them is modified.

    Returns
    -------
    Tensor
        ``gradient + gradient * gradient * (value - sent)``.

    Raises
    ------
    ValueError
        The shapes differ; the message gives all three.

    Notes
    -----
    DC-ASGD with lambda 1: Zheng et al. 2017, arXiv:1609.08326.
    """
    if not gradient.shape == value.shape == sent.shape:
        raise ValueError(
            f"a gradient of shape {list(gradient.shape)}, a value of {list(value.shape)} and the value sent "
            f"of {list(sent.shape)}; expected one shape"
        )
    # The order of operations is Paddle's, for equal rounding: drift times gradient, times gradient.
    return gradient + (value - sent) * gradient * gradient
