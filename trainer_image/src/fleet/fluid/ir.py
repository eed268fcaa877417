"""The intermediate representation: variables, operators, blocks and programs as data.

Variables and operators are immutable. A block is an ordered, editable list of operators over named variables.
A program is a list of blocks; the first one, the global block, is the parent of the others. Two programs are
equal if their blocks and attributes are equal. Their plans, startup programs and the PyTorch objects behind
them (`Source`) do not count.

This module does not interpret the attributes of operators; the modules that use it do.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from fleet.fluid.training import Training
    from fleet.plan.config import TrainingMode
    from fleet.plan.job import CollectivePlan, JobPlan
    from fleet.plan.source import Source
    from fleet.plan.spec import TrainingSpec

__all__ = [
    "Attribute",
    "Block",
    "OpRole",
    "Operator",
    "ProgramData",
    "Variable",
]

T = TypeVar("T")

Attribute = bool | int | float | str | None | list["Attribute"] | dict[str, "Attribute"]


class OpRole(IntEnum):
    """The roles of operators, with the numbers that Paddle stores in the attribute `op_role`."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZE = 2
    RPC = 4
    DIST = 8
    SCHEDULE = 16
    """The role of operators that compute the learning rate."""
    LOSS = 256
    """A flag of the operator that computes the loss, and of the one that sets the loss's gradient to 1."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A named tensor; fed data of unknown shape and dtype has the shape ``(-1,)`` and the dtype ``any``.

    Attributes
    ----------
    name : str
        Unique in its block.
    shape : tuple of int
        The number of elements in each dimension.
    dtype : str
        The torch dtype's name without its module, such as ``float32``.
    persistable : bool
        Whether it persists from one step to the next, like parameters and optimizer state.
    is_parameter : bool
        Whether the optimizer trains it.
    is_data : bool
        Whether it is fed at run time.
    lod_level : int
        The number of levels of lengths that divide its rows into sequences; 0 if it has none.
    stop_gradient : bool
        Whether gradients end here.
    type : str
        ``LOD_TENSOR`` for a dense tensor, ``SELECTED_ROWS`` for the gradient of some rows of a table.
    trainable : bool
        Of a parameter: whether the optimizer may change it.
    learning_rate : float
        Of a parameter: the factor of the optimizer's learning rate.

    Notes
    -----
    Paddle's ``fluid.framework.Variable``, without arithmetic, which `fleet.fluid.building` adds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    persistable: bool = False
    is_parameter: bool = False
    is_data: bool = False
    lod_level: int = 0
    stop_gradient: bool = False
    type: str = "LOD_TENSOR"
    trainable: bool = True
    learning_rate: float = 1.0

    @property
    def numel(self) -> int:
        """The number of elements in the tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Operator:
    """An operation: input and output variables by slot, and attributes.

    Attributes
    ----------
    type : str
        The kind of operation, such as ``sgd`` or ``send``.
    inputs, outputs : mapping of slot to tuple of variable names
    attrs : mapping of attribute name to plain value

    Notes
    -----
    Paddle's ``fluid.framework.Operator``.
    """

    type: str
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attrs: Mapping[str, Attribute] = field(default_factory=dict)

    @property
    def input_names(self) -> list[str]:
        """The names of this operator's input slots."""
        return list(self.inputs)

    @property
    def output_names(self) -> list[str]:
        """The names of this operator's output slots."""
        return list(self.outputs)

    @property
    def attr_names(self) -> list[str]:
        """The names of this operator's attributes."""
        return list(self.attrs)

    @property
    def input_arg_names(self) -> list[str]:
        """The names of this operator's input variables, slot by slot."""
        return [name for names in self.inputs.values() for name in names]

    @property
    def output_arg_names(self) -> list[str]:
        """The names of this operator's output variables, slot by slot."""
        return [name for names in self.outputs.values() for name in names]

    def input(self, slot: str) -> list[str]:
        """Return the names of the variables in an input slot.

        Parameters
        ----------
        slot : str
            One of `input_names`.

        Returns
        -------
        list of str
            The names, in order.

        Raises
        ------
        ValueError
            There is no such slot.
        """
        return list(self._lookup("input slot", self.inputs, slot))

    def output(self, slot: str) -> list[str]:
        """Return the names of the variables in an output slot.

        Parameters
        ----------
        slot : str
            One of `output_names`.

        Returns
        -------
        list of str
            The names, in order.

        Raises
        ------
        ValueError
            There is no such slot.
        """
        return list(self._lookup("output slot", self.outputs, slot))

    def has_attr(self, name: str) -> bool:
        """Return whether this operator has an attribute of the given name.

        Parameters
        ----------
        name : str
            The attribute's name.
        """
        return name in self.attrs

    def attr(self, name: str) -> Any:
        """Return the value of an attribute of this operator.

        Parameters
        ----------
        name : str
            One of `attr_names`.

        Returns
        -------
        bool, int, float, str, list, dict or None
            A list is a copy.

        Raises
        ------
        ValueError
            There is no attribute of this name.
        """
        value = self._lookup("attribute", self.attrs, name)
        return list(value) if isinstance(value, list) else value

    def renamed(self, names: Mapping[str, str]) -> "Operator":
        """Return a copy of this operator with variables renamed in all slots.

        Parameters
        ----------
        names : mapping of str to str
            New names by old name; a variable that is missing here keeps its name.

        Returns
        -------
        Operator
            A copy.
        """

        def rename(slots: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
            return {slot: tuple(names.get(name, name) for name in held) for slot, held in slots.items()}

        return replace(self, inputs=rename(self.inputs), outputs=rename(self.outputs))

    def _lookup(self, kind: str, table: Mapping[str, T], name: str) -> T:
        if name not in table:
            raise ValueError(
                f"operator {self.type} has no {kind} {name!r}; it has {', '.join(table) or 'none'}"
            )
        return table[name]


@dataclass
class Block:
    """A list of operators in execution order, and the variables they use.

    Attributes
    ----------
    program : Program
        The program that contains the block.
    idx : int
        The block's position in the program.
    parent_idx : int
        The position of the parent block, whose variables this block can use too; -1 if there is none.
    vars : dict of str to Variable
        In order of creation.
    ops : list of Operator
        In order of execution.

    Notes
    -----
    Paddle's ``fluid.framework.Block``.
    """

    program: "ProgramData" = field(repr=False, compare=False)
    idx: int
    parent_idx: int = -1
    vars: dict[str, Variable] = field(default_factory=dict)
    ops: list[Operator] = field(default_factory=list)

    def var(self, name: str) -> Variable:
        """Return the variable with the given name, from this block or else from a parent.

        Parameters
        ----------
        name : str
            The variable's name.

        Returns
        -------
        Variable
            The variable of the nearest block that declares it.

        Raises
        ------
        ValueError
            Neither this block nor a parent declares it.
        """
        block: Block = self
        while name not in block.vars:
            if block.parent_idx < 0:
                raise ValueError(f"block {self.idx} has no variable {name!r}; it has {len(self.vars)} others")
            block = self.program.blocks[block.parent_idx]
        return block.vars[name]

    def has_var(self, name: str) -> bool:
        """Return whether this block itself, not a parent, declares a variable.

        Parameters
        ----------
        name : str
            The variable's name.
        """
        return name in self.vars

    def all_parameters(self) -> list[Variable]:
        """Return this block's parameters, in order of creation."""
        return [variable for variable in self.vars.values() if variable.is_parameter]

    def create_var(self, variable: Variable) -> Variable:
        """Declare a variable in this block.

        Parameters
        ----------
        variable : Variable
            The variable to declare.

        Returns
        -------
        Variable
            The given variable.

        Raises
        ------
        ValueError
            The block already has a variable of this name.
        """
        if variable.name in self.vars:
            raise ValueError(f"block {self.idx} already has a variable {variable.name!r}")
        self.vars[variable.name] = variable
        return variable

    def rename_vars(self, names: Mapping[str, str]) -> None:
        """Rename variables of this block, also in its operators.

        Parameters
        ----------
        names : mapping of str to str
            New names by old name; a variable that is missing here keeps its name.

        Raises
        ------
        ValueError
            Two variables would have the same name.
        """
        renamed = [
            replace(variable, name=names.get(variable.name, variable.name)) for variable in self.vars.values()
        ]
        self.vars = {}
        for variable in renamed:
            self.create_var(variable)
        self.ops[:] = [op.renamed(names) for op in self.ops]

    def append_op(
        self,
        type: str,  # noqa: A002 - Paddle's name
        inputs: Mapping[str, Iterable[str]] | None = None,
        outputs: Mapping[str, Iterable[str]] | None = None,
        attrs: Mapping[str, Attribute] | None = None,
    ) -> Operator:
        """Append an operator; this block or a parent must declare its variables.

        Parameters
        ----------
        type : str
            The operator's type.
        inputs, outputs : mapping of slot to variable names
        attrs : mapping of attribute name to plain value

        Returns
        -------
        Operator
            The operator now at the end of the block.

        Raises
        ------
        ValueError
            A variable is not declared.
        """
        return self.insert_op(len(self.ops), type, inputs, outputs, attrs)

    def insert_op(
        self,
        index: int,
        type: str,  # noqa: A002 - as in append_op
        inputs: Mapping[str, Iterable[str]] | None = None,
        outputs: Mapping[str, Iterable[str]] | None = None,
        attrs: Mapping[str, Attribute] | None = None,
    ) -> Operator:
        """Insert an operator at a given position.

        Parameters
        ----------
        index : int
            The position of the new operator in `ops`.
        type, inputs, outputs, attrs
            As for `append_op`.

        Returns
        -------
        Operator
            The operator, now in the block.

        Raises
        ------
        ValueError
            A variable is not declared.
        """
        op = Operator(
            type,
            {slot: tuple(names) for slot, names in (inputs or {}).items()},
            {slot: tuple(names) for slot, names in (outputs or {}).items()},
            dict(attrs or {}),
        )
        for name in (*op.input_arg_names, *op.output_arg_names):
            self.var(name)
        self.ops.insert(index, op)
        return op


class ProgramData:
    """The content of a program: a list of blocks, of which the first is the global block.

    `fleet.fluid.Program` documents the attributes, because it is the public class.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = [Block(self, 0)]
        self.attrs: dict[str, Attribute] = {}
        self.startup_program: Self | None = None
        self.plan: TrainingSpec | JobPlan | CollectivePlan | None = None
        self.part = "main"
        self.source: Source | None = None
        self.mode: TrainingMode | None = None
        self.checked: Self | None = None
        self.training: Training | None = None
        self.origin: Self | None = None
        self.computation: Any = None
        self.gradient_clip: Any = None
        self.current_role: tuple[int, tuple[str, ...]] = (0, ())
        self.current_block_idx = 0

    def attr(self, name: str) -> Any:
        """Return the value of a program attribute.

        Parameters
        ----------
        name : str
            The attribute's name.

        Returns
        -------
        bool, int, float, str, list, dict or None
            Its value.

        Raises
        ------
        ValueError
            There is no attribute of this name.
        """
        if name not in self.attrs:
            raise ValueError(
                f"the program has no attribute {name!r}; it has {', '.join(self.attrs) or 'none'}"
            )
        return self.attrs[name]

    @property
    def spec(self) -> "TrainingSpec | None":
        """The specification of the training, or None for a program without a plan."""
        spec: TrainingSpec | None = getattr(self.plan, "spec", self.plan)  # type: ignore[arg-type]
        return spec

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the program."""
        return len(self.blocks)

    def global_block(self) -> Block:
        """Return the first block, which is an ancestor of all others."""
        return self.blocks[0]

    def current_block(self) -> Block:
        """Return the block to which layers are appended."""
        return self.blocks[self.current_block_idx]

    @contextmanager
    def roles(self, role: int, variables: Sequence[str] = ()) -> Iterator[None]:
        """Assign a role to operators appended within the ``with`` block.

        Parameters
        ----------
        role : int
            A value of `OpRole`, or a sum of several.
        variables : sequence of str
            The parameter and the gradient that the operators process.
        """
        outer, self.current_role = self.current_role, (int(role), tuple(variables))
        try:
            yield
        finally:
            self.current_role = outer

    def _lr_schedule_guard(self, is_with_opt: bool = False) -> AbstractContextManager[None]:
        """Mark operators appended within the ``with`` block as part of the learning-rate schedule.

        Parameters
        ----------
        is_with_opt : bool
            Whether they are between the operators of the optimizer.

        Notes
        -----
        Paddle's ``Program._lr_schedule_guard``, which scripts with their own schedules call.
        """
        return self.roles(OpRole.SCHEDULE | (OpRole.OPTIMIZE if is_with_opt else 0))

    def block(self, index: int) -> Block:
        """Return the block with the given index.

        Parameters
        ----------
        index : int
            Its position in the program; the global block has index 0.

        Returns
        -------
        Block
            That block.

        Raises
        ------
        IndexError
            There is no such block.
        """
        return self.blocks[index]

    def create_block(self, parent_idx: int = 0) -> Block:
        """Append an empty block, and return it.

        Parameters
        ----------
        parent_idx : int
            The position of the parent, whose variables the new block can use too.

        Returns
        -------
        Block
            The new block, at the end.
        """
        self.blocks.append(Block(self, len(self.blocks), parent_idx))
        return self.blocks[-1]

    def list_vars(self) -> Iterator[Variable]:
        """Return an iterator over the variables of all blocks."""
        for block in self.blocks:
            yield from block.vars.values()

    def all_parameters(self) -> list[Variable]:
        """Return the parameters of all blocks, in order of creation."""
        return [each for block in self.blocks for each in block.all_parameters()]

    def shallow_copy(self) -> Self:
        """Return a new program that shares this program's operators and variables."""
        copy = type(self)()
        copy.blocks = [
            Block(copy, block.idx, block.parent_idx, dict(block.vars), list(block.ops))
            for block in self.blocks
        ]
        return copy

    def clone(self) -> Self:
        """Return an independent copy, with a copy of the startup program and the same PyTorch objects."""
        copy = self.shallow_copy()
        copy.attrs = dict(self.attrs)
        copy.startup_program = self.startup_program.clone() if self.startup_program else None
        copy.plan, copy.part = self.plan, self.part
        copy.source = self.source
        copy.mode = self.mode
        copy.origin, copy.training = self.origin, self.training
        return copy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProgramData):
            return NotImplemented
        return self.blocks == other.blocks and self.attrs == other.attrs

    __hash__ = None  # type: ignore[assignment]  # the list stays editable

    def __repr__(self) -> str:
        ops: Sequence[Operator] = self.global_block().ops
        return f"<Program: {len(self.blocks)} blocks, {len(ops)} operators in the first>"
