"""Dense parameters: the user's own torch.optim class, one instance per block, on a view of the arena.

The mathematics is PyTorch's because it is PyTorch that computes it.
"""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import ConfigurationError
from fleet.plan.optimizers import build_optimizer
from fleet.without_dynamo import step_directly

__all__ = ["DenseUpdate"]


class DenseUpdate:
    """One block and the optimizer that steps it. Used by one thread at a time.

    Parameters
    ----------
    optimizer_class : type
        The user's torch.optim class.
    value : Tensor
        The block's value, a view of the server's arena; stepped in place.
    options : mapping
        The options of the block's param group at capture, kernel flags included.
    fused : bool
        Step with the class's fused kernel in place of the one that the flags ask for.
    tensors : mapping of str to str
        Options that the class gets as tensors of these dtypes.

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
        # Capturing belongs to a trainer's GPU, and a server's arena is memory of the host.
        chosen = {name: option for name, option in options.items() if name != "capturable"}
        if self._tensors and chosen.get("foreach"):  # which torch combines with tensors where it captures
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

    def apply(self, gradient: Tensor, hyper_parameters: Mapping[str, Any]) -> None:
        """Step the block.

        Parameters
        ----------
        gradient : Tensor
            Already reduced; of the block's shape.
        hyper_parameters : mapping
            The options of this step; replace those of the step before.
        """
        self._optimizer.param_groups[0].update(self._typed(hyper_parameters))
        self._value.grad = gradient
        try:
            step_directly(self._optimizer)
        finally:
            self._value.grad = None

    def _typed(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return options in the types with which the user's own optimizer computes."""
        if not self._tensors:
            return options
        tensors = {
            name: torch.tensor(options[name], dtype=dtype, device="cpu")
            for name, dtype in self._tensors.items()
            if name in options
        }
        return {**options, **tensors}

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state by name, tensors not copied; empty before the first step."""
        return dict(self._optimizer.state.get(self._value, {}))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with this state, as `state` returned it; its tensors are copied."""
        self._optimizer.state[self._value] = {
            name: entry.detach().clone() if isinstance(entry, Tensor) else entry
            for name, entry in state.items()
        }


def _check_fused(optimizer_class: type[Optimizer]) -> None:
    if "fused" not in inspect.signature(optimizer_class).parameters:
        raise ConfigurationError(
            f"strategy.server_kernels is 'fused', and {optimizer_class.__name__} has no fused kernel; use "
            "'default', or a class that has one, as SGD, Adam, AdamW and Adagrad"
        )
