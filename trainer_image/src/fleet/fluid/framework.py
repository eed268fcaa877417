"""The part of ``fluid.framework`` that scripts use: programs, variables and device checks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fleet.fluid.building import Layer, ProgramVariable, create_variable
from fleet.fluid.names import missing
from fleet.fluid.program import Program, default_main_program, default_startup_program, program_guard

__all__ = [
    "Parameter",
    "Program",
    "Variable",
    "data",
    "default_main_program",
    "default_startup_program",
    "is_compiled_with_cuda",
    "name_scope",
    "program_guard",
]

Variable = ProgramVariable


class _ParameterKind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProgramVariable) and instance.is_parameter


class Parameter(metaclass=_ParameterKind):
    """The class that scripts use in ``isinstance`` checks to recognize parameters."""


def data(
    name: str, shape: Sequence[int | None], dtype: str = "float32", lod_level: int = 0
) -> ProgramVariable:
    """Declare a variable that is fed with data.

    Parameters
    ----------
    name : str
    shape : sequence of int or None
        None or -1 for sizes that are known only at run time, such as the batch size.
    dtype : str
    lod_level : int
        The number of levels of sequences.

    Returns
    -------
    ProgramVariable

    Notes
    -----
    Paddle's ``fluid.data``; unlike `layers.data`, it adds no dimension for the batch.
    """
    sizes = [-1 if size is None else size for size in shape]
    block = Layer("data", name).block
    return create_variable(block, name, sizes, dtype, lod_level=lod_level, is_data=True, stop_gradient=True)


@contextmanager
def name_scope(prefix: str | None = None) -> Iterator[None]:
    """Do nothing, because a name scope does not affect variable names in Paddle either.

    Parameters
    ----------
    prefix : str, optional
    """
    del prefix
    yield


def is_compiled_with_cuda() -> bool:
    """Return whether PyTorch can use a GPU on this machine."""
    return torch.cuda.is_available()


if not TYPE_CHECKING:
    __getattr__ = missing("")
