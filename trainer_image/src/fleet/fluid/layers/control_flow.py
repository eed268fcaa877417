"""Conditional blocks, for learning-rate schedules.

A block of operators runs if its condition, a variable of one element, is true. Only operators that compute
the learning rate may be conditional.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from fleet.errors import TranspileError
from fleet.fluid import unique_name
from fleet.fluid.building import ProgramVariable, create_variable
from fleet.fluid.ir import OpRole
from fleet.fluid.layers.elements import logical_and, logical_not
from fleet.fluid.program import default_main_program

__all__ = ["Switch"]


class Switch:
    """Runs the first case whose condition is true, else the default case: Paddle's ``fluid.layers.Switch``.

    Parameters
    ----------
    name : str, optional
        Has no effect.

    Raises
    ------
    TranspileError
        It is used outside a schedule of the learning rate.
    """

    def __init__(self, name: str | None = None) -> None:
        del name
        self._inside = False
        self._not_before: ProgramVariable | None = None
        """The variable that is true if no earlier case was true; None before the first case."""

    def __enter__(self) -> Self:
        program = default_main_program()
        if not program.current_role[0] & OpRole.SCHEDULE:
            raise TranspileError(
                "layers.Switch: conditional operators compute only the learning rate; expected it within "
                "fluid.default_main_program()._lr_schedule_guard(). PyTorch's models may use Python's if"
            )
        self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside = False

    @contextmanager
    def case(self, condition: ProgramVariable) -> Iterator[None]:
        """Run the ``with`` block's operators if `condition` is true and no earlier case has run.

        Parameters
        ----------
        condition : ProgramVariable
            Of one element.
        """
        self._check("case")
        before = self._not_before
        negated = logical_not(condition)
        if before is None:
            self._not_before, chosen = negated, condition
        else:
            self._not_before = logical_and(before, negated)
            chosen = logical_and(before, condition)
        with _conditional(chosen):
            yield

    @contextmanager
    def default(self) -> Iterator[None]:
        """Run the ``with`` block's operators if no case has run.

        Raises
        ------
        TranspileError
            There is no earlier case.
        """
        self._check("default")
        if self._not_before is None:
            raise TranspileError(
                "layers.Switch: default() precedes the first case(); expected it after a case()"
            )
        with _conditional(self._not_before):
            yield

    def _check(self, call: str) -> None:
        if not self._inside:
            raise TranspileError(f"layers.Switch: {call}() outside its with block; expected it inside")


@contextmanager
def _conditional(condition: ProgramVariable) -> Iterator[None]:
    """Append the ``with`` block's operators to a new block that runs only if a condition is true."""
    program = default_main_program()
    outer = program.current_block()
    inner = program.create_block(outer.idx)
    program.current_block_idx = inner.idx
    try:
        yield
    finally:
        program.current_block_idx = outer.idx
    read = dict.fromkeys(name for op in inner.ops for name in op.input_arg_names if name not in inner.vars)
    written = dict.fromkeys(
        name for op in inner.ops for name in op.output_arg_names if name not in inner.vars
    )
    scope = create_variable(outer, unique_name.generate("_generated_var"), (), "float32", type="STEP_SCOPES")
    role, about = program.current_role
    inputs = {"Cond": [condition.name], "Input": [name for name in read if name != condition.name]}
    outer.append_op(
        "conditional_block",
        {slot: names for slot, names in inputs.items() if names},
        {"Out": list(written), "Scope": [scope.name]},
        {
            "is_scalar_condition": True,
            "skip_eager_deletion_vars": [],
            "sub_block": {"block": inner.idx},
            "op_role": role,
            "op_role_var": list(about),
        },
    )
