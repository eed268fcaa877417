"""The part of ``fluid.compiler`` that scripts use: programs with settings for Paddle's own executor.

PyTorch runs the operators, so the settings have no effect, which is logged once.
"""

import logging
from enum import Enum
from functools import cache
from typing import Any, Self

from fleet.errors import ConfigurationError
from fleet.fluid.program import Program

__all__ = ["BuildStrategy", "CompiledProgram", "ExecutionStrategy", "uncompiled"]

_log = logging.getLogger(__name__)


class BuildStrategy:
    """Settings of Paddle's graph compiler, accepted without effect.

    Notes
    -----
    Paddle's ``fluid.BuildStrategy``.
    """

    class ReduceStrategy(Enum):
        """Paddle's options for reducing gradients over the devices of one process."""

        AllReduce = 0
        Reduce = 1

    class GradientScaleStrategy(Enum):
        """Paddle's options for scaling gradients on the devices of one process."""

        CoeffNumDevice = 0
        One = 1
        Customized = 2

    def __setattr__(self, name: str, value: object) -> None:
        _tell(f"{type(self).__name__}.{name}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return None for an attribute that was never set."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class ExecutionStrategy(BuildStrategy):
    """Settings of Paddle's thread pool, accepted without effect.

    Notes
    -----
    Paddle's ``fluid.ExecutionStrategy``.
    """


class CompiledProgram:
    """A program with Paddle's compiler settings; an executor runs it like a plain program.

    Parameters
    ----------
    program_or_graph : Program
    build_strategy : BuildStrategy, optional
        Has no effect.

    Notes
    -----
    Paddle's ``fluid.CompiledProgram``.
    """

    def __init__(self, program_or_graph: Program, build_strategy: BuildStrategy | None = None) -> None:
        if not isinstance(program_or_graph, Program):
            raise ConfigurationError(
                f"CompiledProgram of {program_or_graph!r}; expected a Program, such as default_main_program()"
            )
        del build_strategy
        self.program = program_or_graph

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: BuildStrategy | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        share_vars_from: "CompiledProgram | None" = None,
        places: Any = None,
    ) -> Self:
        """Return this program unchanged, because each process uses one device.

        Parameters
        ----------
        loss_name, build_strategy, exec_strategy, share_vars_from : optional
            Have no effect.
        places : optional
            At most one place.

        Raises
        ------
        ConfigurationError
            There are several places.
        """
        del loss_name, build_strategy, exec_strategy, share_vars_from
        if isinstance(places, list | tuple) and len(places) > 1:
            raise ConfigurationError(
                f"with_data_parallel: {len(places)} places; expected one: a process has one device, and "
                "python -m fleet.launch starts a process for each"
            )
        _tell("with_data_parallel")
        return self


def uncompiled(program: Program | CompiledProgram) -> Program:
    """Return the program inside a `CompiledProgram`; return any other program unchanged."""
    return program.program if isinstance(program, CompiledProgram) else program


@cache
def _tell(what: str) -> None:
    _log.info("%s has no effect: PyTorch runs the operators, in one process for each device", what)
