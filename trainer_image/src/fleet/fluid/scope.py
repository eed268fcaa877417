"""Scopes, which hold the values of persistable variables by name.

Programs in one process that have a variable of the same name share its value, for example a training program
and its clone for tests. The parameters of a training program are those of its PyTorch module.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Scope", "ScopeTensor", "ScopeVariable", "global_scope", "scope_guard"]


class Scope:
    """A mapping of variable names to the values of persistable variables.

    Attributes
    ----------
    values : dict of str to Tensor
        Startup programs create them, and programs change them in place.
    look_ups : dict of str to callable
        For each table on parameter servers, the function that returns its rows by id.

    Notes
    -----
    Paddle's ``fluid.core.Scope``.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.look_ups: dict[str, Callable[..., Tensor]] = {}

    def find_var(self, name: str) -> "ScopeVariable | None":
        """Return a variable, or None if it has no value.

        Parameters
        ----------
        name : str
        """
        return ScopeVariable(self, name) if name in self.values else None

    def var(self, name: str) -> "ScopeVariable":
        """Return a variable, even if it has no value yet.

        Parameters
        ----------
        name : str
        """
        return ScopeVariable(self, name)

    def set(self, name: str, value: Tensor) -> None:
        """Set a variable's value, in place if the shape is unchanged.

        Parameters
        ----------
        name : str
        value : Tensor
        """
        known = self.values.get(name)
        if known is None or known.shape != value.shape:
            self.values[name] = value
        elif known is not value:
            with torch.no_grad():
                # In place, because modules and optimizers hold the same tensor.
                known.copy_(value)


class ScopeVariable:
    """A variable of a scope."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._scope, self._name = scope, name

    def get_tensor(self) -> "ScopeTensor":
        """Return the variable's value as a tensor that can be read and set."""
        return ScopeTensor(self._scope, self._name)


class ScopeTensor:
    """The value of a variable in a scope; ``numpy.array(tensor)`` copies it."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._scope, self._name = scope, name

    def set(self, array: npt.ArrayLike, place: object = None) -> None:  # noqa: ARG002 - Paddle's signature
        """Set the variable's value.

        Parameters
        ----------
        array : array
        place : CPUPlace or CUDAPlace, optional
            Has no effect: the value stays on its device.
        """
        # Copied, because `as_tensor` shares the memory of an array, which the script may change.
        self._scope.set(self._name, torch.as_tensor(np.array(array)))

    def shape(self) -> list[int]:
        """Return the shape of the value."""
        return list(self._scope.values[self._name].shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return a copy of the value."""
        del copy
        return np.array(self._scope.values[self._name].detach().cpu().numpy(), dtype=dtype)


_scope = Scope()


def global_scope() -> Scope:
    """Return the scope in which programs run.

    Notes
    -----
    Paddle's ``fluid.global_scope``.
    """
    return _scope


@contextmanager
def scope_guard(scope: Scope) -> Iterator[None]:
    """Run the programs in the ``with`` block in a different scope.

    Parameters
    ----------
    scope : Scope

    Notes
    -----
    Paddle's ``fluid.scope_guard``.
    """
    global _scope
    outer, _scope = _scope, scope
    try:
        yield
    finally:
        _scope = outer
