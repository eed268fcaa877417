"""The intermediate representation as data: Variables, Operators, Blocks, and the list of them.

Variables and Operators are immutable; a Block is an ordered, editable list of operators over named
variables; a program is a list of Blocks whose first, the global block, is the parent of the others.
Programs are equal when they say the same. Their plan, their startup program and the Python objects behind
them (`Source`) do not count.

The modules above this one know what the attributes of operators mean.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
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
    """The role of an operator, its attribute `op_role`, with the original's numbers."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZE = 2
    RPC = 4
    DIST = 8


@dataclass(frozen=True, slots=True)
class Variable:
    """A named tensor. Data fed at run time has the shape ``(-1,)`` and the dtype ``any``: both unknown.

    Attributes
    ----------
    name : str
        Unique in its block.
    shape : tuple of int
        In elements.
    dtype : str
        As numpy names it, such as ``float32``.
    persistable : bool
        Whether it is there from one step to the next, as parameters and optimizer state are.
    is_parameter : bool
        Whether the optimizer trains it.
    is_data : bool
        Whether it is fed at run time.

    Notes
    -----
    The original's ``fluid.framework.Variable``, without its operators.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    persistable: bool = False
    is_parameter: bool = False
    is_data: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Operator:
    """One step: variables by slot in, variables by slot out, and plain values as attributes.

    Attributes
    ----------
    type : str
        What it does, such as ``sgd`` or ``send``.
    inputs, outputs : mapping of slot to tuple of variable names
    attrs : mapping of attribute name to plain value

    Notes
    -----
    The original's ``fluid.framework.Operator``.
    """

    type: str
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attrs: Mapping[str, Attribute] = field(default_factory=dict)

    @property
    def input_names(self) -> list[str]:
        """The input slots."""
        return list(self.inputs)

    @property
    def output_names(self) -> list[str]:
        """The output slots."""
        return list(self.outputs)

    @property
    def attr_names(self) -> list[str]:
        """The attributes' names."""
        return list(self.attrs)

    @property
    def input_arg_names(self) -> list[str]:
        """All input variables, slot by slot."""
        return [name for names in self.inputs.values() for name in names]

    @property
    def output_arg_names(self) -> list[str]:
        """All output variables, slot by slot."""
        return [name for names in self.outputs.values() for name in names]

    def input(self, slot: str) -> list[str]:
        """Return the variables in an input slot.

        Parameters
        ----------
        slot : str
            One of `input_names`.

        Returns
        -------
        list of str
            Names of variables.

        Raises
        ------
        ValueError
            There is no such slot.
        """
        return list(self._lookup("input slot", self.inputs, slot))

    def output(self, slot: str) -> list[str]:
        """Return the variables in an output slot.

        Parameters
        ----------
        slot : str
            One of `output_names`.

        Returns
        -------
        list of str
            Names of variables.

        Raises
        ------
        ValueError
            There is no such slot.
        """
        return list(self._lookup("output slot", self.outputs, slot))

    def has_attr(self, name: str) -> bool:
        """Whether the operator has an attribute of this name.

        Parameters
        ----------
        name : str
            The attribute's name.
        """
        return name in self.attrs

    def attr(self, name: str) -> Any:
        """Return an attribute's value.

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
        """Return this operator with variables renamed in every slot.

        Parameters
        ----------
        names : mapping of str to str
            Old names to new ones; a variable that is not in it keeps its name.

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
    """An ordered list of operators and the variables they name.

    Attributes
    ----------
    program : Program
        The one that has the block.
    idx : int
        The block's position in the program.
    parent_idx : int
        The position of the block whose variables are known here too; -1 where there is none.
    vars : dict of str to Variable
        In order of creation.
    ops : list of Operator
        In order of execution.

    Notes
    -----
    The original's ``fluid.framework.Block``.
    """

    program: "ProgramData" = field(repr=False, compare=False)
    idx: int
    parent_idx: int = -1
    vars: dict[str, Variable] = field(default_factory=dict)
    ops: list[Operator] = field(default_factory=list)

    def var(self, name: str) -> Variable:
        """Return a variable of this block or, failing that, of its parents.

        Parameters
        ----------
        name : str
            The variable's name.

        Returns
        -------
        Variable
            Of the nearest block that declares it.

        Raises
        ------
        ValueError
            No block up to the outermost one declares it.
        """
        block: Block = self
        while name not in block.vars:
            if block.parent_idx < 0:
                raise ValueError(f"block {self.idx} has no variable {name!r}; it has {len(self.vars)} others")
            block = self.program.blocks[block.parent_idx]
        return block.vars[name]

    def has_var(self, name: str) -> bool:
        """Whether this very block declares a variable of this name.

        Parameters
        ----------
        name : str
            The variable's name.
        """
        return name in self.vars

    def all_parameters(self) -> list[Variable]:
        """Return the block's parameters in order of creation."""
        return [variable for variable in self.vars.values() if variable.is_parameter]

    def create_var(self, variable: Variable) -> Variable:
        """Declare a variable.

        Parameters
        ----------
        variable : Variable
            What to declare.

        Returns
        -------
        Variable
            The same.

        Raises
        ------
        ValueError
            The block has a variable of this name.
        """
        if variable.name in self.vars:
            raise ValueError(f"block {self.idx} has a variable {variable.name!r} already")
        self.vars[variable.name] = variable
        return variable

    def rename_vars(self, names: Mapping[str, str]) -> None:
        """Rename variables, here and in this block's operators.

        Parameters
        ----------
        names : mapping of str to str
            Old names to new ones; a variable that is not in it keeps its name.

        Raises
        ------
        ValueError
            Two variables would have one name.
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
        type: str,  # noqa: A002 - the name that every reader of Programs knows
        inputs: Mapping[str, Iterable[str]] | None = None,
        outputs: Mapping[str, Iterable[str]] | None = None,
        attrs: Mapping[str, Attribute] | None = None,
    ) -> Operator:
        """Append an operator whose variables this block or a parent declares.

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
        """Insert an operator before another one.

        Parameters
        ----------
        index : int
            The position in `ops` that the operator takes.
        type, inputs, outputs, attrs
            As of `append_op`.

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
    """What a program says: blocks of operators, the first of which is the global block.

    Its attributes are described where people meet them, at `fleet.fluid.Program`.
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

    def attr(self, name: str) -> Any:
        """Return one of `attrs`.

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
        """What is trained; None where the program has no plan."""
        spec: TrainingSpec | None = getattr(self.plan, "spec", self.plan)  # type: ignore[arg-type]
        return spec

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def global_block(self) -> Block:
        """Return the first block, parent of all others."""
        return self.blocks[0]

    def block(self, index: int) -> Block:
        """Return the block of this index.

        Parameters
        ----------
        index : int
            Its position in the program; 0 is the global block's.

        Returns
        -------
        Block
            That block.

        Raises
        ------
        IndexError
            There are not as many blocks.
        """
        return self.blocks[index]

    def create_block(self, parent_idx: int = 0) -> Block:
        """Append an empty block.

        Parameters
        ----------
        parent_idx : int
            The position of the block whose variables are known in the new one too.

        Returns
        -------
        Block
            The new block, at the end.
        """
        self.blocks.append(Block(self, len(self.blocks), parent_idx))
        return self.blocks[-1]

    def list_vars(self) -> Iterator[Variable]:
        """Iterate over the variables of all blocks."""
        for block in self.blocks:
            yield from block.vars.values()

    def clone(self) -> Self:
        """Return an independent copy over the same source; its startup program is copied too."""
        copy = type(self)()
        copy.blocks = [
            Block(copy, block.idx, block.parent_idx, dict(block.vars), list(block.ops))
            for block in self.blocks
        ]
        copy.attrs = dict(self.attrs)
        copy.startup_program = self.startup_program.clone() if self.startup_program else None
        copy.plan, copy.part = self.plan, self.part
        copy.source = self.source
        copy.mode = self.mode
        return copy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProgramData):
            return NotImplemented
        return self.blocks == other.blocks and self.attrs == other.attrs

    __hash__ = None  # type: ignore[assignment]  # a list of operators that may change, as any list

    def __repr__(self) -> str:
        ops: Sequence[Operator] = self.global_block().ops
        return f"<Program: {len(self.blocks)} blocks, {len(ops)} operators in the first>"
